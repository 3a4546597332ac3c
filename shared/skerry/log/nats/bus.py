"""The log on NATS JetStream (nats-server 2.12 or newer)."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from skerry.errors import BrokerUnavailable, BrokerUnfit, BusError
from skerry.log.base import (
    Deliver,
    Expect,
    Receipt,
    Record,
    Room,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.client import Cursor, Message, NotNow, Publisher
from skerry.log.nats import errors as nats_errors
from skerry.log.nats.connection import Connection, NatsOptions
from skerry.log.nats.errors import ApiError
from skerry.log.nats.follow import follow
from skerry.log.nats.jetstream import (
    config_of,
    hidden_changes,
    info_of,
    rooms_of,
    sent_headers,
    spec_of,
)
from skerry.log.nats.read import Reads
from skerry.log.streams import STREAM_PREFIX, changes
from skerry.protocol.subjects import stream_of

ID_BYTES = 32
"""Room in a message for what is added to its id."""


USUAL_PAYLOAD = 1024**2
"""NATS's own default for max_payload: it takes every message of a run with default settings."""


class NatsRequests:
    """One client's requests to the server, as a publisher needs them."""

    def __init__(self, connection: Connection, reads: Reads) -> None:
        self._connection = connection
        self._reads = reads

    async def store(self, message: Message, deadline: float) -> Receipt:
        subject, expect, headers = message.subject, message.expect, sent_headers(message)
        answer = await self._connection.request(
            subject, message.payload, deadline=deadline, headers=headers or None
        )
        reply = json.loads(answer.data)
        error = reply.get("error")
        if error is None:
            return Receipt(reply["seq"], bool(reply.get("duplicate", False)))
        problem = ApiError.of(error)
        if problem.err_code == nats_errors.WRONG_SEQUENCE and expect is not None:
            raise nats_errors.conflict(expect.subject, expect.sequence, problem.description)
        if problem.err_code == nats_errors.IN_PROCESS or nats_errors.transient(error):
            raise NotNow(problem.description)
        raise nats_errors.translate(problem, f"a message on {subject}")

    async def last(self, subject: str) -> Record | None:
        return await self._reads.last(subject)

    async def get(self, stream: str, sequence: int) -> Record | None:
        return await self._reads.get(stream, sequence)

    async def exists(self, stream: str, deadline: float) -> bool:
        return bool(await self._reads.leader.info(stream, deadline))

    async def create(self, spec: StreamSpec) -> tuple[str, ...]:
        """Create a stream, or change it in place; returns the differences that were found."""
        config, about, ask = config_of(spec), f"stream {spec.name}", self._connection.ask
        while not (reply := await self._reads.leader.info(spec.name)):
            in_use = (nats_errors.STREAM_NAME_IN_USE,)
            if await ask(f"STREAM.CREATE.{spec.name}", config, about=about, empty_for=in_use):
                return ()
        found = reply["config"]
        differences = changes(spec, spec_of(found)) + hidden_changes(spec, found)
        if differences:
            await ask(f"STREAM.UPDATE.{spec.name}", found | config, about=about)
        return differences

    async def streams(self) -> list[StreamInfo]:
        """Return every stream of this account, asked for page by page."""
        found, total = list[dict[str, Any]](), 1
        while len(found) < total:
            body = {"offset": len(found)}
            reply = await self._connection.ask("STREAM.LIST", body, about="the list of streams")
            page: list[dict[str, Any]] = reply.get("streams") or []
            total, found = reply["total"], found + page
            if not page:
                break
        return [info_of(stream) for stream in found]

    def unavailable(self, seconds: float) -> BrokerUnavailable:
        return self._connection.unavailable(seconds)

    def not_stored(self, subject: str, seconds: float) -> BusError:
        if self._connection.clustered:
            return nats_errors.not_agreed(self._connection.urls, subject, seconds)
        return nats_errors.not_stored(subject, seconds)


class PublishWindow:
    """Lets a few publishes out at once, and those that expect the same subject one by one.

    A replicated stream refuses a second of those while the first is under way, as if it had lost.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._window = asyncio.Semaphore(connection.options.publish_window)
        self._turns: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def slot(self, message: Message, deadline: float) -> AsyncGenerator[None]:
        """Hold a place for one publish; BrokerUnavailable when none is free by the deadline."""
        async with AsyncExitStack() as held:
            if message.expect is not None and self._connection.clustered:
                turn = self._turns.setdefault(message.expect.subject, asyncio.Lock())
                await self._enter(held, turn, deadline)
            await self._enter(held, self._window, deadline)
            yield

    async def _enter(
        self, held: AsyncExitStack, turn: asyncio.Semaphore | asyncio.Lock, deadline: float
    ) -> None:
        try:
            async with asyncio.timeout_at(deadline if turn.locked() else None):
                await held.enter_async_context(turn)
        except TimeoutError as e:
            raise self._connection.unavailable(self._connection.options.waits_s) from e


def check_size(message: Message, limit: int) -> None:
    """Raise BrokerUnfit for a message for which the server would close the connection."""
    headers = sum(len(k) + len(v) + 4 for k, v in sent_headers(message).items())
    size = len(message.payload) + headers + ID_BYTES + 16
    if size > limit:
        msg = (
            f"A message of {size} bytes on {message.subject} does not fit the broker's max_payload"
            f" of {limit}: put `max_payload: {max(size, USUAL_PAYLOAD)}` into its config file, or"
            " lower sync.chunk_bytes."
        )
        raise BrokerUnfit(msg)


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
        self._requests = NatsRequests(self._connection, self._reads)
        key = secrets.token_bytes(ID_BYTES)
        timeout_s, patience_s = options.request_timeout_s, options.waits_s
        self._publisher = Publisher(self._requests, key, timeout_s, patience_s)
        self._window = PublishWindow(self._connection)

    async def __aenter__(self) -> Self:
        now = asyncio.get_running_loop().time()
        await self._connection.ready(now + self._options.connect_timeout_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._connection.close()

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.max_payload

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        found = [change for spec in specs for change in await self._requests.create(spec)]
        memory = {s.name: s for s in specs if s.storage is Storage.MEMORY}
        self._publisher.memory_streams.update(memory)
        return tuple(found)

    async def streams(self) -> list[StreamInfo]:
        infos = await self._requests.streams()
        ours = [info for info in infos if info.name.startswith(STREAM_PREFIX)]
        return sorted(ours, key=lambda info: info.name)

    async def rooms(self) -> tuple[Room, ...]:
        return rooms_of(await self._connection.ask("INFO", about="how full the account is"))

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
        deadline = asyncio.get_running_loop().time() + self._options.waits_s
        async with self._window.slot(message, deadline):
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
