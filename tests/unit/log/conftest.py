"""A log in memory with the streams of run ``t``."""

from __future__ import annotations

import pytest

from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs


@pytest.fixture
async def bus() -> MemoryBus:
    bus = MemoryBroker().connect()
    await bus.declare(specs("t", window_bytes=64 * 1024**2))
    return bus
