"""What the memory broker does with time, which a test can only set there."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.log.base import Retention
from skerry.log.memory import MemoryBroker
from skerry.log.memory_stream import matches
from skerry.log.streams import specs
from skerry.protocol.subjects import Subjects
from tests.support.log import newest

SECOND = 1_000_000_000
NAMES = Subjects("r")


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns


async def test_a_window_forgets_what_is_too_old() -> None:
    clock = Clock()
    bus = MemoryBroker(clock_ns=clock).connect()
    await bus.declare(specs("r", window_s=10.0))
    await bus.publish(NAMES.shard(0).contribution(0, "a"), b"old")
    clock.now_ns += 6 * SECOND
    await bus.publish(NAMES.shard(0).contribution(1, "a"), b"young")
    clock.now_ns += 6 * SECOND
    assert [r.payload for r in await bus.last_each(NAMES.shard(0).contribution())] == [b"young"]


async def test_a_message_id_is_forgotten_after_its_window() -> None:
    clock = Clock()
    bus = MemoryBroker(clock_ns=clock).connect()
    await bus.declare(specs("r"))
    first = await bus.publish(NAMES.ledger("run"), b"x", msg_id="id")
    clock.now_ns += 119 * SECOND
    assert (await bus.publish(NAMES.ledger("run"), b"x", msg_id="id")).duplicate
    clock.now_ns += 2 * SECOND
    again = await bus.publish(NAMES.ledger("run"), b"x", msg_id="id")
    assert (again.sequence, again.duplicate) == (first.sequence + 1, False)


async def test_records_carry_the_broker_clock() -> None:
    clock = Clock()
    bus = MemoryBroker(clock_ns=clock).connect()
    await bus.declare(specs("r"))
    await bus.publish(NAMES.ledger("run"), b"x")
    record = await newest(bus, NAMES.ledger("run"))
    assert record.time_ns == clock.now_ns


async def test_a_restart_loses_what_was_in_memory_and_nothing_else() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.declare(specs("r"))
    await bus.publish(NAMES.ledger("run"), b"kept")
    await bus.publish(NAMES.pulse("a"), b"lost")
    broker.restart()
    await bus.declare(specs("r"))
    assert await bus.last(NAMES.pulse("a")) is None
    kept = await newest(bus, NAMES.ledger("run"))
    assert kept.payload == b"kept"


async def test_a_follower_goes_on_in_the_stream_that_a_restart_began_anew() -> None:
    broker = MemoryBroker()
    bus = broker.connect()
    await bus.declare(specs("r"))
    await bus.publish(NAMES.pulse("a"), b"before")
    async with asyncio.timeout(10), aclosing(bus.follow(NAMES.pulse())) as pulses:
        assert (await anext(pulses)).payload == b"before"
        broker.restart()
        coming = asyncio.create_task(anext(pulses))
        await bus.declare(specs("r"))
        await bus.publish(NAMES.pulse("a"), b"after")
        assert (await coming).payload == b"after"


@given(sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=30))
@settings(max_examples=50)
async def test_a_window_never_holds_more_than_its_bound(sizes: list[int]) -> None:
    bus = MemoryBroker().connect()
    contrib = next(s for s in specs("r") if s.retention is Retention.WINDOW)
    await bus.declare((replace(contrib, max_bytes=8_000),))
    for i, size in enumerate(sizes):
        await bus.publish(NAMES.shard(0).contribution(i % 3, "a"), bytes(size))
    (info,) = await bus.streams()
    kept = [await bus.get(info.name, i) for i in range(info.first_seq, info.last_seq + 1)]
    assert info.bytes <= 8_000
    assert info.last_seq == len(sizes)
    assert None not in kept


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.b.c", "a.b", False),
        ("*", "a", True),
    ],
)
def test_patterns_match_as_nats_has_them(pattern: str, subject: str, *, expected: bool) -> None:
    assert matches(pattern, subject) is expected
