"""Read what a stream holds by now, and end: a follower alone would wait for more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from skerry.log.base import Bus, Record

LOOK_PAUSES_S = (0.0, *(0.25,) * 7)
"""Pauses before each look at the log, until what it lacks counts as lost: a replica that lags
behind, or a leader that was deposed, does not have the newest."""
STALLED_S = 5.0
"""Reading that gets nothing for this long looks whether there is still something to get."""


async def newest_sequence(bus: Bus, pattern: str) -> int:
    """Return the sequence of the newest message that matches and is still there, 0 for none."""
    return max((record.sequence for record in await bus.last_each(pattern)), default=0)


async def read_up_to(
    bus: Bus, pattern: str, through: int, after: int = 0
) -> AsyncGenerator[Record]:
    """Yield what matches after ``after`` and up to ``through``, then end.

    Ends early when retention has dropped what is left.
    """
    position = after
    while position < through:
        follower = bus.follow(pattern, after=position)
        async with aclosing(follower):
            while position < through:
                try:
                    async with asyncio.timeout(STALLED_S):
                        record = await anext(follower)
                except (TimeoutError, StopAsyncIteration):
                    break
                if record.sequence > through:
                    return
                position = record.sequence
                yield record
        if position < through:
            through = min(through, await newest_sequence(bus, pattern))


async def with_pauses(
    records: AsyncGenerator[Record], pause_s: float
) -> AsyncGenerator[Record | None]:
    """Yield what a follower yields, and None each time that nothing has come for so long.

    The follower goes on meanwhile. Begun again, it would send once more what is still on its way,
    and over a slow link nothing would ever arrive.
    """
    coming: asyncio.Future[Record | None] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(records, None))
            done, _ = await asyncio.wait({coming}, timeout=pause_s)
            if not done:
                yield None
                continue
            found, coming = coming.result(), None
            if found is None:
                return
            yield found
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait({coming})
        await records.aclose()


async def read_now(bus: Bus, pattern: str, after: int = 0) -> AsyncGenerator[Record]:
    """Yield what matches after ``after`` and is there by now, oldest first."""
    async with aclosing(
        read_up_to(bus, pattern, await newest_sequence(bus, pattern), after)
    ) as records:
        async for record in records:
            yield record
