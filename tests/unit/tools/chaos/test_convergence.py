"""What has to happen after healing, on a log that is written by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import StateLost
from skerry.log import ledger, recovery, run_records
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit
from skerry_tools.chaos.checks import Check, CommitCheck, Convergence
from tests.support.builders import (
    checkpoint_record,
    commit,
    consumed,
    run_record,
    syncer_pulse,
    until,
)

RUN = "r"
PLAN = plan([LeafSpec("w", (4, 4))], 1)
KINDS = {"a": "learner", "b": "learner", "s": "syncer", "c": "checkpointer"}
SHORT_S = 0.2
LONG_S = 30.0


async def connected() -> MemoryBus:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, "{}"))
    return bus


def merged(version: int, *learners: str, **changes: Any) -> Commit:
    rows = tuple(consumed(name, version) for name in learners)
    return commit(version, run=RUN, plan_digest=PLAN.digest, consumed=rows, **changes)


async def answering(bus: MemoryBus, *names: str) -> None:
    """Publish pulses of these syncers for as long as the test lasts."""
    for sent_ns in itertools.count(1):
        for name in names:
            shards = (0,) if name == "s" else ()
            pulse = syncer_pulse(name, run=RUN, sent_ns=sent_ns, shards=shards)
            await run_records.publish(bus, pulse)
        await asyncio.sleep(0.01)


async def judged(
    bus: MemoryBus,
    deadline_s: float,
    damaged: frozenset[str] = frozenset(),
    answers: tuple[str, ...] = ("s",),
    kinds: dict[str, str] = KINDS,
) -> dict[str, Check]:
    async def damage(path: str) -> str:
        return "it is damaged" if path in damaged else ""

    waiting = Convergence(bus, RUN, kinds, damage, after=1)
    pulsing = asyncio.create_task(answering(bus, *answers))
    try:
        return {check.name: check for check in await waiting.checks(deadline_s)}
    finally:
        pulsing.cancel()


async def test_a_cluster_in_which_everybody_works_has_converged() -> None:
    bus = await connected()
    await recovery.append_commit(bus, merged(1, "a"))
    await recovery.append_commit(bus, merged(2, "b"))
    await ledger.record_checkpoint(bus, checkpoint_record("whole", run=RUN, versions=(1,)))
    told = await judged(bus, LONG_S)
    assert all(check.ok for check in told.values())
    assert told["a checkpoint verifies"].detail == "whole"


async def test_a_learner_that_stays_silent_is_named() -> None:
    bus = await connected()
    await recovery.append_commit(bus, merged(1, "a"))
    told = await judged(bus, SHORT_S)
    assert told["a contributes"].ok
    assert not told["b contributes"].ok
    assert "nothing of it was merged" in told["b contributes"].detail


async def test_a_stand_by_has_to_answer_though_another_syncer_commits() -> None:
    bus = await connected()
    await recovery.append_commit(bus, merged(1, "a", "b"))
    await ledger.record_checkpoint(bus, checkpoint_record("whole", run=RUN, versions=(1,)))
    two = KINDS | {"t": "syncer"}
    old = syncer_pulse("t", run=RUN, host="", shards=(0,))
    await run_records.publish(bus, old)
    told = await judged(bus, SHORT_S, kinds=two)
    assert (told["s answers"].ok, told["s answers"].detail) == (True, "holds shards 0")
    assert not told["t answers"].ok
    told = await judged(bus, LONG_S, kinds=two, answers=("s", "t"))
    assert (told["t answers"].ok, told["t answers"].detail) == (True, "stands by")


async def test_a_syncer_that_only_says_goodbye_has_not_answered() -> None:
    bus = await connected()
    two = KINDS | {"t": "syncer"}
    await run_records.publish(bus, syncer_pulse("t", run=RUN, shards=(0,)))
    waiting = asyncio.create_task(judged(bus, SHORT_S, kinds=two))
    await asyncio.sleep(SHORT_S / 2)
    await run_records.publish(bus, syncer_pulse("t", run=RUN, sent_ns=2, host=""))
    assert not (await waiting)["t answers"].ok


async def test_what_cannot_be_watched_is_a_failed_check_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: object, **__: object) -> AsyncGenerator[None]:
        for _nothing in range(0):
            yield
        msg = "Stream SKERRY_r_LEDGER is not in this log."
        raise StateLost(msg)

    bus = await connected()
    await ledger.record_checkpoint(bus, checkpoint_record("whole", run=RUN, versions=(1,)))
    monkeypatch.setattr(ledger, "follow_commits", broken)
    monkeypatch.setattr(ledger, "wait_finished", lambda *_: anext(broken()))
    told = await judged(bus, SHORT_S)
    assert not told["commits can be watched"].ok
    assert not told["the run's end can be watched"].ok
    assert told["a checkpoint verifies"].ok


async def test_a_commit_by_a_syncer_that_is_gone_is_no_sign_of_life() -> None:
    bus = await connected()
    await recovery.append_commit(bus, merged(1, "a", "b", syncer="dead"))
    assert not (await judged(bus, SHORT_S))["a syncer that runs commits"].ok


async def test_a_damaged_checkpoint_does_not_count_but_a_later_whole_one_does() -> None:
    bus = await connected()
    await recovery.append_commit(bus, merged(1, "a", "b"))
    await ledger.record_checkpoint(bus, checkpoint_record("broken", run=RUN, versions=(1,)))
    told = await judged(bus, SHORT_S, frozenset({"broken"}))
    assert told["a checkpoint verifies"].detail.startswith("it is damaged")
    await ledger.record_checkpoint(bus, checkpoint_record("whole", run=RUN, versions=(1,)))
    assert (await judged(bus, LONG_S, frozenset({"broken"})))["a checkpoint verifies"].ok


async def test_in_a_finished_run_nobody_has_anything_left_to_do() -> None:
    bus = await connected()
    await ledger.finish_run(bus, await ledger.read_run(bus, RUN))
    assert all(check.ok for check in (await judged(bus, LONG_S)).values())


async def test_the_commit_check_misses_what_is_gone_or_has_changed() -> None:
    bus = await connected()
    commits = CommitCheck(bus, RUN)
    watching = asyncio.create_task(commits.watch(0))
    await recovery.append_commit(bus, merged(1, "a"))
    await recovery.append_commit(bus, merged(2, "a"))
    await until(lambda: len(commits.seen) >= 2, LONG_S)
    watching.cancel()
    assert await commits.lost() == []
    first, second = commits.seen
    commits.seen[second] = b"something else"
    commits.seen[second + 7] = commits.seen[first]
    assert await commits.lost() == [second, second + 7]
