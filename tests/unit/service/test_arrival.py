"""A service that comes before its run waits and says so, once."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import StateLost
from skerry.log import ledger, recovery
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.service.arrival import arrive
from tests.support.builders import run_record
from tests.support.scripted_run import ScriptedRun

RECORD = run_record("run", plan([LeafSpec("w", (4, 4))], 1), "{}")


async def test_a_service_that_comes_first_says_that_it_waits_and_goes_on_with_the_run() -> None:
    bus = MemoryBroker().connect()
    with capture_logs() as logs:
        waiting = asyncio.create_task(arrive(bus, "run"))
        async with asyncio.timeout(5):
            await asyncio.sleep(0.05)
            await bus.declare(specs("run"))
            await ledger.create_run(bus, RECORD)
            assert await waiting == RECORD
    assert [line["event"] for line in logs] == ["waits_for_run"]


async def test_a_service_that_comes_after_its_run_does_not_wait() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs("run"))
    await ledger.create_run(bus, RECORD)
    with capture_logs() as logs:
        assert await arrive(bus, "run") == RECORD
    assert logs == []


async def test_run_that_lost_its_ledger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LOOK_PAUSE_S", 0.0)
    bus = MemoryBroker().connect()
    await (await ScriptedRun.begin(bus, "run")).commit_all()
    del bus.broker.streams["SKERRY_run_LEDGER"]
    with pytest.raises(StateLost, match="has lost its record in the ledger"):
        await asyncio.wait_for(arrive(bus, "run"), 5)
