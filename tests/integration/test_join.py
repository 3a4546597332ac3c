"""A training loop of one's own as a learner: real broker, real syncer, a model of three lines."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog

import skerry
from skerry.client.jax_island import JaxIsland
from skerry.client.loop_thread import LoopThread
from skerry.errors import (
    BrokerUnavailable,
    ConfigError,
    RunFinished,
    RunMismatch,
    SkerryError,
    Superseded,
)
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry_syncer.service import stand_by
from tests.support.history import read_history
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.timeout(120)]

BATCH, SEQ, STEPS = 2, 8, 40
CONFIG: Mapping[str, Any] = {
    "data": {"batch": BATCH, "seq_len": SEQ},
    "train": {"steps": STEPS},
    "sync": {"learners": 1, "fragments": 2, "h_steps": 10},
    "log": {"window_bytes": 64 * 1024**2},
    "liveness": {"pulse_s": 0.05},
}
ENDLESS = {**CONFIG, "train": {"steps": 10_000_000}}
GOAL = np.linspace(-1.0, 1.0, 300, dtype=np.float32)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep join from configuring the log of the test process."""
    structlog.configure()
    yield
    structlog.reset_defaults()


@pytest.fixture
def syncer(shared_nats: NatsServer, run_id: str) -> Iterator[None]:
    thread = LoopThread("syncer")

    async def live() -> None:
        async with NatsBus(shared_nats.url, name="s") as bus:
            await stand_by(bus, run_id, "s")

    living = thread.begin(live())
    yield
    living.cancel()
    thread.close()


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


def train(island: JaxIsland, params: Any) -> Any:
    while not island.done:
        params, loss = train_step(params)
        params = island.step(params, tokens=BATCH * SEQ, loss=loss)
    return params


async def violations(bus: Bus, run: str) -> tuple[str, ...]:
    return (await read_history(bus, run)).violations


def audit(url: str, run: str) -> tuple[str, ...]:
    thread = LoopThread("audit")

    async def read() -> tuple[str, ...]:
        async with NatsBus(url, name="audit") as bus:
            return await violations(bus, run)

    try:
        return thread.result(read())
    finally:
        thread.close()


def test_loop_trains_its_run_to_the_end_and_holds_the_last_global_state(
    syncer: None, asked: dict[str, Any]
) -> None:
    asked["config"] = CONFIG
    with skerry.join(params=initial(), **asked) as island:
        assert (island.start, island.shard, island.progress) == (0, 0, 0.0)
        train(island, island.params)
        assert island.cursor == STEPS * BATCH
    assert np.abs(weights(island.params).ravel() - GOAL).max() < 0.1
    assert min(island.versions) > 1
    assert audit(asked["url"], asked["run"]) == ()
    with pytest.raises(RunFinished, match="is finished"), skerry.join(params=initial(), **asked):
        pass


def test_the_lines_of_the_page_are_a_learner(syncer: None, asked: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/join.md").read_text()
    (lines,) = re.findall(r"^```python\n(import skerry\n\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = lines.replace("nats://hub:4222", asked["url"]).replace("main", asked["run"])

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        params, loss = train_step(params)
        return params, opt_state, loss

    batch = np.zeros((BATCH, SEQ))
    names: dict[str, Any] = {"params": initial(), "opt_state": None, "loader": [batch]}
    exec(lines, names | {"train_step": step, "config": CONFIG})  # noqa: S102 - our own page
    assert audit(asked["url"], asked["run"]) == ()


def test_who_joins_later_begins_with_the_values_of_the_log_and_where_its_data_goes_on(
    syncer: None, asked: dict[str, Any]
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
    assert audit(asked["url"], asked["run"]) == ()


def test_modes_that_block_hold_the_loops_together(syncer: None, asked: dict[str, Any]) -> None:
    config = {**CONFIG, "mode": "diloco", "sync": {"learners": 2, "h_steps": 10}}
    cursors: dict[str, int] = {}

    def live(name: str) -> None:
        mine: dict[str, Any] = {**asked, "name": name, "config": config}
        with skerry.join(params=initial(), **mine) as island:
            train(island, island.params)
            cursors[name] = island.cursor

    both = [threading.Thread(target=live, args=(name,)) for name in "ab"]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert cursors == {"a": STEPS * BATCH, "b": STEPS * BATCH}
    assert audit(asked["url"], asked["run"]) == ()


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
        ({"params": {"w": jnp.zeros((2,), jnp.int32)}}, "float32"),
        ({"params": {}}, "empty"),
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
        with pytest.raises(ConfigError, match="went back from 10 to 9"):
            island.step(params, tokens=16, loss=0.0, cursor=9)


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
        assert next(iter(island.batches(lambda cursor: iter([cursor])))) == 0
        with pytest.raises(ConfigError, match="gives no batch"):
            next(iter(island.batches([])))
