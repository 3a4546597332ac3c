"""The log on NATS JetStream (nats-server 2.12 or newer)."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from skerry.errors import BrokerUnavailable, BrokerUnfit, BusError, Conflict, StorageFull
from skerry.log.base import (
    Deliver,
    Expect,
    MirrorInfo,
    Receipt,
    Record,
    Room,
    SharedReads,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.client import Cursor, Message, NoAnswer, NotNow, Publisher
from skerry.log.nats.connection import Connection
from skerry.log.nats.follow import follow
from skerry.log.nats.jetstream import (
    STREAM_NAME_IN_USE,
    STREAM_NOT_FOUND,
    WRONG_SEQUENCE,
    config_of,
    error_of,
    hidden_changes,
    info_of,
    is_transient,
    mirror_of,
    sent_headers,
    spec_of,
)
from skerry.log.nats.login import NatsOptions
from skerry.log.nats.read import Leader, Reads
from skerry.log.streams import STREAM_PREFIX, changes
from skerry.protocol.roles import HUB_API
from skerry.protocol.subjects import stream_of
from skerry.tasks import now_s

ID_BYTES = 32
"""Room in a message for what is added to its id."""
USUAL_PAYLOAD = 1024**2
"""NATS's own default for max_payload: it takes every message of a run with default settings."""


class NatsRequests:
    """One client's requests to the server, as a publisher needs them."""

    def __init__(self, connection: Connection, leader: Leader) -> None:
        self._connection = connection
        self._leader = leader
        self._creating = asyncio.Lock()

    async def store(self, message: Message, deadline: float) -> Receipt:
        subject, expect, headers = message.subject, message.expect, sent_headers(message)
        answer = await self._connection.request(
            subject, message.payload, deadline=deadline, headers=headers or None
        )
        reply = json.loads(answer.data)
        if (error := reply.get("error")) is None:
            return Receipt(reply["seq"], bool(reply.get("duplicate", False)))
        if error.get("err_code") == WRONG_SEQUENCE and expect is not None:
            msg = f"{expect.subject} is no longer at sequence {expect.sequence}."
            raise Conflict(msg, subject=expect.subject, expected=expect.sequence)
        if is_transient(error):
            raise NotNow
        raise error_of(error, f"a message on {subject}")

    async def exists(self, stream: str, deadline: float) -> bool:
        return bool(await self._leader.info(stream, deadline))

    async def create(self, spec: StreamSpec) -> tuple[str, ...]:
        config, about, api = config_of(spec), f"stream {spec.name}", self._connection.api
        while not (reply := await self._leader.info(spec.name)):
            in_use = (STREAM_NAME_IN_USE,)
            # For each the server removes and makes its account's folder: two at once collide there.
            async with self._creating:
                made = await api(
                    f"STREAM.CREATE.{spec.name}", config, about=about, empty_for=in_use
                )
            if made:
                return ()
        found = reply["config"]
        differences = changes(spec, spec_of(found)) + hidden_changes(spec, found)
        if differences:
            await api(f"STREAM.UPDATE.{spec.name}", found | config, about=about)
        return differences

    def failure(self, seconds: float, subject: str = "") -> BusError:
        if not subject:
            return self._connection.unavailable(seconds)
        what = f"answers, but has not stored a message on {subject} for {seconds:.3g} s:"
        if not self._connection.clustered:
            return StorageFull(
                f"The broker {what} its disk is probably full (its log says so). Free some space"
                " and restart the broker, which takes nothing into that stream until then. What was"
                " acknowledged is kept."
            )
        return BrokerUnavailable(
            f"The NATS cluster at {self._connection.urls} {what} bring back the nodes that are"
            " down; it needs more than half of its nodes. If all are up, a disk is full (their logs"
            " say so): free some space and restart that server. What was acknowledged is kept.",
            url=self._connection.urls,
        )


def check_size(message: Message, limit: int) -> None:
    """Raise BrokerUnfit for a message so large that the server would close the connection."""
    headers = sum(len(k) + len(v) + 4 for k, v in sent_headers(message).items())
    size = len(message.payload) + headers + ID_BYTES + 16
    if size > limit:
        msg = (
            f"A message of {size} bytes on {message.subject} does not fit the broker's max_payload"
            f" of {limit}: put `max_payload: {max(size, USUAL_PAYLOAD)}` into its config file, or"
            " lower sync.chunk_bytes."
        )
        raise BrokerUnfit(msg)


class Turns:
    """Lets a few publishes out at once, and those that expect the same subject one by one.

    A replicated stream refuses a second of those while the first is under way, as if it had failed.
    """

    def __init__(self, window: int) -> None:
        self._window = asyncio.Semaphore(window)
        self._by_subject: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def take(self, expected: str | None, deadline: float) -> AsyncGenerator[None]:
        """Hold a place; TimeoutError when none is free by the deadline."""
        turns: list[asyncio.Lock | asyncio.Semaphore] = [self._window]
        if expected is not None:
            turns.insert(0, self._by_subject.setdefault(expected, asyncio.Lock()))
        async with AsyncExitStack() as held:
            waits = any(turn.locked() for turn in turns)
            async with asyncio.timeout_at(deadline if waits else None):
                for turn in turns:
                    await held.enter_async_context(turn)
            yield


class Mirrors:
    """The mirrors of the hub's streams that a region's broker keeps."""

    def __init__(self, connection: Connection, leader: Leader, timeout_s: float) -> None:
        self._connection = connection
        self._leader = leader
        self._timeout_s = timeout_s

    async def make(self, config: Mapping[str, Any]) -> None:
        """Make a mirror of a stream of another domain, in place of the one that is there."""
        name, api = config["name"], self._connection.api
        about = f"the mirror {name}"
        await api(f"STREAM.DELETE.{name}", about=about, empty_for=(STREAM_NOT_FOUND,))
        await api(f"STREAM.CREATE.{name}", config, about=about)

    async def info(self, name: str) -> MirrorInfo | None:
        """Return the state of a mirror; None if there is no such stream."""
        found = await self._leader.info(name)
        return mirror_of(found) if found else None

    async def hub_answers(self) -> bool:
        """Return True where the hub answers a client of this broker."""
        deadline = now_s() + self._timeout_s
        try:
            await self._connection.request(f"{HUB_API}.INFO", b"", deadline=deadline)
        except NoAnswer:
            return False
        return True


class NatsBus:
    """One client of a NATS server; implements ``skerry.log.base.Bus``.

    Memory streams that this bus has declared are made again when a restart has lost them.
    """

    def __init__(
        self, url: str, *, name: str = "skerry", options: NatsOptions | None = None
    ) -> None:
        self._options = options = options or NatsOptions()
        self._connection = Connection(url, name, options)
        self._reads = Reads(self._connection)
        requests = NatsRequests(self._connection, self._reads.leader)
        key = secrets.token_bytes(ID_BYTES)
        timeout_s = options.request_timeout_s
        self._publisher = Publisher(requests, self, key, timeout_s)
        self._turns = Turns(options.publish_window)
        self.mirrors = Mirrors(self._connection, self._reads.leader, timeout_s)

    async def __aenter__(self) -> Self:
        now = now_s()
        await self._connection.ready(now + self._options.connect_timeout_s)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._connection.close()

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.max_payload

    @property
    def region(self) -> str:
        """The region whose broker this client is connected to, '' where that is the hub."""
        return self._connection.region

    @property
    def shared_reads(self) -> SharedReads:
        return self._reads.cache.reads

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        return await self._publisher.declare(specs)

    async def streams(self) -> list[StreamInfo]:
        found, total = list[StreamInfo](), 1
        while len(found) < total:
            body = {"offset": len(found)}
            reply = await self._connection.api("STREAM.LIST", body, about="the list of streams")
            if not (page := reply.get("streams")):
                break
            total, found = reply["total"], found + [info_of(stream) for stream in page]
        return sorted((i for i in found if i.name.startswith(STREAM_PREFIX)), key=lambda i: i.name)

    async def now_ns(self, subject: str) -> int:
        return await self._reads.leader.now_ns(stream_of(subject))

    async def rooms(self) -> tuple[Room, ...]:
        reply = await self._connection.api("INFO", about="how full the account is")
        limits = reply["limits"]  # those by number of replicas are not reported
        return (
            Room(Storage.FILE, reply["storage"], max(0, limits.get("max_storage", 0))),
            Room(Storage.MEMORY, reply["memory"], max(0, limits.get("max_memory", 0))),
        )

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        message = Message(subject, payload, msg_id, expect, dict(headers or {}))
        check_size(message, self._connection.max_payload)
        deadline = now_s() + self._options.waits_s
        waits_for = expect.subject if expect is not None and self._connection.clustered else None
        async with AsyncExitStack() as held:
            try:
                await held.enter_async_context(self._turns.take(waits_for, deadline))
            except TimeoutError as e:
                raise self._connection.unavailable(self._options.waits_s) from e
            receipt = await self._publisher.publish(message, deadline)
        self._reads.leader.saw(stream_of(subject), receipt.sequence)
        return receipt

    async def last(self, subject: str) -> Record | None:
        return await self._reads.last(subject)

    async def last_each(self, pattern: str) -> list[Record]:
        return await self._reads.last_each(pattern)

    async def get(self, stream: str, sequence: int) -> Record | None:
        return await self._reads.get(stream, sequence)

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        return self._reads.get_each(pattern, sequences)

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        return follow(self._connection, stream_of(patterns[0]), patterns, Cursor(deliver, after))
