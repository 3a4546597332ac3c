"""A torch loop of one's own as a learner, whole or in two processes that share a sharded module."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from skerry.client.inner_file import read_file
from skerry.client.loop_thread import LoopThread
from skerry.errors import BrokerUnavailable, ConfigError, ModelError
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry_syncer.service import stand_by
from tests.support.builders import wait_until
from tests.support.joins import CONFIG, ENDLESS, violations
from tests.support.nats_server import NatsServer
from tests.support.several import Several

torch: Any = pytest.importorskip("torch")
skerry_torch: Any = pytest.importorskip("skerry.torch")
PendingLoss: Any = pytest.importorskip("skerry.client.torch_island").PendingLoss
torch.set_num_threads(1)

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.usefixtures("quiet")]

WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "optax"):
    sys.modules[name] = None
import skerry, skerry.torch
assert "torch" not in sys.modules, "nothing is imported before it is asked for"
skerry.torch.join
assert "torch" in sys.modules
"""


def module() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(20, 15)


def test_loop_trains_its_run_to_the_end_in_place(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None
) -> None:
    model = module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, optimizer=optimizer, config=CONFIG
    ) as island:
        for _ in island.batches(range(7)):
            loss = ((model.weight - 1.0) ** 2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=16, loss=loss)
    assert island.cursor == 80
    assert model.weight is weight, "parameters change in place"
    assert np.abs(weight.detach().numpy() - 1.0).max() < 0.1
    assert violations(thread, shared_nats.url, run_id) == ()


def test_tokens_and_loss_may_be_any_one_number(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None
) -> None:
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=module(), config=CONFIG
    ) as island:
        while not island.done:
            for tokens in (np.int64(3), 3.0, torch.tensor(3), torch.tensor([3])):
                island.step(tokens=tokens, loss=torch.ones(1))
    assert violations(thread, shared_nats.url, run_id) == ()


def test_what_is_no_number_is_refused_at_its_step_and_no_step_is_taken_after_the_block(
    shared_nats: NatsServer, run_id: str, syncer: None
) -> None:
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=module(), config=ENDLESS
    ) as island:
        for tokens in (None, "3", 2.5, math.nan, math.inf, -1, torch.ones(2)):
            with pytest.raises(ConfigError, match="tokens are how many it trained on"):
                island.step(tokens=tokens, loss=1.0)
        for loss in (None, {"loss": 1.0}, torch.ones(2)):
            with pytest.raises(ConfigError, match="loss is one number"):
                island.step(tokens=3, loss=loss)
    with pytest.raises(ConfigError, match="has left its run"):
        island.step(tokens=3, loss=1.0)


def test_a_loss_on_a_device_is_read_on_the_host_whatever_the_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here no device is needed: the copy and its event are made on the host."""
    done = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: host)
    loss = torch.tensor([2.5])
    with torch.device("meta"):
        assert float(PendingLoss(loss)) == 2.5


def replace_a_parameter(model: Any) -> None:
    model.weight = torch.nn.Parameter(torch.zeros(15, 20))


def resize(model: Any) -> None:
    """Do as transformers' ``resize_token_embeddings`` does."""
    model.weight.data = torch.zeros(15, 30)


def unfreeze(model: Any) -> None:
    model.bias.requires_grad_()


def load_in_place_of(model: Any) -> None:
    model.load_state_dict(module().state_dict(), assign=True)


@pytest.mark.parametrize("change", [replace_a_parameter, resize, unfreeze, load_in_place_of])
def test_a_module_that_trains_other_parameters_than_it_joined_with_is_refused_at_the_next_step(
    shared_nats: NatsServer, run_id: str, syncer: None, change: Any
) -> None:
    model = module()
    model.bias.requires_grad_(requires_grad=False)
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, config=ENDLESS
    ) as island:
        island.step(tokens=3, loss=1.0)
        change(model)
        name = "bias" if change is unfreeze else "weight"
        with pytest.raises(ModelError, match=f"Parameter {name} is not as it was at join"):
            island.step(tokens=3, loss=1.0)


def test_parameters_that_are_frozen_after_join_or_moved_to_another_type_are_followed(
    shared_nats: NatsServer, run_id: str, syncer: None
) -> None:
    model = module()
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, config=CONFIG
    ) as island:
        model.bias.requires_grad_(requires_grad=False)
        model.to(torch.bfloat16)
        for _ in island.batches(range(7)):
            island.step(tokens=3, loss=1.0)
    assert model.bias.dtype is torch.bfloat16


def test_what_wraps_a_module_adds_nothing_to_the_names_of_its_parameters() -> None:
    parallel = torch.nn.DataParallel(module())
    for wrapped in (parallel, torch.nn.ModuleDict({"_orig_mod": parallel})):  # as by torch.compile
        island = skerry_torch.join("nats://127.0.0.1:1", model=wrapped)
        assert [leaf.name for leaf in island._joining.leaves] == ["bias", "weight"]


def test_an_optimizer_of_another_module_is_refused_before_anything_is_connected() -> None:
    other = torch.optim.SGD(module().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="optimizer trains no parameter of the model"):
        skerry_torch.join("nats://127.0.0.1:1", model=module(), optimizer=other)


def test_what_is_no_optimizer_is_refused_before_anything_is_connected() -> None:
    model = module()
    each = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    schedule = torch.optim.lr_scheduler.StepLR(each[0], 1)
    for optimizer in (each, schedule, "sgd"):
        with pytest.raises(ConfigError, match="optimizer must be one of torch's"):
            skerry_torch.join("nats://127.0.0.1:1", model=model, optimizer=optimizer)


def test_falling_back_clears_the_optimizers_state_of_the_parameters(
    shared_nats: NatsServer, run_id: str, syncer: None
) -> None:
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, optimizer=optimizer, config=ENDLESS
    ) as island:
        first = model.weight.detach().clone()
        (model.weight * torch.nan).sum().backward()
        optimizer.step()
        assert optimizer.state
        for _ in range(20):
            island.step(tokens=16, loss=math.nan)
            if island.fell_back:
                break
        assert torch.equal(model.weight.detach(), first)
        assert not optimizer.state


def test_the_optimizers_state_is_there_again_after_a_restart(
    shared_nats: NatsServer, run_id: str, syncer: None, tmp_path: Path
) -> None:
    saved = tmp_path / "learners" / run_id / "a" / "inner.state"
    asked: dict[str, Any] = {"url": shared_nats.url, "run": run_id, "name": "a"}
    asked["config"] = {**ENDLESS, "learner": {"save_every_s": 0.01}}
    model = module().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = list[Any]()
    with skerry_torch.join(model=model, optimizer=optimizer, **asked) as island:
        assert not optimizer.state
        while not saved.exists():
            (model.weight.float() ** 2).sum().backward()
            optimizer.step()
            seen.append(optimizer.state[model.weight]["exp_avg"].clone())
            island.step(tokens=16, loss=0.0)
    model = module().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    with skerry_torch.join(model=model, optimizer=optimizer, **asked):
        state = optimizer.state[model.weight]
        assert torch.equal(state["exp_avg"], seen[int(state["step"]) - 1]), "of one moment"
        assert optimizer.param_groups[0]["lr"] == 0.2, "its settings are the program's"
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with skerry_torch.join(model=model, optimizer=other, **asked):
        assert not other.state, "of another optimizer"


def test_a_learner_that_leaves_while_the_broker_is_away_says_so(
    nats_server: NatsServer, run_id: str, thread: LoopThread
) -> None:
    async def live() -> None:
        async with NatsBus(nats_server.url, name="s") as bus:
            await stand_by(bus, run_id, "s")

    thread.begin(live())
    asked = {"run": run_id, "config": {**ENDLESS, "shutdown_s": 0.25}}
    island = skerry_torch.join(nats_server.url, name="a", model=module(), **asked).__enter__()
    nats_server.kill()
    with pytest.raises(BrokerUnavailable, match="took this learner's goodbye for 0"):
        island.__exit__(None, None, None)


def of_run(thread: LoopThread, url: str, run: str) -> Any:
    async def read() -> Any:
        async with NatsBus(url, name="test") as bus:
            return await ledger.read_run(bus, run)

    return thread.result(read())


class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined] # torch counts as untyped
    """A frozen matrix in eight bits, and a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(300, dtype=torch.uint8).reshape(15, 20)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(2, 20))
        self.up = torch.nn.Parameter(torch.zeros(15, 2))

    def forward(self, rows: Any) -> Any:
        return rows @ (self.codes / 256.0 + self.up @ self.down).T


def test_adapters_beside_a_quantised_model_are_all_that_is_exchanged(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None
) -> None:
    model = Adapted()
    codes = model.codes.clone()
    optimizer = torch.optim.AdamW([model.down, model.up], lr=0.01)
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, optimizer=optimizer, config=CONFIG
    ) as island:
        for _ in island.batches(range(7)):
            loss = (model(torch.eye(20)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=16, loss=loss)
    assert torch.equal(model.codes, codes)
    assert model.up.abs().max() > 0
    record = of_run(thread, shared_nats.url, run_id)
    assert [leaf.name for leaf in record.leaves if leaf.trainable] == ["down", "up"]
    assert violations(thread, shared_nats.url, run_id) == ()


def test_a_torch_learners_machine_needs_no_jax_and_nothing_is_imported_early() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def ranks(url: str, run: str, folder: Path, config: dict[str, Any]) -> Several:
    """Start two processes of one learner."""
    environment = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    arguments = url, run, f"file://{folder / 'store'}", json.dumps(config)
    script = Path(__file__).with_name("sharded.py")
    return Several(folder, script, *arguments, environment=environment)


@pytest.mark.drill
def test_two_processes_of_a_sharded_module_are_one_learner(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None, tmp_path: Path
) -> None:
    with ranks(shared_nats.url, run_id, tmp_path / "ranks", dict(CONFIG)) as both:
        assert both.ended() == [0, 0], both.said()
        assert both.said("ends") == [["ends after 80 with 15 rows close to the goal"]] * 2
        assert both.said("computes") == [["computes with what it holds: True"]] * 2
    assert violations(thread, shared_nats.url, run_id) == ()


@pytest.mark.drill
def test_two_processes_are_killed_and_go_on_with_their_optimizers_state(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None, tmp_path: Path
) -> None:
    asked = shared_nats.url, run_id
    config: dict[str, Any] = {**ENDLESS, "learner": {"save_every_s": 0.2}}
    folder = tmp_path / "learners" / run_id / "a"
    files = [[folder / f"inner-{n}-of-2.{kept}" for kept in ("state", "before")] for n in (0, 1)]
    with ranks(*asked, tmp_path / "first", config) as both:
        wait_until(lambda: all(file.exists() for each in files for file in each))
        both.processes[1].kill()
        assert both.processes[0].wait(30) == 1
        assert "error: Process 1 of this learner is lost" in both.said("error:")[0][0]
    sums = [dict(map(saved_momentum, filter(Path.exists, each))) for each in files]
    newest = max(sums[0].keys() & sums[1].keys())
    with ranks(*asked, tmp_path / "second", config) as both:
        wait_until(lambda: all(both.said("begins")))
        assert both.said("begins") == [[f"begins with {each[newest]!r}"] for each in sums]
    assert violations(thread, shared_nats.url, run_id) == ()


def saved_momentum(path: Path) -> tuple[int, float]:
    """Return the step of a save and the sum of the momentum in it."""
    saved, tensors = read_file(path, None)
    return saved.step, sum(float(tensor.astype(np.float64).sum()) for tensor in tensors.values())
