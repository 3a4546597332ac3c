"""Sending contributions: chunk by chunk, a bounded number of them on their way at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from skerry.algorithm.fragments import Plan
from skerry.errors import first_cause
from skerry.log.base import Bus
from skerry.log.streams import AHEAD_BYTES, SEND_MOST
from skerry.protocol.chunks import seal_chunk
from skerry.protocol.codec import Chunk
from skerry.protocol.messages import ContributionHeader
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry.telemetry import tracing

SEND_LEAST = 4
"""Chunks that a learner may have on their way, not acknowledged by the log yet, over any link that
brings them within LATE_S."""
LATE_S, LEAST_BYTES = 4.0, 1024**2
"""Chunks that take longer are sent again after a while, and would hold up each other for ever. So
many bytes may always be on their way, and no more until an answer shows how fast the link is."""
QUICK, SLOW = 1.5, 2.5
"""Below QUICK times the shortest round trip a link has room; above SLOW times it is full."""
FORGET = 1.001
"""The factor by which each longer round trip raises the shortest one: routes change."""


class SendWindow:
    """Bounds the chunks on their way to as many as keep the link busy.

    An answer that takes hardly longer than the quickest one adds a chunk. One that takes far longer
    takes a chunk away: chunks only wait for each other then. There are never more than the link
    brings in LATE_S. One sender at a time takes a place.
    """

    def __init__(self) -> None:
        self.size = SEND_LEAST
        self.flying = 0
        self._flying_bytes = 0
        self._freed = asyncio.Event()
        self._shortest_s = math.inf

    async def take(self, size: int) -> None:
        """Wait until one more chunk, of ``size`` bytes, may leave."""
        while self.flying >= self.size or self._must_wait(size):
            self._freed.clear()
            await self._freed.wait()
        self.flying += 1

    def _must_wait(self, size: int) -> bool:
        """Return True if a first answer must come before so many bytes more may leave."""
        unknown = self._shortest_s == math.inf
        return unknown and self.flying > 0 and self._flying_bytes + size > LEAST_BYTES

    def landed(self, took_s: float, size: int, ahead: int) -> None:
        """Note that the log acknowledged a chunk of ``size`` bytes ``took_s`` after it left.

        ``ahead`` chunks were on their way by then, itself included.
        """
        self._shortest_s = min(took_s, FORGET * self._shortest_s)
        most = max(SEND_LEAST, min(SEND_MOST, AHEAD_BYTES // size))
        if took_s < QUICK * self._shortest_s and self.flying >= self.size and self.size < most:
            self.size += 1
        elif (took_s > SLOW * self._shortest_s and self.size > SEND_LEAST) or self.size > most:
            self.size -= 1
        in_time = int(LATE_S * ahead / max(took_s, 1e-3))
        self.size = max(1, min(self.size, max(in_time, LEAST_BYTES // size)))
        self.free()

    def free(self) -> None:
        """Give a place back."""
        self.flying -= 1
        self._freed.set()

    def leave(self, size: int) -> Callable[[asyncio.Task[None]], None]:
        """Return the callback for the end of a publish that sends a chunk now."""
        clock = asyncio.get_running_loop().time
        left_s, ahead = clock(), self.flying
        self._flying_bytes += size

        def ended(task: asyncio.Task[None]) -> None:
            self._flying_bytes -= size
            if task.cancelled() or task.exception() is not None:
                self.free()
            else:
                self.landed(clock() - left_s, size, ahead)

        return ended


class Sender:
    """Sends one learner's contributions, each chunk by chunk and one after the other.

    A contribution leaves when all of the one before it has left, not when the log has it. So a
    distant broker costs one round trip per ``SendWindow`` of chunks, not per contribution, and on a
    slow link the first contribution still arrives before the second.
    """

    def __init__(self, bus: Bus, run: str, plan: Plan) -> None:
        self._bus = bus
        self._run = run
        self._plan = plan
        self._turn = asyncio.Lock()
        self.window = SendWindow()

    async def send(
        self,
        header: ContributionHeader,
        chunks: Iterable[Chunk],
        on_turn: Callable[[], None] | None = None,
    ) -> int:
        """Publish a contribution and return the bytes sent, once the log has all of it.

        ``on_turn`` is called when the contributions before it have left and its chunks may.

        Chunks are made in a thread, each when there is room for it, so that memory stays flat.
        Message ids are deterministic: sending the same contribution twice stores it once. The first
        chunk, which holds the header, carries the trace context too: a contribution is one message
        in a trace, however many chunks it has.
        """
        source, sent = iter(chunks), 0
        try:
            async with TaskGroup() as group, self._turn:
                if on_turn is not None:
                    on_turn()
                while (chunk := await asyncio.to_thread(next, source, None)) is not None:
                    data = seal_contribution(self._run, self._plan, header, chunk)
                    await self.window.take(len(data))
                    task = group.create_task(self._publish(header, chunk.index, data))
                    task.add_done_callback(self.window.leave(len(data)))
                    sent += len(data)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return sent

    async def _publish(self, header: ContributionHeader, index: int, data: bytes) -> None:
        shard = Subjects(self._run).of_fragment(header.fragment, self._plan.shards)
        subject = shard.contribution(header.fragment, header.learner)
        prefix = f"{header.learner}/{header.incarnation}/{header.fragment}/{header.identity}"
        origin = tracing.parse(header.trace_parent) if index == 0 else None
        await self._bus.publish(
            subject, data, msg_id=f"{prefix}/{index}", headers=tracing.headers(origin)
        )


def seal_contribution(run: str, plan: Plan, header: ContributionHeader, chunk: Chunk) -> bytes:
    """Return the message that carries one chunk of a contribution."""
    return seal_chunk(
        chunk,
        run=run,
        plan=plan,
        fragment=header.fragment,
        version=header.base_version,
        sender=header.learner,
        incarnation=header.incarnation,
        contribution=header,
    )
