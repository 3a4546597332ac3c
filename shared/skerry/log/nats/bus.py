# pyright: basic
"""The log on NATS JetStream (nats-server 2.12 or newer)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

from skerry.errors import BrokerUnavailable, BrokerUnfit, BusError
from skerry.log.base import (
    MSG_ID,
    Deliver,
    Expect,
    Receipt,
    Record,
    Room,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.nats import errors as nats_errors
from skerry.log.nats.bulk import BulkReads
from skerry.log.nats.connection import Backoff, Connection, NatsOptions
from skerry.log.nats.errors import ApiError, NoAnswer
from skerry.log.nats.follow import Cursor, follow
from skerry.log.nats.listen import listen
from skerry.log.nats.reads import Reads
from skerry.log.nats.streams import config_of, hidden_changes, info_of, rooms_of, spec_of
from skerry.log.streams import STREAM_PREFIX, mend, stream_of

EXPECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"


class Message(NamedTuple):
    """What is sent for one publish; the headers carry its id and its expectation."""

    subject: str
    payload: bytes
    headers: dict[str, str]


class NatsBus:
    """One client of a NATS server; implements ``skerry.log.base.Bus``.

    Memory streams that this bus has declared are made again when a restart has lost them.
    """

    def __init__(
        self, url: str, *, name: str = "skerry", options: NatsOptions | None = None
    ) -> None:
        options = options or NatsOptions()
        self._connection = Connection(url, name, options)
        self._patience_s = options.waits_s
        self._reads = Reads(self._connection, self._patience_s)
        self._bulk_reads = BulkReads(self._connection, self._reads)
        self._window = asyncio.Semaphore(options.publish_window)
        self._turns: dict[str, asyncio.Lock] = {}
        self._forgetful: dict[str, StreamSpec] = {}

    async def __aenter__(self) -> Self:
        await self._connection.open()
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
        changes = [change for spec in specs for change in await self._declare(spec)]
        self._forgetful |= {s.name: s for s in specs if s.storage is Storage.MEMORY}
        return tuple(changes)

    async def streams(self) -> list[StreamInfo]:
        deadline, found, total = self._deadline(), list[dict[str, Any]](), 1
        while len(found) < total:
            reply = await self._api("STREAM.LIST", {"offset": len(found)}, "the list of streams")
            total, page = reply["total"], reply.get("streams") or []
            found += page
            if not page or self._now() > deadline:
                break
        infos = (info_of(stream) for stream in found)
        return sorted(
            (info for info in infos if info.name.startswith(STREAM_PREFIX)), key=lambda i: i.name
        )

    async def rooms(self) -> tuple[Room, ...]:
        return rooms_of(await self._api("INFO", None, "how full the account is"))

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        sent = dict(headers or {})
        if msg_id is not None:
            sent[MSG_ID] = msg_id
        if expect is not None:
            sent[EXPECT_SEQUENCE] = str(expect.sequence)
            if expect.subject != subject:
                sent[EXPECT_SUBJECT] = expect.subject
        self._check_size(subject, payload, sent)
        deadline = self._deadline()
        async with self._turn(expect, deadline), self._slot(self._window, deadline):
            receipt = await self._publish(Message(subject, payload, sent), expect, deadline)
        self._reads.saw(stream_of(subject), receipt.sequence)
        return receipt

    async def last(self, subject: str) -> Record | None:
        return await self._reads.last(subject)

    async def last_each(self, pattern: str) -> list[Record]:
        return await self._reads.last_each(pattern)

    async def get(self, stream: str, sequence: int) -> Record | None:
        return await self._reads.get(stream, sequence)

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        return self._bulk_reads.get_each(stream_of(pattern), pattern, sequences)

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        return follow(self._connection, stream_of(patterns[0]), patterns, Cursor(deliver, after))

    def listen(self, subject: str, queue: str) -> AsyncGenerator[bytes]:
        """Yield what is published on a subject that no stream keeps, shared by a queue group."""
        return listen(self._connection, subject, queue)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _deadline(self) -> float:
        return self._now() + self._patience_s

    @asynccontextmanager
    async def _slot(
        self, held: asyncio.Semaphore | asyncio.Lock, deadline: float
    ) -> AsyncGenerator[None]:
        """Hold one of them; BrokerUnavailable when none is free by the deadline."""
        try:
            async with asyncio.timeout_at(deadline if held.locked() else None):
                await held.acquire()
        except TimeoutError as e:
            raise self._connection.unavailable(self._patience_s) from e
        try:
            yield
        finally:
            held.release()

    def _turn(self, expect: Expect | None, deadline: float) -> AbstractAsyncContextManager[None]:
        """Wait for the writes before this one whose expectation names the same subject.

        A replicated stream refuses a second one while the first is under way, as if it had lost.
        """
        if expect is None or not self._connection.clustered:
            return nullcontext()
        return self._slot(self._turns.setdefault(expect.subject, asyncio.Lock()), deadline)

    def _check_size(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Refuse what the server would close the connection for."""
        size = len(payload) + sum(len(k) + len(v) + 4 for k, v in headers.items()) + 16
        limit = self._connection.max_payload
        if size > limit:
            msg = (
                f"A message of {size} bytes on {subject} does not fit the broker's max_payload of"
                f" {limit}: put `max_payload: {size}` into its config file, or lower"
                " sync.chunk_bytes."
            )
            raise BrokerUnfit(msg)

    async def _publish(self, message: Message, expect: Expect | None, deadline: float) -> Receipt:
        """Store a message by the deadline, or say why not.

        A server whose disk is full leaves publishes unanswered but answers everything else; so
        does, for a moment, one that has just come back. Hence one attempt more.
        """
        try:
            return await self._store(message, expect, deadline, doubt=False)
        except BrokerUnavailable:
            if MSG_ID not in message.headers:
                raise
        timeout = self._connection.options.request_timeout_s
        await self._reads.exists(stream_of(message.subject), self._now() + timeout)
        try:
            return await self._store(message, expect, self._now() + timeout, doubt=True)
        except BrokerUnavailable as e:
            subject, waited_s = message.subject, self._patience_s + timeout
            if self._connection.clustered:
                url = self._connection.urls
                raise nats_errors.not_agreed(url, subject, waited_s) from e
            raise nats_errors.not_stored(subject, waited_s) from e

    async def _store(
        self, message: Message, expect: Expect | None, deadline: float, *, doubt: bool
    ) -> Receipt:
        """Publish until the server has the message; ``doubt``: an earlier attempt may have."""
        subject, headers, backoff = message.subject, message.headers, Backoff(deadline)
        while True:
            try:
                answer = await self._connection.request(
                    subject, message.payload, deadline=deadline, headers=headers or None
                )
                reply = json.loads(answer.data)
                error = reply.get("error")
                if error is None:
                    return Receipt(reply["seq"], bool(reply.get("duplicate", False)))
                code = error.get("err_code", 0)
                if code == nats_errors.WRONG_SEQUENCE and expect is not None:
                    return await self._lost_or_ours(message, expect, error, doubt=doubt)
                if code != nats_errors.IN_PROCESS and not nats_errors.transient(error):
                    raise self._refused(error, subject)
            except NoAnswer as e:
                doubt = doubt or e.sent
                if e.sent and MSG_ID not in headers:
                    raise self._connection.unavailable(self._patience_s) from e
                if not e.sent:
                    await self._check_stream(subject, deadline)
            if not await backoff.pause():
                raise self._connection.unavailable(self._patience_s)

    def _refused(self, error: Mapping[str, Any], subject: str) -> BusError:
        problem = ApiError(error["code"], error.get("err_code", 0), error.get("description", ""))
        return nats_errors.translate(problem, f"a message on {subject}")

    async def _lost_or_ours(
        self, message: Message, expect: Expect, error: Mapping[str, Any], *, doubt: bool
    ) -> Receipt:
        """Tell a lost compare-and-set from our own write whose acknowledgement was lost."""
        if doubt:
            record, ours = await self.last(message.subject), message.headers.get(MSG_ID)
            if record is not None and record.headers.get(MSG_ID) == ours:
                return Receipt(record.sequence, duplicate=True)
        raise nats_errors.conflict(expect.subject, expect.sequence, error.get("description", ""))

    async def _check_stream(self, subject: str, deadline: float) -> None:
        """Raise BusError if nobody answers because the stream does not exist.

        A single server forgets a memory stream altogether when it restarts: one that this bus has
        declared is made again.
        """
        stream = stream_of(subject)
        if await self._reads.exists(stream, deadline):
            return
        if stream not in self._forgetful:
            raise nats_errors.no_stream(subject, stream)
        await self._declare(self._forgetful[stream])

    async def _api(self, name: str, body: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
        try:
            return await self._connection.api(name, body, deadline=self._deadline())
        except ApiError as e:
            raise nats_errors.translate(e, what) from e

    async def _declare(self, spec: StreamSpec) -> tuple[str, ...]:
        config = config_of(spec)
        while True:
            try:
                reply = await self._connection.api(
                    f"STREAM.INFO.{spec.name}", deadline=self._deadline()
                )
            except ApiError as e:
                if e.err_code != nats_errors.STREAM_NOT_FOUND:
                    raise nats_errors.translate(e, f"a look at stream {spec.name}") from e
            else:
                break
            try:
                await self._connection.api(
                    f"STREAM.CREATE.{spec.name}", config, deadline=self._deadline()
                )
            except ApiError as e:
                if e.err_code != nats_errors.STREAM_NAME_IN_USE:
                    raise nats_errors.translate(e, f"stream {spec.name}") from e
            else:
                return ()
        found = reply["config"]
        changes = mend(spec, spec_of(found)) + hidden_changes(spec, found)
        if changes:
            await self._api(f"STREAM.UPDATE.{spec.name}", found | config, f"stream {spec.name}")
        return changes
