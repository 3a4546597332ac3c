"""A client of the broker behind a link with latency and bandwidth, on the clock of its loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self

from skerry.log.base import Bus, Deliver, Expect, Receipt, Record, Room, StreamInfo, StreamSpec
from skerry_tools.lab.scenario import Link


class Pipe:
    """One direction: messages go one behind the other at its rate, and arrive after its latency."""

    def __init__(self, latency_s: float, bytes_s: float | None) -> None:
        self._latency_s = latency_s
        self._bytes_s = bytes_s
        self._free_s = 0.0

    async def carry(self, size: int, left_s: float | None = None) -> None:
        """Wait until a message of that many bytes has come through; it left now, or at ``left_s``.

        Messages that left one after the other are under way together: each waits for those before
        it to be through the narrowest place, not for them to have arrived.
        """
        now = asyncio.get_running_loop().time()
        began = max(now if left_s is None else left_s, self._free_s)
        self._free_s = began + (size / self._bytes_s if self._bytes_s else 0.0)
        delay_s = self._free_s + self._latency_s - now
        if delay_s > 0:
            await asyncio.sleep(delay_s)


class LinkedBus:
    """Implements ``skerry.log.base.Bus`` on another one; every call takes as long as its bytes.

    ``stored_s`` turns a record's time stamp into the time of the loop.
    """

    def __init__(self, bus: Bus, link: Link, stored_s: Callable[[int], float]) -> None:
        self._bus = bus
        self._stored_s = stored_s
        self._up = Pipe(link.latency_s, link.up_bytes_s)
        self._down = Pipe(link.latency_s, link.down_bytes_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    @property
    def max_payload_bytes(self) -> int:
        return self._bus.max_payload_bytes

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        return await self._bus.declare(specs)

    async def streams(self) -> list[StreamInfo]:
        return await self._bus.streams()

    async def rooms(self) -> tuple[Room, ...]:
        return await self._bus.rooms()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        await self._up.carry(len(payload))
        receipt = await self._bus.publish(
            subject, payload, msg_id=msg_id, expect=expect, headers=headers
        )
        await self._down.carry(0)
        return receipt

    async def last(self, subject: str) -> Record | None:
        await self._up.carry(0)
        return await self._came(await self._bus.last(subject))

    async def last_each(self, pattern: str) -> list[Record]:
        await self._up.carry(0)
        found = await self._bus.last_each(pattern)
        await self._down.carry(sum(len(record.payload) for record in found))
        return found

    async def get(self, stream: str, sequence: int) -> Record | None:
        await self._up.carry(0)
        return await self._came(await self._bus.get(stream, sequence))

    async def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        await self._up.carry(0)
        async with aclosing(self._bus.get_each(pattern, sequences)) as records:
            async for record in records:
                await self._down.carry(len(record.payload))
                yield record

    async def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        began_s = asyncio.get_running_loop().time()
        async with aclosing(self._bus.follow(pattern, deliver=deliver, after=after)) as records:
            async for record in records:
                left_s = max(began_s, self._stored_s(record.time_ns))
                await self._down.carry(len(record.payload), left_s)
                yield record

    async def _came(self, record: Record | None) -> Record | None:
        await self._down.carry(len(record.payload) if record is not None else 0)
        return record
