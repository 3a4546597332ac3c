"""How a syncer's sessions and a run end: what a failed one leaves, what holds up the end."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import BrokerUnavailable, ConfigError, first_cause
from skerry.log import ledger
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.coordinator import OTHERS_PATIENCE, may_end
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig, SyncConfig
from skerry_syncer import leadership
from skerry_syncer.service import syncer
from skerry_syncer.serving import ContributionTail, ShardServer
from tests.support.builders import run_record

RUN = "t"
PLAN = plan([LeafSpec("w", (20, 64))], 1)


async def test_failed_session_holds_no_memory_during_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[object]] = []
    alive: list[bool] = []

    async def serve(server: ShardServer) -> bool:
        await asyncio.sleep(0)
        if held:
            gc.collect()
            alive.append(held[0]() is not None)
            await ledger.finish_run(server.bus, server.run)
            return True
        held.append(weakref.ref(server.wake))
        msg = "gone"
        raise BrokerUnavailable(msg)

    monkeypatch.setattr(ShardServer, "serve", serve)
    monkeypatch.setattr(leadership, "RETRY_S", 0.0)
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    config = RunConfig(sync=SyncConfig(fragments=1, h_steps=8))
    await ledger.create_run(bus, run_record(RUN, PLAN, config.model_dump_json()))
    async with asyncio.timeout(60):
        await syncer(bus, RUN, "s", 1.0)
    assert alive == [False]


async def test_a_config_of_another_release_is_one_sentence() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, '{"sync": {"telepathy": true}}'))
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await asyncio.wait_for(syncer(bus, RUN, "s", 1.0), 60)
    cause = first_cause(caught.value)
    assert isinstance(cause, ConfigError)
    assert "sync.telepathy (from the run record) is not a setting" in str(cause)
    assert str(cause).endswith("use that release.")


@pytest.mark.parametrize(
    ("waited_s", "unread", "late", "said"),
    [
        (0.0, False, False, (True, "resolved")),
        (1e6, True, True, (False, "unread")),
        (0.0, False, True, (False, "late")),
        (OTHERS_PATIENCE * 60.0 - 0.1, False, True, (False, "late")),
        (OTHERS_PATIENCE * 60.0, False, True, (True, "left")),
    ],
)
def test_own_contributions_are_waited_for_and_others_for_a_while(
    waited_s: float, said: tuple[bool, str], *, unread: bool, late: bool
) -> None:
    assert may_end(waited_s, 60.0, unread=unread, late=late) == said


async def test_what_lies_beyond_is_read_once_as_long_as_nothing_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs("t"))
    for fragment in (0, 1, 0):
        await bus.publish(Subjects("t").shard(0).contribution(fragment, "a"), b"x")
    asked: list[str] = []
    read = MemoryBus.last

    async def counted(self: MemoryBus, pattern: str) -> object:
        asked.append(pattern)
        return await read(self, pattern)

    monkeypatch.setattr(MemoryBus, "last", counted)
    tail = ContributionTail(bus, "t", 1)
    assert await tail.beyond({0: 3, 1: 3, 2: 3}) == frozenset()
    assert asked == [], "the stream ends there"
    assert await tail.beyond({0: 2, 1: 2, 2: 0}) == {0}
    assert await tail.beyond({0: 3, 1: 1, 2: 0}) == {1}
    assert len(asked) == 3
    await bus.publish(Subjects("t").shard(0).contribution(2, "a"), b"x")
    assert await tail.beyond({0: 3, 1: 2, 2: 0}) == {2}


async def test_what_the_broker_does_not_tell_of_is_not_taken_for_nothing() -> None:
    """A cluster leaves out streams that are without a leader."""
    with pytest.raises(BrokerUnavailable, match=r"does not say how far .*CONTRIB"):
        await ContributionTail(MemoryBroker().connect(), "t", 1).beyond({0: 3})
