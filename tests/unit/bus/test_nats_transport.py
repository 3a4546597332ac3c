"""A cancellation that nats-py drops still ends the task."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from skerry.bus.nats_transport import cancellable


async def deaf(asked: asyncio.Event) -> None:
    """Wait until cancelled, and go on as if nothing had happened."""
    asked.set()
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def run(asked: asyncio.Event) -> str:
    with cancellable():
        await deaf(asked)
    return "ran on"


async def test_a_dropped_cancellation_is_heeded() -> None:
    asked = asyncio.Event()
    task = asyncio.ensure_future(run(asked))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_dropped_timeout_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run(asyncio.Event())


async def test_without_a_cancellation_nothing_happens() -> None:
    with cancellable():
        await asyncio.sleep(0)
