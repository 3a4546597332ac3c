# pyright: basic
"""Following a stream through whatever happens to the broker.

A follower is an ephemeral pull consumer that is thrown away at the first doubt (a gap in its own
numbering, a missed heartbeat, a new connection) and made again behind the last message that was
yielded. Pull requests overlap, so that there is always one waiting at the server: a new message
arrives at once, and bulk reading never pauses for a round trip. ``nats_bulk`` reads in bulk what it
knows to be there, and asks for no more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from skerry.errors import BrokerUnavailable
from skerry.log.base import Deliver, Record
from skerry.log.nats.connection import Backoff, Connection
from skerry.log.nats.errors import STREAM_NOT_FOUND, ApiError
from skerry.log.nats.records import delivered_record, delivery_of, nanoseconds, status_of
from skerry.log.nats.streams import NANOSECONDS
from skerry.log.nats.transport import cancellable

IN_FLIGHT_BYTES = 16 * 1024**2
"""Bytes asked for ahead; the server drops a client that is 64 MiB behind."""
BULK_BYTES = (1024**2, 4 * 1024**2)
"""The same for a reading with an end, least and most; between them what came in BULK_S on average:
on a slow link all else that is sent waits behind them, the server's sign of life too. What is
decoded as it comes should not have waited until no cache has it any more."""
BULK_S = 1.0
MOST_AHEAD = 256
LEAST_AHEAD = 2
HEARTBEAT_S = 1.0
MISSED_S = 3 * HEARTBEAT_S
"""A consumer lives on one node of a cluster: this is how long its death goes unnoticed."""
SHORTER_S = 5.0
"""A new leader of a replicated stream may still be putting in what it has in its own log. Only a
stream that stays shorter than what was read of it for so long is another one."""
PULL_EXPIRES_S = 60.0
ENDLESS = {
    "expires": int(PULL_EXPIRES_S * NANOSECONDS),
    "idle_heartbeat": int(HEARTBEAT_S * NANOSECONDS),
}
IDLE_CONSUMER_S = 60.0
ENDED_PULL = ("message size exceeds", "batch completed", "request timeout")


@dataclass(slots=True)
class Cursor:
    """How far a follower has come: the last sequence it is done with, and that message's time."""

    deliver: Deliver
    sequence: int = 0
    time_ns: int = 0

    def began_anew(self, state: dict[str, Any]) -> bool:
        """Tell whether the stream is another one than the one that the cursor came from.

        Either it is shorter, or its oldest message lies behind the cursor and yet is younger.
        """
        if state["last_seq"] < self.sequence:
            return True
        if not self.time_ns or not state["messages"] or state["first_seq"] > self.sequence:
            return False
        return nanoseconds(state["first_ts"]) > self.time_ns

    def consumer(self) -> dict[str, Any]:
        """Return the part of a consumer's settings that says where it begins."""
        if self.sequence:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.sequence + 1}
        if self.deliver is Deliver.LAST_PER_SUBJECT:
            return {"deliver_policy": "last_per_subject"}
        return {"deliver_policy": "all"}


class Puller:
    """One consumer, its inbox, and the messages that are on their way.

    ``most``: it asks for so many messages in all, and only for those that are there already.
    """

    def __init__(self, connection: Connection, stream: str, most: int | None = None) -> None:
        self._connection = connection
        self._stream = stream
        self._left = sys.maxsize if most is None else most
        self._terms = ENDLESS if most is None else {"no_wait": True}
        self._patience_s = MISSED_S if most is None else connection.options.request_timeout_s
        self._bounds = (IN_FLIGHT_BYTES, IN_FLIGHT_BYTES) if most is None else BULK_BYTES
        self._began_s = self._came_bytes = 0.0
        self.silent = False
        """Whether nothing has come for longer than anything should take."""
        self._name = f"skerry-{secrets.token_hex(8)}"
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._arrived: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._broken = False
        self._coming = 0
        self._size = connection.max_payload
        self._delivered = 0

    async def open(self, patterns: Sequence[str], cursor: Cursor) -> None:
        """Make the consumer and ask for the first messages."""
        config = cursor.consumer() | {
            "name": self._name,
            "ack_policy": "none",
            "filter_subjects": list(patterns),
            "inactive_threshold": int(IDLE_CONSUMER_S * NANOSECONDS),
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 64,
        }
        self._connection.lost.add(self._lose)
        # Placed on a node that hangs it is never confirmed: another one may fall on another node.
        patience_s = self._connection.options.request_timeout_s
        await self._connection.api(
            f"CONSUMER.CREATE.{self._stream}.{self._name}",
            {"stream_name": self._stream, "config": config},
            deadline=asyncio.get_running_loop().time() + patience_s,
        )
        client = await self._connection.ready(None)
        self._inbox = client.new_inbox()
        with cancellable():
            self._subscription = await client.subscribe(
                self._inbox, cb=self._arrive, pending_msgs_limit=0, pending_bytes_limit=0
            )
        self._began_s = asyncio.get_running_loop().time()
        await self._pull()

    async def close(self) -> None:
        """Give the consumer back; when this does not get through, it expires by itself."""
        self._connection.lost.discard(self._lose)
        if self._subscription is None:
            return
        with contextlib.suppress(NatsError, OSError, BrokerUnavailable):
            await self._subscription.unsubscribe()
            await self._publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    async def next(self) -> Record | None:
        """Return the next message, or None when this consumer is not to be trusted any more."""
        while True:
            if not self._arrived:
                if self._broken or not await self._wait():
                    return None
                continue
            msg = self._arrived.popleft()
            status = status_of(msg)
            if not status:
                delivery = delivery_of(msg)
                if delivery.consumer_seq != self._delivered + 1:
                    return None
                self._delivered += 1
                await self._count(len(msg.data))
                return delivered_record(msg, delivery)
            if not await self._heed(status, msg):
                return None

    async def _heed(self, status: str, msg: Msg) -> bool:
        """Act on a status message; False if the consumer is gone."""
        if status == "100":
            return True
        headers = {str(getattr(k, "value", k)): v for k, v in (msg.headers or {}).items()}
        text = headers.get("Description", "").lower()
        if status not in ("408", "409") or not text.startswith(ENDED_PULL):
            return False
        unsent = int(headers.get("Nats-Pending-Messages", self._coming))
        self._coming -= unsent
        self._left += unsent
        await self._top_up()
        return True

    async def _count(self, size: int) -> None:
        self._coming -= 1
        self._came_bytes += size
        self._size = max(size, int(0.9 * self._size))
        await self._top_up()

    async def _top_up(self) -> None:
        if self._coming <= self._ahead() // 2:
            await self._pull()

    def _ahead(self) -> int:
        """Return how many messages to have on their way, by the size of recent ones."""
        took_s = asyncio.get_running_loop().time() - self._began_s
        least, most = self._bounds
        in_flight = min(most, max(least, int(BULK_S * self._came_bytes / max(1e-3, took_s))))
        return max(LEAST_AHEAD, min(MOST_AHEAD, in_flight // max(1, self._size)))

    async def _pull(self) -> None:
        count = min(self._left, self._ahead() - max(0, self._coming))
        if count < 1:
            return
        request = {
            "batch": count,
            "max_bytes": max(self._bounds[1], self._connection.max_payload + 65_536),
            **self._terms,
        }
        self._left -= count
        self._coming = max(0, self._coming) + count
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        try:
            await self._publish(subject, json.dumps(request).encode(), self._inbox)
        except (NatsError, OSError, BrokerUnavailable):
            self._lose()

    async def _publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        client = await self._connection.ready(asyncio.get_running_loop().time())
        with cancellable():
            await client.publish(subject, payload, reply)

    async def _wait(self) -> bool:
        """Wait for a message; False if not even a heartbeat came."""
        self._wake.clear()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._wake.wait()
        except TimeoutError:
            self.silent = True
            self._connection.suspect()
            return False
        return True

    async def _arrive(self, msg: Msg) -> None:
        self._arrived.append(msg)
        self._wake.set()

    def _lose(self) -> None:
        self._broken = True
        self._wake.set()


async def stream_state(connection: Connection, stream: str) -> dict[str, Any]:
    """Return the state of a stream, waiting for it to be there."""
    backoff = Backoff(None)
    while True:
        try:
            state: dict[str, Any] = (await connection.api(f"STREAM.INFO.{stream}"))["state"]
        except ApiError as e:
            if e.err_code != STREAM_NOT_FOUND:
                raise
        else:
            return state
        await backoff.pause()


async def place(connection: Connection, stream: str, cursor: Cursor) -> None:
    """Move a cursor to where it must go on in the stream as it is now."""
    state = await stream_state(connection, stream)
    if connection.clustered and state["last_seq"] < cursor.sequence:
        state = await settled_state(connection, stream, cursor.sequence)
    if cursor.deliver is Deliver.NEW and not cursor.sequence:
        cursor.sequence, cursor.deliver = state["last_seq"], Deliver.ALL
        cursor.time_ns = nanoseconds(state["last_ts"]) if state["messages"] else 0
    elif cursor.sequence and cursor.began_anew(state):
        cursor.sequence, cursor.time_ns, cursor.deliver = 0, 0, Deliver.ALL


async def settled_state(connection: Connection, stream: str, sequence: int) -> dict[str, Any]:
    """Return the state of a stream once it reaches ``sequence`` or stays shorter for SHORTER_S."""
    backoff = Backoff(asyncio.get_running_loop().time() + SHORTER_S)
    while True:
        state = await stream_state(connection, stream)
        if state["last_seq"] >= sequence or not await backoff.pause():
            return state


async def follow(
    connection: Connection, stream: str, patterns: Sequence[str], cursor: Cursor
) -> AsyncGenerator[Record]:
    """Yield records behind the cursor for ever, or until the connection is closed by us."""
    backoff = Backoff(None)
    while not connection.closing:
        puller = Puller(connection, stream)
        try:
            await place(connection, stream, cursor)
            await puller.open(patterns, cursor)
            while (record := await puller.next()) is not None:
                backoff = Backoff(None)
                if record.sequence <= cursor.sequence:
                    continue  # a consumer on a replica that lags begins too early
                cursor.sequence, cursor.time_ns = record.sequence, record.time_ns
                yield record
        except (NatsError, ApiError, BrokerUnavailable, OSError):
            await backoff.pause()
        finally:
            await puller.close()
