# pyright: basic
"""Reading many stored messages whose sequences are known.

One consumer costs the server half of what single requests for the same messages do, and a client a
third less, but takes a request or two to make. It may also be on a replica that lags, or lose its
connection: whatever it does not bring is asked for message by message, which says for certain what
is gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nats.errors import Error as NatsError

from skerry.bus.base import Record, Start
from skerry.bus.nats_connection import Connection
from skerry.bus.nats_errors import ApiError
from skerry.bus.nats_follow import Cursor, Puller
from skerry.bus.nats_reads import Reads
from skerry.errors import BrokerUnavailable, first_cause
from skerry.tasks import TaskGroup

MANY = 16
"""From so many messages on a consumer is worth making."""
AT_ONCE = 8
"""Single requests on their way at a time."""


async def get_each(
    connection: Connection, reads: Reads, stream: str, pattern: str, sequences: Sequence[int]
) -> AsyncGenerator[Record]:
    """Yield those messages that are there, in no certain order; raises as ``Reads.get``."""
    left = dict.fromkeys(sequences)
    if len(left) >= MANY:
        async with aclosing(_pulled(connection, stream, pattern, sorted(left))) as records:
            async for record in records:
                if record.sequence in left:
                    del left[record.sequence]
                    yield record
    rest = list(left)
    for i in range(0, len(rest), AT_ONCE):
        for found in await _got(reads, stream, rest[i : i + AT_ONCE]):
            if found is not None:
                yield found


async def _pulled(
    connection: Connection, stream: str, pattern: str, sequences: Sequence[int]
) -> AsyncGenerator[Record]:
    """Yield as many messages as are wanted from the first on, for as long as all goes well."""
    puller = Puller(connection, stream, most=len(sequences))
    try:
        await puller.open((pattern,), Cursor(Start.ALL, sequences[0] - 1))
        for _ in sequences:
            record = await puller.next()
            if record is None:
                return
            yield record
    except (NatsError, ApiError, BrokerUnavailable, OSError):
        return
    finally:
        await puller.close()


async def _got(reads: Reads, stream: str, sequences: Sequence[int]) -> list[Record | None]:
    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(reads.get(stream, sequence)) for sequence in sequences]
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    return [task.result() for task in tasks]
