"""Following a stream through whatever happens to the broker.

A follower is an ephemeral pull consumer that is thrown away as soon as it may be wrong (a gap in
its own numbering, a missed heartbeat, a new connection) and made again after the last message that
was yielded. Pull requests overlap, so that there is always one waiting at the server: a new message
arrives at once, and bulk reading never retries for a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from skerry.errors import BrokerUnavailable, BusError, Denied
from skerry.log.base import Deliver, Record
from skerry.log.client import Cursor, Retries
from skerry.log.nats.connection import Connection, NatsInbox
from skerry.log.nats.jetstream import (
    DELIVERED,
    IDLE_CONSUMER_NS,
    NANOSECONDS,
    STREAM_NOT_FOUND,
    delivery_of,
    extent_of,
    status_of,
)
from skerry.log.nats.session import cancellable
from skerry.log.streams import AHEAD_BYTES
from skerry.tasks import now_s

IN_FLIGHT_BYTES = (16 * 1024**2,) * 3
"""Bytes asked for ahead; the server drops a client that is 64 MiB behind."""
BULK_BYTES = (1024**2, 4 * 1024**2, AHEAD_BYTES)
"""The same for a reading with an end: at least the first; as much as came in BULK_S, up to the
second; what two round trips bring, up to the third. More would hold up everything else on a slow
link, even the server's sign of life, and leave the CPU's cache before it is decoded; less would
leave a far link idle."""
BULK_S, MEASURE_S = 1.0, 0.1
MOST_AHEAD = 256
LEAST_AHEAD = 2
HEARTBEAT_S = 1.0
MISSED_S = 3 * HEARTBEAT_S
"""A consumer lives on one node of a cluster: this is how long its death goes unnoticed."""
SHORTER_S = 5.0
"""A new leader of a replicated stream may still be applying its own log. Only a stream that stays
shorter than what was read of it for this long was created again."""
PULL_EXPIRES_S = 60.0
ENDLESS = {
    "expires": int(PULL_EXPIRES_S * NANOSECONDS),
    "idle_heartbeat": int(HEARTBEAT_S * NANOSECONDS),
}
ENDED_PULL = ("message size exceeds", "batch completed", "request timeout")
FAILURES = (NatsError, BusError, OSError)
"""What ends one consumer, and never its follower."""


class Flow:
    """How many messages to ask for: as many as the link brings in a while, by recent sizes."""

    def __init__(self, most: int | None, size: int) -> None:
        self.bounds = IN_FLIGHT_BYTES if most is None else BULK_BYTES
        self.round_trip_s = 0.0
        self._left = sys.maxsize if most is None else most
        self._coming = 0
        self._size = size
        self._began_s = 0.0
        self._came_bytes = 0
        self._rate_b_s = 0.0

    def came(self, size: int) -> None:
        """Note that a message of that many bytes has come."""
        self._coming -= 1
        self._came_bytes += size
        self._size = max(size, int(0.9 * self._size))

    def unsent(self, number: int | None) -> None:
        """Note that a request ended and so many of its messages will not come; None: all."""
        number = self._coming if number is None else number
        self._coming -= number
        self._left += number

    def more(self) -> int:
        """Return how many messages to request, and count them as requested."""
        ahead = self._ahead()
        if self._coming > ahead // 2:
            return 0
        self._coming = max(0, self._coming)
        number = min(self._left, ahead - self._coming)
        self._left -= number
        self._coming += number
        return number

    def _ahead(self) -> int:
        """Return how many messages should be on their way, by what came in some round trips."""
        now = now_s()
        self._began_s = self._began_s or now
        took_s = max(1e-3, self.round_trip_s, now - self._began_s)
        rate_b_s = max(self._rate_b_s, self._came_bytes / took_s)
        if took_s > max(MEASURE_S, 2 * self.round_trip_s):
            self._rate_b_s, self._began_s = self._came_bytes / took_s, now
            self._came_bytes = 0
        least, near, far = self.bounds
        in_flight = max(
            min(near, int(BULK_S * rate_b_s)), min(far, int(2 * self.round_trip_s * rate_b_s))
        )
        return max(LEAST_AHEAD, min(MOST_AHEAD, max(least, in_flight) // max(1, self._size)))


class Puller:
    """One consumer and the messages that are on their way from it.

    With ``most`` it asks for that many messages in all, and only for those that are stored already.
    """

    def __init__(self, connection: Connection, stream: str, most: int | None = None) -> None:
        self._connection = connection
        self._stream = stream
        self._flow = Flow(most, connection.max_payload)
        self._terms = ENDLESS if most is None else {"no_wait": True}
        self._patience_s = MISSED_S if most is None else connection.options.request_timeout_s
        self._inbox = NatsInbox(connection)
        self._name = f"skerry-{secrets.token_hex(8)}"
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{self._name}"
        self._refusals = contextlib.ExitStack()
        self._delivered = 0
        self.silent = False
        """Whether nothing has come for longer than anything should take."""

    async def open(self, patterns: Sequence[str], cursor: Cursor) -> None:
        """Make the consumer and ask for the first messages."""
        beginning: dict[str, Any] = {"deliver_policy": cursor.deliver.value}
        if cursor.sequence:
            after = {"opt_start_seq": cursor.sequence + 1}
            beginning = {"deliver_policy": "by_start_sequence", **after}
        config = beginning | {
            "name": self._name,
            "ack_policy": "none",
            "filter_subjects": list(patterns),
            "inactive_threshold": IDLE_CONSUMER_NS,
            "mem_storage": True,
            "num_replicas": 1,
            "max_waiting": 64,
        }
        await self._inbox.open()
        # A consumer on a node that hangs is never confirmed: the next may be on another node.
        patience_s = self._connection.options.request_timeout_s
        clock = asyncio.get_running_loop().time
        asked_s = clock()
        await self._connection.api(
            f"CONSUMER.CREATE.{self._stream}.{self._name}",
            {"stream_name": self._stream, "config": config},
            about=f"a consumer of stream {self._stream}",
            deadline=asked_s + patience_s,
        )
        self._flow.round_trip_s = clock() - asked_s
        session = await self._connection.ready(clock() + patience_s)
        self._refusals.enter_context(session.hearing(self._next, self._inbox.deny))
        await self._pull()

    async def close(self) -> None:
        """Give the consumer back; when this does not get through, it expires by itself."""
        self._refusals.close()
        await self._inbox.close()
        with contextlib.suppress(NatsError, OSError, BrokerUnavailable):
            await self._publish(f"$JS.API.CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    async def next(self) -> Record | None:
        """Return the next message, or None when this consumer is not to be trusted any more."""
        while True:
            try:
                msg = await self._inbox.next(self._patience_s)
            except TimeoutError:
                self.silent = True
                self._connection.suspect()
                return None
            if msg is None:
                return None
            if not msg.reply.startswith(DELIVERED):
                if not await self._act_on(msg):
                    return None
                continue
            number, record = delivery_of(msg)
            if number != self._delivered + 1:
                return None
            self._delivered = number
            self._flow.came(len(record.payload))
            await self._pull()
            return record

    async def _act_on(self, msg: Msg) -> bool:
        """Act on a status message; False if the consumer is gone."""
        status, headers = status_of(msg), msg.headers or {}
        text = headers.get("Description", "").lower()
        if status == "100":
            return True
        if status not in ("408", "409") or not text.startswith(ENDED_PULL):
            return False
        unsent = headers.get("Nats-Pending-Messages")
        self._flow.unsent(None if unsent is None else int(unsent))
        await self._pull()
        return True

    async def _pull(self) -> None:
        """Ask for more messages once at most half as many as allowed are on their way."""
        if (number := self._flow.more()) < 1:
            return
        most = max(self._flow.bounds[-1], self._connection.max_payload + 65_536)
        request = json.dumps({"batch": number, "max_bytes": most, **self._terms}).encode()
        try:
            await self._publish(self._next, request, self._inbox.subject)
        except (NatsError, OSError, BrokerUnavailable):
            self._inbox.lose()

    async def _publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        session = await self._connection.ready(now_s())
        with cancellable():
            await session.client.publish(subject, payload, reply)


async def _place(connection: Connection, stream: str, cursor: Cursor) -> None:
    """Move a cursor to where it must go on, once there is such a stream.

    A replica that lags gets SHORTER_S to catch up.
    """
    absent, shorter = Retries(), None
    while True:
        about, name = f"a look at stream {stream}", f"STREAM.INFO.{stream}"
        info = await connection.api(name, about=about, empty_for=(STREAM_NOT_FOUND,))
        if not info:
            await absent.pause()
            continue
        shorter = shorter or Retries(now_s() + SHORTER_S)
        replicated = info["config"].get("num_replicas", 1) > 1
        behind = replicated and info["state"]["last_seq"] < cursor.sequence
        if not behind or not await shorter.pause():
            return cursor.place(extent_of(info["state"]))


async def follow(
    connection: Connection, stream: str, patterns: Sequence[str], cursor: Cursor
) -> AsyncGenerator[Record]:
    """Yield records after the cursor for ever, or until the connection is closed by us."""
    retries, live = Retries(), cursor.deliver is Deliver.LIVE
    while not connection.closing:
        puller = Puller(connection, stream)
        cursor = Cursor(Deliver.NEW) if live else cursor
        try:
            # A cursor that begins at the beginning has nothing to compare with the stream.
            if cursor.sequence or cursor.deliver is Deliver.NEW:
                await _place(connection, stream, cursor)
            await puller.open(patterns, cursor)
            while (record := await puller.next()) is not None:
                retries = Retries()
                if record.sequence > cursor.sequence:  # on a replica that lags it begins too early
                    cursor.move(record)
                    yield record
        except Denied:
            raise
        except FAILURES:
            await retries.pause()
        finally:
            await puller.close()
