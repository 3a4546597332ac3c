# pyright: basic
"""Listening to messages that no stream keeps: what is missed is gone, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from skerry.errors import BrokerUnavailable
from skerry.log.nats.connection import Backoff, Connection
from skerry.log.nats.transport import cancellable

MOST_WAITING = 1024
"""Messages that wait for the reader; more are dropped."""


async def listen(connection: Connection, subject: str, queue: str) -> AsyncGenerator[bytes]:
    """Yield what is published on a subject, shared with all others of the queue group, for ever.

    It begins anew on each new connection.
    """
    backoff = Backoff(None)
    while not connection.closing:
        arrived: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)

        def lost(waiting: asyncio.Queue[bytes | None] = arrived) -> None:
            with contextlib.suppress(asyncio.QueueEmpty):
                waiting.get_nowait()  # there is room for the end, whatever is given up for it
            waiting.put_nowait(None)

        async def arrive(msg: Msg, waiting: asyncio.Queue[bytes | None] = arrived) -> None:
            with contextlib.suppress(asyncio.QueueFull):
                waiting.put_nowait(msg.data)

        subscription = None
        connection.lost.add(lost)
        try:
            client = await connection.ready(None)
            with cancellable():
                subscription = await client.subscribe(subject, queue=queue, cb=arrive)
            while (payload := await arrived.get()) is not None:
                backoff = Backoff(None)
                yield payload
        except (NatsError, BrokerUnavailable, OSError):
            await backoff.pause()
        finally:
            connection.lost.discard(lost)
            if subscription is not None:
                with contextlib.suppress(NatsError, OSError):
                    await subscription.unsubscribe()
