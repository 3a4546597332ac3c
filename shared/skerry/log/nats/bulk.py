# pyright: basic
"""Reading many stored messages whose sequences are known.

One consumer costs the server half of what single requests for the same messages do, and a client a
third less, but takes a request or two to make. It may also be on a replica that lags, or lose its
connection: whatever it does not bring is asked for message by message, which says for certain what
is gone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nats.errors import Error as NatsError

from skerry.errors import BrokerUnavailable, first_cause
from skerry.log.base import Deliver, Record
from skerry.log.nats.connection import Connection
from skerry.log.nats.errors import ApiError
from skerry.log.nats.follow import Cursor, Puller
from skerry.log.nats.reads import AVOID_S, Reads
from skerry.tasks import TaskGroup

MANY = 16
"""From so many messages on a consumer is worth making."""
AT_ONCE = 8
"""Single requests on their way at a time."""


class BulkReads:
    """Reads of many messages through one connection."""

    def __init__(self, connection: Connection, reads: Reads) -> None:
        self._connection = connection
        self._reads = reads
        self._avoid_until = 0.0

    async def get_each(
        self, stream: str, pattern: str, sequences: Sequence[int]
    ) -> AsyncGenerator[Record]:
        """Yield messages by ascending sequence up to the first gap; raises as ``Reads.get``."""
        left = deque(sequences)
        if len(left) >= MANY and self._now() >= self._avoid_until:
            async with aclosing(self._pulled(stream, pattern, sequences)) as records:
                async for record in records:
                    if left and record.sequence == left[0]:
                        left.popleft()
                        yield record
                    elif left and record.sequence > left[0]:
                        break
        size = 1  # after a gap the next one is gone, most likely
        while left:
            for found in await self._got(
                stream, [left.popleft() for _ in range(min(size, len(left)))]
            ):
                if found is None:
                    return
                yield found
            size = AT_ONCE

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _pulled(
        self, stream: str, pattern: str, sequences: Sequence[int]
    ) -> AsyncGenerator[Record]:
        """Yield as many messages as are wanted, from the first on, for as long as all goes well.

        After a consumer that could not be made or fell silent none is tried for AVOID_S: in a
        cluster it may have been placed on a node that hangs, as the next one may.
        """
        puller = Puller(self._connection, stream, most=len(sequences))
        try:
            await puller.open((pattern,), Cursor(Deliver.ALL, sequences[0] - 1))
            for _ in sequences:
                record = await puller.next()
                if record is None:
                    break
                yield record
        except (NatsError, ApiError, BrokerUnavailable, OSError):
            puller.silent = True
        finally:
            if puller.silent:
                self._avoid_until = self._now() + AVOID_S
            await puller.close()

    async def _got(self, stream: str, sequences: Sequence[int]) -> list[Record | None]:
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(self._reads.get(stream, s)) for s in sequences]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return [task.result() for task in tasks]
