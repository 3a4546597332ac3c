"""One drill of a run at a time: a lease that is said again, and free once it is not."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AbstractAsyncContextManager

import pytest

from skerry.errors import BrokerUnavailable, ConfigError, first_cause
from skerry.log.base import Expect
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import Drill
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import drill_of
from skerry_tools.chaos import lease
from skerry_tools.chaos.lease import leased

RUN = "r"
SUBJECT = drill_of(RUN)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    monkeypatch.setattr(lease, "AGAIN_S", 0.01)
    monkeypatch.setattr(lease, "LEASE_S", 1.0)


@pytest.fixture
async def bus() -> MemoryBus:
    made = MemoryBroker().connect()
    await made.declare(specs(RUN))
    return made


def drill(bus: MemoryBus, holder: str = "process 1 on here") -> AbstractAsyncContextManager[None]:
    return leased(bus, RUN, holder)


async def holder(bus: MemoryBus) -> str:
    record = await bus.last(SUBJECT)
    assert record is not None
    return decode(Drill, record.payload, run=RUN).holder


async def begin(bus: MemoryBus) -> None:
    async with drill(bus, "process 2 on there"):
        pass


async def test_beside_a_drill_that_says_so_another_is_refused_and_behind_it_begins_at_once(
    bus: MemoryBus,
) -> None:
    async with drill(bus):
        with pytest.raises(ConfigError, match="A drill of process 1 on here is at work on run 'r'"):
            await begin(bus)
    began = time.monotonic()
    await begin(bus)
    assert time.monotonic() - began < lease.LEASE_S
    assert await holder(bus) == ""


async def test_two_that_begin_at_one_instant_are_not_both_let_in(bus: MemoryBus) -> None:
    async def one(name: str) -> bool:
        try:
            async with drill(bus, name):
                await asyncio.sleep(0.1)
        except ConfigError:
            return False
        return True

    assert sorted(await asyncio.gather(one("a"), one("b"))) == [False, True]


async def test_a_drill_that_was_killed_holds_nobody_up_for_longer_than_its_lease(
    bus: MemoryBus,
) -> None:
    await bus.publish(SUBJECT, encode(Drill(RUN, "process 7 on gone", 1, 1)))
    async with drill(bus):
        assert await holder(bus) == "process 1 on here"


async def test_one_that_ends_while_the_next_listens_lets_it_in(bus: MemoryBus) -> None:
    first = Drill(RUN, "process 7 on there", 1, 1)
    said = await bus.publish(SUBJECT, encode(first))
    next_ = asyncio.create_task(begin(bus))
    await asyncio.sleep(0.05)
    given_back = encode(Drill(RUN, "", 1, 2))
    await bus.publish(SUBJECT, given_back, expect=Expect(SUBJECT, said.sequence))
    async with asyncio.timeout(lease.LEASE_S):
        await next_


async def test_a_lease_that_nobody_can_read_is_nobodys(bus: MemoryBus) -> None:
    await bus.publish(SUBJECT, b"no lease")
    await begin(bus)


async def test_a_drill_that_was_taken_for_dead_ends(bus: MemoryBus) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        async with drill(bus):
            await bus.publish(SUBJECT, encode(Drill(RUN, "process 7 on there", 1, 1)))
            try:
                await asyncio.sleep(30)
            finally:
                ended.set()

    with pytest.raises(BaseExceptionGroup) as caught:
        await hang()
    assert ended.is_set()
    assert isinstance(first_cause(caught.value), ConfigError)
    assert "A drill of process 7 on there" in str(first_cause(caught.value))
    assert await holder(bus) == "process 7 on there"


async def test_a_drill_that_slept_through_the_whole_of_another_one_ends(bus: MemoryBus) -> None:
    async def sleep() -> None:
        async with drill(bus):
            await bus.publish(SUBJECT, encode(Drill(RUN, "", 1, 2)))
            await asyncio.sleep(30)

    with pytest.raises(BaseExceptionGroup) as caught:
        await sleep()
    assert isinstance(first_cause(caught.value), ConfigError)
    assert "Another drill was at work on run 'r' meanwhile" in str(first_cause(caught.value))
    record = await bus.last(SUBJECT)
    assert record is not None
    assert decode(Drill, record.payload, run=RUN) == Drill(RUN, "", 1, 2)


async def test_where_no_service_has_made_the_stream_in_memory_yet_a_drill_does() -> None:
    bus = MemoryBroker().connect()
    async with drill(bus):
        assert await holder(bus) == "process 1 on here"
    assert await bus.declare(specs(RUN)) == (), "as the services would have it"


async def test_a_lease_outlives_a_broker_that_is_away_and_forgets_it(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 1.0)
    asked, often = itertools.count(1), asyncio.Event()
    async with drill(bus), asyncio.timeout(2.5):
        with monkeypatch.context() as away:

            async def nobody(*_: object) -> None:
                if next(asked) == 5:
                    often.set()
                msg = "Nobody answers."
                raise BrokerUnavailable(msg)

            away.setattr(MemoryBus, "last", nobody)
            bus.broker.restart()
            await often.wait()
        assert await bus.last(SUBJECT) is None
        await bus.declare(specs(RUN))
        while await bus.last(SUBJECT) is None:  # noqa: ASYNC110 - said by the drill
            await asyncio.sleep(0.01)
        assert await holder(bus) == "process 1 on here"


async def test_a_lease_that_a_broker_has_just_forgotten_is_not_free(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    async with drill(bus):
        bus.broker.restart()
        with pytest.raises(ConfigError, match="A drill of process 1 on here"):
            await begin(bus)
        assert await holder(bus) == "process 1 on here"
