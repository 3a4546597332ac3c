"""A view follows a log from its beginning, and knows what is new and what is not read yet."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.liveness import Liveness
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBroker
from skerry.protocol.messages import CheckpointRecord, Commit, Evaluation, RunState
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.status import sources
from skerry.status.feed import RunFeed, read_model
from skerry.status.report import RunReport
from skerry.status.sources import RunMessage, Sources
from tests.support.builders import (
    background,
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    pulse,
    refused,
    until,
)
from tests.support.log import begin_anew
from tests.support.scripted_run import ScriptedRun

DEADLINE_S = 20.0


@asynccontextmanager
async def following(feed: RunFeed) -> AsyncGenerator[None]:
    """Follow the log while the context lasts."""
    async with background(feed.run()) as (task,):
        yield
        assert not task.done()


async def report_once(feed: RunFeed, wanted: Callable[[RunReport], bool]) -> RunReport:
    """Return the first report that is wanted."""
    async with asyncio.timeout(DEADLINE_S):
        while (now := feed.report()) is None or not wanted(now):  # noqa: ASYNC110 - it reads the log
            await asyncio.sleep(0)
    return now


def broker_behind(ago_s: list[float]) -> MemoryBroker:
    """Return a broker whose clock is behind by ``ago_s[0]``."""
    return MemoryBroker(clock_ns=lambda: time.time_ns() - int(ago_s[0] * 1e9))


async def test_the_newest_round_is_as_old_as_the_broker_says_whatever_its_syncers_clock() -> None:
    """A scripted run closes its rounds in 1970."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    at_once = (await read_model(scripted.bus, "run")).snapshot().report
    feed = RunFeed(scripted.bus, "run")
    async with following(feed):
        now = await report_once(feed, lambda now: now.run.rounds >= 3)
    for shown in (at_once, now):
        assert shown.run.last_round_s_ago is not None
        assert shown.run.last_round_s_ago < 60


async def test_a_learner_whose_clock_is_years_behind_is_alive_at_a_single_look() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.bus.publish(Subjects("run").pulse("late"), encode(pulse("late", sent_ns=1)))
    rows = (await read_model(scripted.bus, "run")).snapshot().report.learners
    assert [row.liveness for row in rows if row.name == "late"] == [Liveness.ALIVE]


async def test_a_record_that_says_another_run_in_the_same_log_is_left_out() -> None:
    """Whoever may end a run may publish its record, and only its state may change."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    record = await ledger.read_run(scripted.bus, "run")
    forged = replace(record, created_ns=record.created_ns + 1)
    feed = RunFeed(scripted.bus, "run")
    async with following(feed):
        await feed.begun.wait()
        model = feed.model
        await scripted.bus.publish(Subjects("run").ledger("run"), encode(forged))
        await scripted.bus.publish(
            Subjects("run").ledger("run"), encode(replace(record, state=RunState.FINISHED))
        )
        async with asyncio.timeout(DEADLINE_S):
            await feed.finished.wait()
        assert feed.model is model


@pytest.mark.parametrize("behind_s", [0.0, 600.0, -600.0])
async def test_a_single_look_says_who_is_gone_whatever_the_brokers_clock_says(
    behind_s: float,
) -> None:
    ago_s = [behind_s + 60.0]
    scripted = await ScriptedRun.begin(broker_behind(ago_s).connect())
    await run_records.publish(scripted.bus, pulse("dead", sent_ns=1))
    ago_s[0] = behind_s
    await run_records.publish(scripted.bus, pulse("here", sent_ns=1))
    rows = (await read_model(scripted.bus, "run")).snapshot().report.learners
    found = {row.name: row.liveness for row in rows}
    assert (found["dead"], found["here"]) == (Liveness.GONE, Liveness.ALIVE)


async def test_a_long_ledger_raises_no_alert_of_what_is_only_not_read_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read from its first commit, it looks for a while as if nothing had come since."""
    ago_s = [21 * 86_400.0]
    scripted = await ScriptedRun.begin(broker_behind(ago_s).connect())
    losses = (2.0, 5.0, 5.0, 5.0, 1.9)
    for version, loss in enumerate(losses, 1):
        ago_s[0] = 0.0 if version == len(losses) else ago_s[0] - 10.0
        await scripted.commit_all(step=version)
        held_out = evaluation(versions=(version,) * 3, loss=loss, evaluated_ns=version)
        await ledger.record_evaluation(scripted.bus, held_out)
    here = pulse("a", 40, incarnation=3, sent_ns=time.time_ns(), alive_s=9e5, busy_s=15.0)
    await run_records.publish(scripted.bus, here)

    follow = Sources.follow
    most: dict[type, int] = {Commit: 12, Evaluation: 4}

    async def some(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        messages = follow(self, kind)
        async with aclosing(messages):
            for _ in range(most.get(kind, sys.maxsize)):
                yield await anext(messages)
            await asyncio.Event().wait()

    def partly_read(now: RunReport) -> bool:
        at_work = any(row.at_work for row in now.learners)
        return now.run.rounds >= 12 and len(now.evaluations) >= 4 and at_work

    monkeypatch.setattr(Sources, "follow", some)
    feed = RunFeed(scripted.bus, "run")
    async with following(feed):
        now = await report_once(feed, partly_read)
    assert feed.model is not None
    wrong = {alert.key for alert in feed.model.snapshot().alerts}
    assert not wrong & {"no-commit", "held-out"}
    assert (now.run.counting, feed.model.view.evaluations.incomplete) == (True, True)
    assert (now.run.versions[:3], now.run.step) == ((5, 5, 5), 40)


async def test_what_a_checkpoint_lacks_is_known_though_it_is_read_after_a_long_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ago_s = [3600.0]
    scripted = await ScriptedRun.begin(broker_behind(ago_s).connect())
    await scripted.commit_all(step=1)
    written_ns = time.time_ns() - 3600 * 10**9
    written = checkpoint_record("/c", versions=(1, 1, 1), written_ns=written_ns)
    await ledger.record_checkpoint(scripted.bus, written)
    ago_s[0] = 5.0
    await scripted.commit(0)

    follow = Sources.follow

    async def no_checkpoint(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        async for found in follow(self, kind):
            if kind is not CheckpointRecord:
                yield found

    monkeypatch.setattr(Sources, "follow", no_checkpoint)
    feed = RunFeed(scripted.bus, "run")
    async with following(feed):
        now = await report_once(feed, lambda now: not now.run.counting)
    assert now.run.checkpoint_lacks == 1
    assert now.run.checkpoint_lacks_s < 60


@pytest.mark.parametrize("off_s", [0, 86_400, -660])
async def test_a_learner_that_started_again_and_again_is_flapping_to_a_view_that_begins_later(
    off_s: int,
) -> None:
    """And to one that only looks once, whatever the clock of the learner's host says."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    off_ns = off_s * 10**9
    joined = [
        await ledger.join(scripted.bus, "run", "flaps", "host", time.time_ns() + off_ns)
        for _ in range(4)
    ]
    here = pulse("flaps", 40, incarnation=joined[-1].incarnation, sent_ns=0)
    await run_records.publish(scripted.bus, here)
    time_s = [time.time()]
    once = await read_model(scripted.bus, "run", lambda: time_s[0])
    feed = RunFeed(scripted.bus, "run", clock_s=lambda: time_s[0])
    async with following(feed):
        await until(lambda: feed.model and feed.model.history.lately.starts(0)["flaps"] >= 3)
    assert feed.model is not None
    for later_s, expected in ((0.0, True), (601.0, False)):
        time_s[0] += later_s
        for model in (once, feed.model):
            keys = {alert.key for alert in model.snapshot().alerts}
            assert ("flapping-flaps" in keys) is expected


async def test_a_round_that_comes_is_new_though_the_brokers_clock_is_an_hour_behind() -> None:
    """So is what it refuses."""
    scripted = await ScriptedRun.begin(broker_behind([3600.0]).connect())
    await scripted.commit_all()
    feed = RunFeed(scripted.bus, "run")

    async def ago_s(rounds: int) -> float:
        now = await report_once(feed, lambda now: now.run.rounds >= rounds)
        assert now.run.last_round_s_ago is not None
        return now.run.last_round_s_ago

    async with following(feed):
        assert await ago_s(3) > 3500
        await scripted.commit_all()
        assert await ago_s(6) < 60
        refusing = commit(3, consumed=(consumed(),), refused=(refused(learner="b"),))
        await scripted.bus.publish(Subjects("run").commit(0), encode(refusing))
        assert await ago_s(7) < 60
        assert feed.model is not None
        assert feed.model.history.lately.refused(time.time()) == {"too_stale": 1}


async def test_a_log_that_begins_again_begins_the_view_again() -> None:
    broker = MemoryBroker()
    first = await ScriptedRun.begin(broker.connect())
    for step in range(3):
        await first.commit_all(step=step)
    feed = RunFeed(broker.connect(), "run")

    def reads(versions: tuple[int, ...], rounds: int) -> bool:
        now = feed.snapshot()
        if now is None or now.report.run.versions[:3] != versions:
            return False
        merged = sum(row.merged for row in now.model.history.timeline.rounds.values())
        return (now.report.run.rounds, merged) == (rounds, rounds)

    async with following(feed):
        await until(lambda: reads((3, 3, 3), 9))
        begin_anew(broker)
        second = await ScriptedRun.begin(broker.connect())
        await second.commit_all(step=5)
        await until(lambda: reads((1, 1, 1), 3))


@pytest.mark.parametrize("readable", [0, 1, 2])
async def test_a_single_look_shows_what_can_be_read_where_the_newest_cannot(readable: int) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(2):
        await scripted.commit_all(step=step)
    for fragment in range(readable, 3):
        await scripted.bus.publish(Subjects("run").commit(fragment), b"noise")
    await scripted.bus.publish(Subjects("run").ledger("checkpoint"), b"noise")
    await scripted.finish()
    model = await asyncio.wait_for(read_model(scripted.bus, "run"), DEADLINE_S)
    assert (model.view.rounds, model.view.checkpoint) == (6, None)


async def test_a_single_look_leaves_out_the_middle_of_a_long_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    for fragment in (0, 0, 2, 1, 0, 1, 0, 1, 0):
        await scripted.commit(fragment, step=40)
    whole = (await read_model(scripted.bus, "run")).view
    monkeypatch.setattr(sources, "LOOKED", 4)
    model = await read_model(scripted.bus, "run")
    now = model.snapshot().report.run
    assert [row.sequence for row in model.history.timeline.rounds.values()] == [
        *range(2, 5),
        7,
        *range(10, 14),
    ]
    assert (now.rounds, now.versions, now.step) == (whole.rounds, (6, 4, 2), 40)
    assert (now.counting, whole.skipped) == (True, False)
    assert model.view.last_commit == whole.last_commit


async def test_a_run_that_ends_while_its_ledger_is_read_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record of its end comes before commits that were not there when the reading began."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    follow, ended = Sources.follow, asyncio.Event()

    async def late(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        read = 0
        async for found in follow(self, kind):
            if kind is Commit and read == 3:
                await ended.wait()
            read += 1
            yield found

    monkeypatch.setattr(Sources, "follow", late)
    feed = RunFeed(scripted.bus, "run")
    async with following(feed):
        await report_once(feed, lambda now: now.run.rounds >= 3)
        await scripted.commit_all(step=1)
        await scripted.finish()
        await until(lambda: feed.view and feed.view.finished)
        assert not feed.finished.is_set()
        ended.set()
        await asyncio.wait_for(feed.finished.wait(), DEADLINE_S)
        assert feed.view is not None
        assert feed.view.rounds == 6
