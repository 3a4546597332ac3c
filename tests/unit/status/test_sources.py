"""What viewers take in of a log into which anybody may have written anything."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from math import inf, nan

import pytest

from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import CheckpointRecord, Commit, Evaluation, Pulse, Round
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.status import sources
from skerry.status.sources import MessageCounts, Sources
from tests.support.builders import (
    checkpoint_record,
    commit,
    evaluation,
    member,
    ns,
    pulse,
    round_,
    until,
)
from tests.support.log import begin_anew

RUN = "run"
P = 2
NAMES = Subjects(RUN)
STORED_S = 50.0
PULSE = pulse(steps=1, versions=(1, 1))
ROUND = round_()
COMMIT = commit(1)


async def connected() -> MemoryBus:
    bus = MemoryBroker(clock_ns=lambda: int(STORED_S * 1e9)).connect()
    await bus.declare(specs(RUN))
    return bus


async def pulses(bus: MemoryBus, counts: MessageCounts, count: int) -> list[Pulse]:
    """Return the first pulses that are taken in."""
    taken: list[Pulse] = []
    async with asyncio.timeout(10), aclosing(Sources(bus, RUN, counts, P).follow(Pulse)) as found:
        async for seen in found:
            taken.append(seen.message)
            if len(taken) == count:
                break
    return taken


async def test_a_pulse_that_names_more_fragments_than_there_are_is_left_out() -> None:
    bus, counts = await connected(), MessageCounts()
    huge = replace(PULSE, learner="huge", versions=(1,) * (P + 1))
    for told in (huge, PULSE):
        await bus.publish(NAMES.pulse(told.learner), encode(told))
    assert await pulses(bus, counts, 1) == [PULSE]
    assert counts.malformed == {"pulse": 1}


@pytest.mark.parametrize("record", [evaluation(), checkpoint_record()])
def test_a_record_of_more_fragments_than_there_are_is_left_out(
    record: Evaluation | CheckpointRecord,
) -> None:
    assert MessageCounts().fits(replace(record, versions=(1,) * P), P)
    assert not MessageCounts().fits(replace(record, versions=(1,) * (P + 1)), P)


async def test_names_beyond_the_most_are_left_out_and_those_before_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "MOST_LEARNERS", 3)
    bus, counts = await connected(), MessageCounts()
    for number in (1, 2, 3, 4, 5):
        told = replace(PULSE, learner=f"l{number}")
        await bus.publish(NAMES.pulse(told.learner), encode(told))
    assert [p.learner for p in await pulses(bus, counts, 3)] == ["l1", "l2", "l3"]
    joined = member("late")
    assert counts.fits(joined, P), "names that only pulse keep out nobody who joins"
    await bus.publish(NAMES.pulse("l1"), encode(replace(PULSE, learner="l1", steps=9)))
    assert (await pulses(bus, counts, 3))[-1].steps == 9
    assert counts.malformed == {"pulse": 2}


@pytest.mark.parametrize(
    ("told", "subject"),
    [
        (replace(ROUND, fragment=P), NAMES.round(P)),
        (replace(ROUND, fragment=1), NAMES.round(0)),
        (replace(COMMIT, fragment=2**40), NAMES.commit(2**40)),
    ],
)
async def test_what_is_of_no_fragment_or_of_another_than_its_subjects_is_left_out(
    told: Round | Commit, subject: str
) -> None:
    bus, counts, kind = await connected(), MessageCounts(), type(told)
    right = replace(told, fragment=1)
    await bus.publish(subject, encode(told))
    await bus.publish(NAMES.round(1) if kind is Round else NAMES.commit(1), encode(right))
    async with asyncio.timeout(10), aclosing(Sources(bus, RUN, counts, P).follow(kind)) as found:
        assert (await anext(found)).message == right
    assert counts.malformed == {kind.__name__.lower(): 1}


@pytest.mark.parametrize("odd", [nan, inf, -1.0])
async def test_a_time_that_cannot_be_is_left_out_with_what_tells_it(odd: float) -> None:
    bus, counts = await connected(), MessageCounts()
    for told in (replace(PULSE, recover_s=odd), replace(PULSE, learner="b", loss=odd)):
        await bus.publish(NAMES.pulse(told.learner), encode(told))
    assert [pulse.learner for pulse in await pulses(bus, counts, 1)] == ["b"]
    for done in (replace(COMMIT, merge_s=odd), replace(COMMIT, version=2)):
        await bus.publish(NAMES.commit(0), encode(done))
    async with asyncio.timeout(10), aclosing(Sources(bus, RUN, counts, P).follow(Commit)) as found:
        first = await anext(found)
    assert first.message.version == 2
    assert counts.malformed == {"pulse": 1, "commit": 1}


async def test_what_is_left_out_while_we_watch_is_new_whatever_the_brokers_clock_says() -> None:
    bus, counts = await connected(), MessageCounts()
    await bus.publish(NAMES.round(1), b"noise")
    reading = Sources(bus, RUN, counts, P, lambda: STORED_S + 3600.0)
    async with asyncio.timeout(10), aclosing(reading.follow(Round)) as found:
        first = asyncio.ensure_future(anext(found))
        await until(lambda: counts.malformed)
        await bus.publish(NAMES.round(1), b"more noise")
        await bus.publish(NAMES.round(0), encode(ROUND))
        assert (await first).at_s == STORED_S + 3600.0
    assert list(counts.lately) == [STORED_S, STORED_S + 3600.0]


async def test_what_is_left_out_is_new_after_a_broker_that_lost_its_memory_too() -> None:
    """Its streams in memory count from 1 again, below what was there when we began to watch."""
    broker = MemoryBroker(clock_ns=lambda: int(STORED_S * 1e9))
    bus, counts = broker.connect(), MessageCounts()
    await bus.declare(specs(RUN))
    for _ in range(5):
        await bus.publish(NAMES.pulse("a"), encode(PULSE))
    reading = Sources(bus, RUN, counts, P, lambda: STORED_S + 3600.0)
    async with asyncio.timeout(10), aclosing(reading.follow(Pulse)) as found:
        assert (await anext(found)).at_s == STORED_S
        second = asyncio.ensure_future(anext(found))
        await asyncio.sleep(0)
        begin_anew(broker)
        await bus.publish(NAMES.pulse("noise"), b"noise")
        await bus.publish(NAMES.pulse("a"), encode(replace(PULSE, steps=9)))
        assert (await second).at_s == STORED_S + 3600.0
    assert list(counts.lately) == [STORED_S + 3600.0]


async def test_history_is_as_old_as_the_broker_says_whatever_its_senders_clock_says() -> None:
    bus = await connected()
    await bus.publish(NAMES.pulse("a"), encode(replace(PULSE, sent_ns=1)))
    await bus.publish(NAMES.commit(0), encode(replace(COMMIT, closed_ns=ns(9 * STORED_S))))
    reading = Sources(bus, RUN, MessageCounts(), P, lambda: STORED_S + 1.0)
    (pulsed,) = await reading.newest(Pulse)
    (committed,) = [seen async for seen in reading.stored(Commit)]
    assert (pulsed.at_s, committed.at_s) == (STORED_S, STORED_S)


async def test_what_was_left_out_counts_for_as_long_as_it_is_new() -> None:
    bus, counts = await connected(), MessageCounts()
    await bus.publish(NAMES.pulse("noise"), b"noise")
    await bus.publish(NAMES.pulse("a"), encode(PULSE))
    await pulses(bus, counts, 1)
    assert (counts.since(STORED_S), counts.since(STORED_S + 1)) == (1, 0)
    assert counts.malformed.total() == 1
