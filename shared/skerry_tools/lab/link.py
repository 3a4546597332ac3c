"""A link with latency and bandwidth, on the clock of its loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar, cast

from skerry.log.base import Record
from skerry.log.client import Message
from skerry.tasks import now_s
from skerry_tools.lab.scenario import LinkSettings

T = TypeVar("T")


class Pipe:
    """One direction: messages queue at its rate, and arrive after its latency."""

    def __init__(self, latency_s: float, bytes_s: float | None) -> None:
        self._latency_s = latency_s
        self._bytes_s = bytes_s
        self._free_s = 0.0

    async def carry(self, size: int, left_s: float | None = None) -> None:
        """Wait until a message of that many bytes has come through; it left now, or at ``left_s``.

        Messages that left one after the other are under way together: each waits for those before
        it to be through the narrowest place, not for them to have arrived.
        """
        now = now_s()
        through_s = now if left_s is None else left_s
        if self._bytes_s is not None:
            through_s = self._free_s = max(through_s, self._free_s) + size / self._bytes_s
        delay_s = through_s + self._latency_s - now
        if delay_s > 0:
            await asyncio.sleep(delay_s)


class DistantLink:
    """A ``skerry.log.memory.LinkModel`` on which each message takes as long as its bytes.

    ``stored_s`` turns a record's time stamp into the time of the loop.
    """

    timeout_s = math.inf
    """Nothing is ever lost: a slow answer is waited for."""

    def __init__(self, link: LinkSettings, stored_s: Callable[[int], float]) -> None:
        self._stored_s = stored_s
        self._up = Pipe(link.latency_s, link.up_bytes_s)
        self._down = Pipe(link.latency_s, link.down_bytes_s)

    async def request(self, act: Callable[[], T], store: Message | None = None) -> T:
        await self._up.carry(len(store.payload) if store is not None else 0)
        answer = act()
        listed = cast("list[object]", answer) if isinstance(answer, list) else [answer]
        await self._down.carry(sum(len(r.payload) for r in listed if isinstance(r, Record)))
        return answer

    async def deliver(self, records: Sequence[Record], since_s: float) -> AsyncGenerator[Record]:
        for record in records:
            left_s = max(since_s, self._stored_s(record.time_ns))
            await self._down.carry(len(record.payload), left_s)
            yield record

    async def usable(self) -> None:
        return
