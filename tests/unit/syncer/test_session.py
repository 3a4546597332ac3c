"""The syncer's session on a memory broker, with fake learners."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.log import contributions, ledger, run_records
from skerry.log.base import Receipt
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, Round
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.protocol.shard import MOST_REFUSED
from skerry.protocol.subjects import Subjects
from skerry.settings.models import DataConfig, OuterConfig, RunConfig, SyncConfig
from skerry_syncer import run as served
from skerry_syncer.service import stand_by
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import background, header, run_record, until
from tests.support.history import read_history
from tests.support.learners import STEPS, TOKENS, FakeLearner, ScriptedLearner, encode_vector, walk

RUN = "t"
PLAN = plan([LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (20, 64))], 2)
CONFIG = RunConfig(
    data=DataConfig(seq_len=TOKENS, batch=1),
    sync=SyncConfig(
        fragments=2, h_steps=8, merge="average", contribution_scheme="f32", chunk_bytes=4096
    ),
    outer=OuterConfig(preset="direct"),
)


async def connected(config: RunConfig = CONFIG, steps: int = STEPS, **sync: Any) -> MemoryBus:
    changed = {"sync": config.sync.model_copy(update=sync)}
    changed |= {"train": config.train.model_copy(update={"steps": steps})}
    config = config.model_copy(update=changed)
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, config.model_dump_json()))
    return bus


async def commits_until(bus: MemoryBus, version: int) -> list[Commit]:
    """Return all commits up to the one with which both fragments have reached a version."""
    found: list[Commit] = []
    newest: dict[int, int] = {}
    commits = ledger.follow_commits(bus, RUN)
    async with asyncio.timeout(30), aclosing(commits):
        async for _, commit in commits:
            found.append(commit)
            newest[commit.fragment] = commit.version
            if len(newest) == 2 and min(newest.values()) >= version:
                return found
    return found


async def second_version(bus: MemoryBus) -> Commit:
    """Return the first commit after genesis."""
    async with asyncio.timeout(30), aclosing(ledger.follow_commits(bus, RUN)) as commits:
        async for _, commit in commits:
            if commit.version == 2:
                return commit
    raise AssertionError


def fake(bus: MemoryBus, name: str, **changes: Any) -> FakeLearner:
    return FakeLearner(bus, RUN, PLAN, name, step_s=0.005, **changes)


def scripted(bus: MemoryBus, name: str, steps: int = STEPS) -> ScriptedLearner:
    return ScriptedLearner(bus, RUN, PLAN, name, step_s=0.005, steps=steps)


async def violations(bus: MemoryBus) -> tuple[str, ...]:
    return (await read_history(bus, RUN)).violations


async def test_flood_of_bad_bytes_neither_hides_a_refusal_nor_goes_unsaid() -> None:
    bus = await connected()
    for _ in range(MOST_REFUSED + 7):
        await bus.publish(Subjects(RUN).shard(0).contribution(0, "vandal"), b"rubbish")
    early = scripted(bus, "early")
    early.versions[0] = 0
    await early.send_gradient(0, 1)
    with capture_logs() as logs:
        async with background(stand_by(bus, RUN, "s"), fake(bus, "a").train()):
            commits = await commits_until(bus, 2)
    first = next(c for c in commits if c.fragment == 0)
    assert [r.cause for r in first.refused if r.learner == "early"] == ["genesis"]
    assert len(first.refused) == MOST_REFUSED
    (said,) = [line for line in logs if line["event"] == "refusals_unnamed"]
    assert (said["fragment"], said["version"], said["unnamed"]) == (0, 1, {"corrupt": 8})


@pytest.mark.parametrize(
    "poison",
    [math.nan, *(pytest.param(x, marks=pytest.mark.drill) for x in (math.inf, 1e20, -1e4))],
)
async def test_contribution_that_no_training_could_make_is_refused_by_name(poison: float) -> None:
    bus = await connected()
    async with background(stand_by(bus, RUN, "s")):
        sick = scripted(bus, "sick")
        async with background(fake(bus, "a").train()):
            commits = await commits_until(bus, 2)
            sick.versions[0] = commits[-1].version
            await sick.send_gradient(0, commits[-1].version + 1, poison=poison)
            commits = await commits_until(bus, 6)
    assert [(r.cause, r.learner) for c in commits for r in c.refused] == [("diverged", "sick")]
    assert await violations(bus) == ()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
async def test_a_run_begins_with_the_first_initial_parameters_that_are_finite(
    poison: float,
) -> None:
    bus = await connected()
    await scripted(bus, "sick").offer_genesis(poison)
    async with background(stand_by(bus, RUN, "s")), background(fake(bus, "a").train()):
        commits = await commits_until(bus, 2)
    first = [commit for commit in commits if commit.version == 1]
    assert {item.learner for commit in first for item in commit.consumed} == {"a"}
    refused = {(r.cause, r.learner) for commit in first for r in commit.refused}
    assert refused == {("diverged", "sick")}
    assert await violations(bus) == ()


class DistantBus(MemoryBus):
    """A client whose contributions take a while to get there."""

    delay_s = 0.25

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        await asyncio.sleep(self.delay_s if ".contrib." in subject else 0)
        return await super().publish(subject, payload, **options)


def simulated(*clients: type[MemoryBus]) -> list[Commit]:
    """Return what learners with steps of 0.1 s make of three minutes of virtual time."""
    loop = VirtualLoop()

    def now_ns() -> int:
        return round(loop.time() * 1e9)

    async def live() -> list[Commit]:
        broker = MemoryBroker(clock_ns=now_ns)
        bus = broker.connect()
        await bus.declare(specs(RUN))
        await ledger.create_run(bus, run_record(RUN, PLAN, CONFIG.model_dump_json()))
        learners = [
            FakeLearner(client(broker), RUN, PLAN, f"l{n}", step_s=0.1, wall_ns=now_ns).train()
            for n, client in enumerate(clients)
        ]
        async with background(stand_by(bus, RUN, "s", wall_ns=now_ns), *learners):
            return await commits_until(bus, 12)

    task = loop.create_task(live())
    assert loop.run_until(task, 180.0)
    loop.settle()
    loop.close()
    return task.result()


def test_who_misses_rounds_is_waited_for_from_then_on() -> None:
    """A step is waited for at first; the distant one takes two and a half."""
    commits = [c for c in simulated(MemoryBus, MemoryBus, DistantBus) if c.version > 1]
    late = [c for c in commits if any(m.staleness for m in c.consumed)]
    assert late, "nobody was late, so nothing was learnt"
    assert max(c.version for c in late) <= 4
    assert all(len(c.consumed) == 3 for c in commits if c.version > 4)


def test_who_cannot_be_in_time_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round may wait for six steps; this one takes seven."""
    monkeypatch.setattr(DistantBus, "delay_s", 0.7)
    commits = [c for c in simulated(MemoryBus, MemoryBus, DistantBus) if c.version > 1]
    assert any(m.staleness for c in commits for m in c.consumed), "nobody was late"
    assert max(c.grace_s for c in commits) <= 0.15


async def test_round_that_learners_stopped_for_is_on_record_with_its_step() -> None:
    """By the step of one that joined meanwhile, those who stopped would wait for ever."""
    bus = await connected(quorum=2, overlap_steps=0)
    first, second = scripted(bus, "a"), scripted(bus, "b")
    async with background(stand_by(bus, RUN, "s")):
        await first.offer_genesis()
        await commits_until(bus, 1)
        await first.pulse(4)
        async for opened in run_records.follow(bus, RUN, Round, PLAN.digest):
            assert (opened.fragment, opened.due_step) == (1, 4)
            break
        await second.pulse(1)
        for learner in (first, second):
            learner.versions[1] = 1
            await learner.send_gradient(1, 2)
        commit = await second_version(bus)
    assert (commit.fragment, commit.step) == (1, 4)
    assert {c.learner for c in commit.consumed} == {"a", "b"}


@pytest.mark.parametrize("norm", [1e6, 1e300])
async def test_norm_that_the_values_do_not_have_is_refused_and_nobody_else(norm: float) -> None:
    bus = await connected(merge="rda", quorum=2)
    learners = [fake(bus, name).train() for name in ("a", "b")]
    async with background(stand_by(bus, RUN, "s"), *learners):
        await commits_until(bus, 2)
        last = await ledger.last_commits(bus, RUN)
        await send_boasting(bus, PLAN, last[1].version, norm=norm)
        commits = await commits_until(bus, 6)
    assert ("diverged", "boaster") in [(r.cause, r.learner) for c in commits for r in c.refused]
    assert {c.learner for k in commits for c in k.consumed} == {"a", "b"}


def overflowing() -> optax.GradientTransformation:
    """An outer optimizer of one's own, which no gradient above 10 can pass."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        return jax.tree.map(lambda g: jnp.where(abs(g) > 10, jnp.inf, -g), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


async def test_contribution_that_makes_the_step_infinite_is_refused_alone(
    allow_code: Callable[..., None],
) -> None:
    allow_code(__name__)
    outer = OuterConfig(preset=f"{__name__}:overflowing")
    bus = await connected(CONFIG.model_copy(update={"outer": outer}))
    refused: set[str] = set()
    learners = [fake(bus, name).train() for name in ("a", "b")]
    async with (
        background(stand_by(bus, RUN, "s"), *learners),
        asyncio.timeout(30),
        aclosing(ledger.follow_commits(bus, RUN)) as commits,
    ):
        async for _, commit in commits:
            refused |= {r.learner for r in commit.refused if r.cause == "diverged"}
            if refused:
                break
            if commit.fragment == 1:  # what comes too late is merged as stale, or refused
                await send_boasting(bus, PLAN, commit.version, scale=2e3)
    assert refused == {"boaster"}


async def test_round_in_which_nothing_counts_still_ends_for_those_who_answered() -> None:
    bus = await connected()
    alone = fake(bus, "a", poisoned_below=3)
    async with background(stand_by(bus, RUN, "s"), alone.train()):
        commits = await commits_until(bus, 5)
    assert await violations(bus) == ()
    refused = [c for c in commits if c.reason == "nothing_counts"]
    mine = [c for c in refused if c.fragment == 0]
    assert [(c.version, c.consumed) for c in mine] == [(2, ())]
    assert [(r.cause, r.learner, r.incarnation) for r in mine[0].refused] == [("diverged", "a", 1)]


async def test_rounds_without_a_quorum_are_known_as_such_whatever_becomes_of_their_answers() -> (
    None
):
    """Final ones and those of which nothing counts: no K-th contribution was waited for there."""
    bus = await connected(steps=400, quorum=2, round_timeout_s=0.5)
    async with background(fake(bus, "a", steps=400, poisoned_below=3).train()):
        await asyncio.wait_for(stand_by(bus, RUN, "s"), 30)
    last = await ledger.last_commits(bus, RUN)
    commits = await commits_until(bus, min(c.version for c in last.values()))
    rounds = [c for c in commits if c.version > 1]
    assert next(c.consumed for c in rounds if c.fragment == 0) == ()
    assert {c.reason for c in rounds} <= WITHOUT_QUORUM
    assert [(c.final, c.reason) for c in last.values()] == [(True, "short_handed")] * 2
    assert await violations(bus) == ()


async def test_round_in_the_air_when_training_ends_closes_before_the_final_one() -> None:
    """Whoever has answered it has taken steps since, and answers a version only once."""
    bus = await connected(steps=20)
    learner = scripted(bus, "a", steps=20)
    await learner.offer_genesis()
    seen: list[tuple[int, bool]] = []
    rounds = run_records.follow(bus, RUN, Round, PLAN.digest)
    async with asyncio.timeout(30), background(stand_by(bus, RUN, "s")), aclosing(rounds):
        await commits_until(bus, 1)
        await learner.pulse(step=10)
        opened = await anext(rounds)
        await learner.pulse(step=20)
        learner.versions = {0: 1, 1: 1}
        await asyncio.sleep(0.1)  # time enough to do the wrong thing
        await learner.send_gradient(opened.fragment, opened.version)
        async for later in rounds:
            if later.fragment == opened.fragment and (later.version, later.final) not in seen:
                seen.append((later.version, later.final))
            if later.fragment == opened.fragment and later.final:
                break
    assert not opened.final
    assert seen[-1] == (opened.version + 1, True)


async def until_waiting(bus: MemoryBus, name: str) -> dict[int, Commit]:
    """Return the newest commits once a learner has sent what none of them has merged."""
    contrib = bus.broker.streams[Subjects(RUN).shard(0).stream("CONTRIB")]
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.2)  # time for what can be merged to be
            last = await ledger.last_commits(bus, RUN)
            sent = {f: contrib.newest[Subjects(RUN).shard(0).contribution(f, name)] for f in last}
            if all(sent[fragment] > commit.contrib_floor for fragment, commit in last.items()):
                return last


@pytest.mark.parametrize("anew", [False, True])
async def test_contribution_that_left_the_log_unread_is_offered_again(*, anew: bool) -> None:
    """It waited for a second one when its syncer went, and was gone before the next one came.

    It had left its stream, or the stream is another one (``anew``), which counts from 1 again.
    """
    bus = await connected(quorum=2, round_timeout_s=600.0)
    contrib = bus.broker.streams[Subjects(RUN).shard(0).stream("CONTRIB")]
    async with background(fake(bus, "a").train()):
        async with background(stand_by(bus, RUN, "s")):
            async with background(fake(bus, "b").train()):
                await commits_until(bus, 3)
            last = await until_waiting(bus, "a")
        ends = contrib.last_seq
        for sequence in tuple(contrib.records):
            contrib.drop(sequence)
        if anew:
            del bus.broker.streams[Subjects(RUN).shard(0).stream("CONTRIB")]
            await bus.declare(specs(RUN))
        with capture_logs() as lines:
            async with background(stand_by(bus, RUN, "s"), fake(bus, "b").train()):
                commits = await commits_until(bus, max(c.version for c in last.values()) + 1)
    (gone,) = [line for line in lines if line["event"] == "contributions_gone"]
    assert gone["versions"] == {fragment: c.version for fragment, c in last.items()}
    if not anew:
        floor = min(commit.contrib_floor for commit in last.values())
        assert (gone["first_sequence"], gone["last_sequence"]) == (floor + 1, ends)
    for fragment, before in last.items():
        (after,) = [c for c in commits if (c.fragment, c.version) == (fragment, before.version + 1)]
        assert {c.learner for c in after.consumed} == {"a", "b"}
        assert after.reason == "all_arrived"


async def send_boasting(
    bus: MemoryBus, cut: Plan, base: int, *, norm: float = 0.0, scale: float = 1.0
) -> None:
    """Contribute a gradient ``scale`` times as long as usual that claims a norm (0: none)."""
    fragment = cut.fragments[-1]
    sent = header(
        base,
        "boaster",
        fragment=fragment.index,
        base_version=base,
        steps=10,
        norms=(norm,) * len(fragment.slices) if norm else (),
    )
    chunks = encode_vector("f32", walk(fragment, "boast") * np.float32(scale), 4096)
    await contributions.Sender(bus, RUN, cut).send(sent, chunks)


async def test_syncer_without_learners_says_so_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "ALONE_S", 0.01)
    bus = await connected()
    with capture_logs() as logs:
        async with background(stand_by(bus, RUN, "s")):
            await until(lambda: any(line["event"] == "waits_for_learners" for line in logs))
    (said,) = [line for line in logs if line["event"] == "waits_for_learners"]
    assert f"skerry learner --run {RUN}" in said["hint"]
