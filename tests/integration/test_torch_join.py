"""A torch loop of one's own as a learner, whole or in two processes that share a sharded module."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from skerry.client.loop_thread import LoopThread
from skerry.log.nats.bus import NatsBus
from skerry_syncer.service import stand_by
from tests.support.history import read_history
from tests.support.nats_server import NatsServer

torch: Any = pytest.importorskip("torch")
skerry_torch: Any = pytest.importorskip("skerry.torch")
torch.set_num_threads(1)

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]

CONFIG: Mapping[str, Any] = {
    "data": {"batch": 2, "seq_len": 8},
    "train": {"steps": 40},
    "sync": {"learners": 1, "fragments": 2, "h_steps": 10},
    "log": {"window_bytes": 64 * 1024**2},
    "liveness": {"pulse_s": 0.05},
}
WITHOUT_JAX = """
import sys
for name in ("jax", "jaxlib", "optax"):
    sys.modules[name] = None
import skerry, skerry.torch
assert "torch" not in sys.modules, "nothing is imported before it is asked for"
skerry.torch.join
assert "torch" in sys.modules
"""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep join from configuring the log of the test process."""
    structlog.configure()
    yield
    structlog.reset_defaults()


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("syncer")
    yield made
    made.close()


@pytest.fixture
def syncer(shared_nats: NatsServer, run_id: str, thread: LoopThread) -> None:
    async def live() -> None:
        async with NatsBus(shared_nats.url, name="s") as bus:
            await stand_by(bus, run_id, "s")

    thread.begin(live())


def violations(thread: LoopThread, url: str, run: str) -> tuple[str, ...]:
    async def read() -> tuple[str, ...]:
        async with NatsBus(url, name="audit") as bus:
            return (await read_history(bus, run)).violations

    return thread.result(read())


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


def test_falling_back_clears_the_optimizers_state_of_the_parameters(
    shared_nats: NatsServer, run_id: str, syncer: None
) -> None:
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {**CONFIG, "train": {"steps": 10_000_000}}
    with skerry_torch.join(
        shared_nats.url, run=run_id, name="a", model=model, optimizer=optimizer, config=config
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


def test_a_torch_learners_machine_needs_no_jax_and_nothing_is_imported_early() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.drill
def test_two_processes_of_a_sharded_module_are_one_learner(
    shared_nats: NatsServer, run_id: str, thread: LoopThread, syncer: None, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("sharded.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    store = f"file://{tmp_path / 'store'}"
    command = [sys.executable, str(script), shared_nats.url, run_id, store, json.dumps(CONFIG)]
    both = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    results = [[line for line in text.splitlines() if "ends" in line] for text in said]
    assert results[0] == results[1]
    assert results[0] == ["ends after 80 with 15 rows close to the goal"]
    assert violations(thread, shared_nats.url, run_id) == ()
