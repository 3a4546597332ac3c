"""The syncer's sessions: what a failed one leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import BrokerUnavailable, ConfigError, first_cause
from skerry.log import ledger
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.settings.models import RunConfig, SyncConfig
from skerry_syncer import leadership
from skerry_syncer.service import syncer
from skerry_syncer.serving import ShardServer
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
