"""The syncer's sessions: what a failed one leaves behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from skerry.bus.base import Bus
from skerry.bus.memory import MemoryBroker
from skerry.errors import BrokerUnavailable
from skerry_syncer import service


class Shardlike:
    """Stands for all that a session holds."""


async def test_failed_session_holds_no_memory_during_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[Shardlike]] = []
    alive: list[bool] = []

    async def session(_bus: Bus, _run: str, _holder: str) -> None:
        await asyncio.sleep(0)
        if held:
            gc.collect()
            alive.append(held[0]() is not None)
            return
        shard = Shardlike()
        held.append(weakref.ref(shard))
        msg = "gone"
        raise BrokerUnavailable(msg)

    monkeypatch.setattr(service, "session", session)
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    async with asyncio.timeout(60):
        await service.syncer(MemoryBroker().connect(), "t", "s", 1.0)
    assert alive == [False]
