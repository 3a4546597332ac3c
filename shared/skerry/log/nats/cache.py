# pyright: basic
"""The cache of a region's broker: chunks of the run's state that every learner reads, by sequence.

It mirrors the hub's stream, with its sequences, and is never believed: the hub's manifest says what
a chunk must be. A chunk that the cache does not have, or has too late, is read from the hub.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from skerry.errors import BusError
from skerry.log.base import SharedReads
from skerry.log.client import NoAnswer
from skerry.log.nats.jetstream import direct_record, status_of
from skerry.protocol.roles import through_cache
from skerry.protocol.subjects import is_shared
from skerry.tasks import now_s

if TYPE_CHECKING:
    from skerry.log.base import Record
    from skerry.log.nats.connection import Connection

LATE_S = 0.5
"""How long to wait for a chunk that the cache does not have yet."""
POLL_S = 0.02
REST_S = 5.0
"""How long a cache that failed, or was late, is not asked again."""


class ChunkCache:
    """Reads from the cache of the region in which this client is, if it is in one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reads = SharedReads()
        self._rests_until = 0.0

    @property
    def reads(self) -> SharedReads:
        """What was read so far, and in which region."""
        self._reads.region = self._connection.region
        return self._reads

    def serves(self, pattern: str) -> bool:
        """Return True where the cache is worth asking for such messages."""
        return bool(self.reads.region) and is_shared(pattern) and now_s() >= self._rests_until

    async def get(self, stream: str, sequence: int) -> Record | None:
        """Return the message with that sequence; None where the hub has to be asked."""
        subject, body = through_cache(stream), json.dumps({"seq": sequence}).encode()
        deadline = now_s() + LATE_S
        while now_s() >= self._rests_until:
            try:
                answer = await self._connection.request(subject, body, deadline=deadline)
                status = status_of(answer)
                record = None if status else direct_record(answer)
            except (NoAnswer, BusError, LookupError, ValueError):  # or it is no message at all
                break
            if record is not None:
                self.reads.cached_bytes += len(record.payload)
                return record
            if status != "404" or now_s() + POLL_S >= deadline:
                break
            await asyncio.sleep(POLL_S)
        self._rests_until = max(self._rests_until, now_s() + REST_S)
        return None
