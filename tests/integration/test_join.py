"""A training loop of one's own as a learner: real broker, real syncer, a model of three lines."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
import pytest
from safetensors.flax import save_file
from structlog.testing import capture_logs

import skerry
from skerry.client.jax_inner import flat
from skerry.client.jax_island import JaxIsland
from skerry.client.loop_thread import LoopThread
from skerry.errors import (
    BrokerUnavailable,
    ConfigError,
    ModelError,
    RunFinished,
    RunMismatch,
    SkerryError,
    Superseded,
)
from skerry.settings import loading
from skerry.settings.models import RunConfig, TrainConfig
from tests.support.builders import wait_until
from tests.support.joins import BATCH, CONFIG, ENDLESS, SEQ, STEPS, violations
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120), pytest.mark.usefixtures("quiet")]

SYNC = {"diloco": {"learners": 2, "h_steps": 10}, "data-parallel": {"learners": 2}}
GOAL = np.linspace(-1.0, 1.0, 300, dtype=np.float32)


@pytest.fixture
def asked(shared_nats: NatsServer, run_id: str) -> dict[str, Any]:
    """What a learner joins with: a run without an end, but for one test."""
    return {"url": shared_nats.url, "run": run_id, "name": "a", "config": ENDLESS}


def initial(fill: float = 0.0) -> dict[str, Any]:
    return {"layer": {"w": jnp.full((20, 15), fill), "bias": jnp.zeros((7,))}}


@jax.jit
def train_step(params: Any) -> tuple[Any, jax.Array]:
    """Go a tenth of the way to the goal."""
    away = params["layer"]["w"] - GOAL.reshape(20, 15)
    moved = params["layer"]["w"] - jnp.float32(0.1) * away
    return {"layer": {**params["layer"], "w": moved}}, jnp.mean(away**2)


def weights(params: Any) -> np.ndarray[Any, Any]:
    return np.array(params["layer"]["w"])


def donated(array: Any) -> Any:
    """Return an array that a program was given."""
    array.delete()
    return array


def train(island: JaxIsland, params: Any) -> Any:
    while not island.done:
        params, loss = train_step(params)
        params = island.step(params, tokens=BATCH * SEQ, loss=loss)
    return params


def test_loop_trains_its_run_to_the_end_and_holds_the_last_global_state(
    syncer: None, asked: dict[str, Any], thread: LoopThread
) -> None:
    asked["config"] = CONFIG
    with skerry.join(params=initial(), **asked) as island:
        assert (island.start, island.shard, island.progress) == (0, 0, 0.0)
        train(island, island.params)
        assert island.cursor == STEPS * BATCH
    assert island.config.model.preset == "own"
    own = TrainConfig()  # and not what small built-in models are trained with
    assert (island.config.train.inner, island.config.train.lr) == (own.inner, own.lr)
    assert np.abs(weights(island.params).ravel() - GOAL).max() < 0.1
    assert min(island.versions) > 1
    assert violations(thread, asked["url"], asked["run"]) == ()
    with pytest.raises(RunFinished, match="is finished"), skerry.join(params=initial(), **asked):
        pass


def test_config_of_says_which_run_it_waits_for_and_needs_none_of_its_text(
    syncer: None, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "refuse_data", pytest.fail)
    data = {**ENDLESS["data"], "source": "text", "paths": ["/elsewhere"]}
    asked["config"] = {**ENDLESS, "data": data}
    found = list[RunConfig]()
    with capture_logs() as said:
        reader = threading.Thread(
            target=lambda: found.append(skerry.config_of(asked["url"], run=asked["run"])),
            daemon=True,
        )
        reader.start()
        waits = [asked["run"]] * 2  # the syncer and this loop
        wait_until(
            lambda: [line["run"] for line in said if "right?" in line.get("hint", "")] == waits
        )
        with skerry.join(params=initial(), **asked):
            reader.join()
    assert found[0].data.paths == ("/elsewhere",)


def test_the_lines_of_the_page_are_a_learner(
    syncer: None, asked: dict[str, Any], thread: LoopThread
) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/join.md").read_text()
    (lines,) = re.findall(r"^```python\n(import skerry\n\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = lines.replace("nats://hub:4222", asked["url"]).replace("main", asked["run"])

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        params, loss = train_step(params)
        return params, opt_state, loss

    batch = np.zeros((BATCH, SEQ))
    names: dict[str, Any] = {"params": initial(), "optimizer": optax.adam(1e-3), "loader": [batch]}
    exec(lines, names | {"train_step": step, "config": CONFIG})  # noqa: S102 - our own page
    assert violations(thread, asked["url"], asked["run"]) == ()


def test_the_page_puts_exported_tensors_back_into_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/join.md").read_text()
    found = re.findall(r"^  ```python\n(.*?)^  ```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    held = {"layers": [initial(0.5)["layer"], initial(2.0)["layer"]]}
    save_file(flat(held), "out/model.safetensors")
    names: dict[str, Any] = {"params": jax.tree.map(jnp.zeros_like, held)}
    exec(dedent(found[0]), names)  # noqa: S102 - our own page
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, names["params"], held)))


def test_who_joins_later_begins_with_the_values_of_the_log_and_where_its_data_goes_on(
    syncer: None, asked: dict[str, Any], thread: LoopThread
) -> None:
    with skerry.join(params=initial(0.5), **asked) as island:
        np.testing.assert_array_equal(weights(island.params), 0.5)
        params = island.params
        while min(island.versions) < 3:
            params, loss = train_step(params)
            params = island.step(params, tokens=BATCH * SEQ, loss=loss)
    used = island.cursor
    with skerry.join(params=initial(9.0), **asked) as island:
        assert 0 < island.start <= used
        params, loss = train_step(initial(9.0))  # a loop that has not asked for the log's values
        params = island.step(params, tokens=BATCH * SEQ, loss=loss)
        assert weights(params).max() < 2.0
        assert island.cursor == island.start, "a step from other parameters counts for nothing"
    assert violations(thread, asked["url"], asked["run"]) == ()


@pytest.mark.parametrize("mode", ["diloco", pytest.param("data-parallel", marks=pytest.mark.drill)])
def test_modes_that_block_hold_the_loops_together(
    syncer: None, asked: dict[str, Any], thread: LoopThread, mode: str
) -> None:
    config = {**CONFIG, "mode": mode, "sync": SYNC[mode]}
    cursors: dict[str, int] = {}

    def live(name: str) -> None:
        mine: dict[str, Any] = {**asked, "name": name, "config": config}
        with skerry.join(params=initial(), **mine) as island:
            train(island, island.params)
            cursors[name] = island.cursor

    loops = [threading.Thread(target=live, args=(name,)) for name in "ab"]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(60)
    assert cursors == {"a": STEPS * BATCH, "b": STEPS * BATCH}
    assert violations(thread, asked["url"], asked["run"]) == ()


def test_values_that_are_not_finite_are_put_out_by_the_global_state(
    syncer: None, asked: dict[str, Any]
) -> None:
    with skerry.join(params=initial(0.5), **asked) as island:
        params, fell_back = island.params, False
        poisoned = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
        while not fell_back:
            params = island.step(poisoned, tokens=BATCH * SEQ, loss=jnp.float32(math.nan))
            poisoned = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
            fell_back = island.fell_back
        np.testing.assert_array_equal(weights(params), 0.5)


def test_another_of_the_same_name_ends_the_loop_of_the_first(
    syncer: None, asked: dict[str, Any]
) -> None:
    with ExitStack() as second:

        def steps() -> None:
            with skerry.join(params=initial(), **asked) as first:
                params = first.params
                second.enter_context(skerry.join(params=initial(), **asked))
                for _ in range(10_000):
                    params, loss = train_step(params)
                    params = first.step(params, tokens=0, loss=loss)

        with pytest.raises(Superseded, match="Give each learner a name of its own"):
            steps()


def test_a_loop_that_loses_its_name_before_its_first_step_says_so(
    syncer: None, asked: dict[str, Any]
) -> None:
    state = {"count": jnp.int32(0)}
    with ExitStack() as second:

        def steps() -> None:
            with skerry.join(params=initial(), **asked) as first:
                params = first.params
                second.enter_context(skerry.join(params=initial(), **asked))
                wait_until(lambda: first.done)
                assert first.restored(state) is state
                first.step(params, tokens=0, loss=0.0, state=state)

        with pytest.raises(Superseded, match="Give each learner a name of its own"):
            steps()


def test_the_first_tensor_that_differs_from_the_runs_is_named(
    syncer: None, asked: dict[str, Any]
) -> None:
    other = {"layer": {"w": jnp.zeros((20, 14)), "bias": jnp.zeros((7,))}}
    with (
        skerry.join(params=initial(), **asked),
        pytest.raises(RunMismatch, match=r"layer\.w is \[20, 15\] in the run and \[20, 14\] here"),
        skerry.join(params=other, **asked),
    ):
        pass


def test_learner_that_is_used_outside_its_block_says_so() -> None:
    island = skerry.join("nats://127.0.0.1:1", run="r", params=initial())
    with pytest.raises(ConfigError, match="use it in a block"):
        island.step(initial(), tokens=1, loss=0.0)


def test_no_broker_is_one_sentence() -> None:
    config = {"nats": {"connect_timeout_s": 0.5}}
    island = skerry.join("nats://127.0.0.1:1", run="r", params=initial(), config=config)
    with pytest.raises(BrokerUnavailable, match=r"nats\.url"), island:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "skerry"]


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"config": {"train": {"stepz": 1}}}, "stepz"),
        ({"config": {"train": {"steps": 0}}}, r"train\.steps"),
        ({"name": "a.b"}, "learner"),
        ({"units": {"layer.v": 2}}, r"units names 'layer\.v'"),
        ({"name": 3}, "learner 3 cannot be part of a subject"),
        ({"params": {"w": jnp.zeros((2,), jnp.int32)}}, "float32"),
        ({"params": {}}, "empty"),
        ({"params": jax.eval_shape(initial)}, r"layer\.bias has no values \(ShapeDtypeStruct\)"),
        ({"params": {"w": donated(jnp.zeros((2,)))}}, r"no values \(donated float32 \[2\] on"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_anything_is_connected(
    changes: dict[str, Any], about: str
) -> None:
    given: dict[str, Any] = {"url": "nats://127.0.0.1:1", "params": initial(), "run": "r"} | changes
    with pytest.raises(SkerryError, match=about):
        skerry.join(**given)


def test_claims_that_the_run_rules_out_are_refused_where_they_are_made(
    syncer: None, asked: dict[str, Any]
) -> None:
    with skerry.join(params=initial(), **asked) as island:
        params = island.params
        with pytest.raises(ConfigError, match="trained on 17 tokens, and the run allows 16"):
            island.step(params, tokens=17, loss=0.0)
        params = island.step(params, tokens=16, loss=0.0, cursor=10)
        with pytest.raises(ConfigError, match="used so far, 10 or more: not 9"):
            island.step(params, tokens=16, loss=0.0, cursor=9)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (
            lambda w: w.T,
            r"layer\.w is float32 \[20, 15\] on \S+ in the run, and float32 \[15, 20\]",
        ),
        (lambda w: w.astype(jnp.bfloat16), r"bfloat16 \[20, 15\]"),
        (np.array, "ndarray"),
        (lambda _: None, "missing"),
        (donated, "donated float32"),
        (lambda w: [w], r"layer\.w is float32 \[20, 15\] on \S+ in the run, and missing"),
    ],
)
def test_a_step_with_another_tree_than_the_runs_is_refused_at_once(
    syncer: None, asked: dict[str, Any], change: Callable[[Any], Any], about: str
) -> None:
    with skerry.join(params=initial(), **asked) as island:
        params = island.params
        changed = {"layer": {**params["layer"], "w": change(jnp.copy(params["layer"]["w"]))}}
        with pytest.raises(ModelError, match=about):
            island.step(changed, tokens=1, loss=0.0)
        with pytest.raises(ModelError, match="outside of jit"):
            jax.jit(lambda p: island.step(p, tokens=1, loss=0.0))(params)
        assert island.cursor == 0


def test_a_learner_that_has_left_joins_again_with_the_values_of_the_log(
    syncer: None, asked: dict[str, Any]
) -> None:
    learner = skerry.join(params=initial(), **asked)
    with learner:
        pass
    with learner as island:
        stale = initial(9.0)
        assert weights(island.step(stale, tokens=1, loss=0.0)).max() == 0.0
        assert island.cursor == 0
        donated(island.params["layer"]["w"])
    with pytest.raises(ModelError, match=r"layer\.w has no values"), learner:
        pass


def test_a_loop_that_forbids_transfers_answers_and_adopts(
    syncer: None, asked: dict[str, Any]
) -> None:
    with skerry.join(params=initial(), **asked) as island, jax.transfer_guard("disallow"):
        params = island.params
        while min(island.versions) < 2:
            params = island.step(params, tokens=1, loss=0.0)


def test_batches_go_on_behind_those_that_were_used_and_begin_again(
    syncer: None, asked: dict[str, Any]
) -> None:
    with skerry.join(params=initial(), **asked) as island:
        params, seen = island.params, list[int]()
        for batch in island.batches([10, 11, 12]):
            seen.append(batch)
            params = island.step(params, tokens=1, loss=0.0)
            if len(seen) == 5:
                break
        assert seen == [10, 11, 12, 10, 11]
        assert island.cursor == 5 * BATCH
        assert next(iter(island.batches(lambda cursor: iter([cursor])))) == 5 * BATCH
        with pytest.raises(ConfigError, match="gives no batch"):
            next(iter(island.batches([])))


def test_batches_are_read_in_parts_and_each_by_as_many_steps_as_the_loop_takes(
    syncer: None, asked: dict[str, Any]
) -> None:
    loader = iter(range(10, 20))
    with skerry.join(params=initial(), **asked) as island:
        params, seen, cursors = island.params, list[int](), list[int]()
        for steps in (1, 3):
            for batch in islice(island.batches(loader), 2):
                seen.append(batch)
                for _ in range(steps):
                    params = island.step(params, tokens=1, loss=0.0)
                cursors.append(island.cursor)
        seen += islice(island.batches(loader), 2)  # two batches make one step
        params = island.step(params, tokens=1, loss=0.0)
        assert seen == [10, 11, 12, 13, 14, 15]
        assert [*cursors, island.cursor] == [BATCH * used for used in (1, 2, 3, 4, 6)]
        island.step(params, tokens=1, loss=0.0)
        assert island.cursor == 7 * BATCH, "a loop without batches uses some in each step"


def test_the_optimizers_state_is_there_again_after_a_restart(
    syncer: None, asked: dict[str, Any], tmp_path: Path
) -> None:
    asked["config"] = {**ENDLESS, "learner": {"save_every_s": 0.01}}
    fresh = {"count": jnp.int32(0), "mu": jnp.zeros((3,)), "step": 0, "key": jax.random.key(0)}
    later = {"count": jnp.int32(1), "mu": jnp.ones((3,)), "step": 1, "key": jax.random.key(1)}
    saved = tmp_path / "learners" / asked["run"] / "a" / "inner.state"
    with skerry.join(params=initial(), **asked) as island:
        with pytest.raises(
            ModelError, match="name of the optimizer's state is no array but 'adam'"
        ):
            island.restored({"name": "adam"})
        params, state = island.params, island.restored(fresh)
        assert state is fresh, "nothing was saved"
        while not saved.exists():
            params = island.step(params, tokens=1, loss=0.0, state=later)
    with skerry.join(params=initial(), **asked) as island:
        state = island.restored(fresh)
        assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, state, later)))
        with pytest.raises(ConfigError, match="once, before the first step"):
            island.restored(fresh)
    with skerry.join(params=initial(), **asked) as island:
        assert island.restored({"mu": jnp.zeros((4,))})["mu"].shape == (4,), "another optimizer"
