"""The log in memory: the broker's rules without a broker, for tests, simulation and the lab.

One ``MemoryBroker`` stands for the server; every ``connect()`` is one client of it, behind a link
that delays, loses or repeats what goes through it. All of it lives on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol, Self, TypeVar

from skerry.errors import BrokerUnavailable, BrokerUnfit, BusError, Conflict, StorageFull
from skerry.log.base import (
    MSG_ID,
    Deliver,
    Expect,
    Receipt,
    Record,
    Room,
    SharedReads,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.client import (
    ATTEMPTS_WORTH,
    Cursor,
    Message,
    NoAnswer,
    Publisher,
    Retries,
    one_by_one,
)
from skerry.log.memory_stream import MemoryStream, matches
from skerry.log.streams import STREAM_PREFIX, changes, normal
from skerry.protocol.subjects import stream_of
from skerry.tasks import now_s

T = TypeVar("T")


class LinkModel(Protocol):
    """The link between one client and its broker: it decides what becomes of each message."""

    timeout_s: float
    """How long one request waits for its answer."""

    async def request(self, act: Callable[[], T], store: Message | None = None) -> T:
        """Carry a request to the broker, do it there and carry the answer back.

        ``store`` is the message that it stores, if it stores one. Raises NoAnswer when nothing
        came back in time; the broker may have acted nevertheless.
        """
        ...

    def deliver(self, records: Sequence[Record], since_s: float) -> AsyncGenerator[Record]:
        """Yield stored messages as they arrive at a follower that began to wait at ``since_s``.

        Ends early when the connection is lost: the follower begins again after the last one.
        """
        ...

    async def usable(self) -> None:
        """Wait until the broker can be reached."""
        ...


class DirectLink:
    """No distance and no faults."""

    timeout_s = 5.0

    async def request(self, act: Callable[[], T], store: Message | None = None) -> T:
        del store
        await asyncio.sleep(0)
        return act()

    async def deliver(self, records: Sequence[Record], since_s: float) -> AsyncGenerator[Record]:
        del since_s
        for record in records:
            yield record

    async def usable(self) -> None:
        return


class MemoryBroker:
    """The server: streams that all its clients share. ``clock_ns`` stamps records and ages them."""

    def __init__(
        self, *, clock_ns: Callable[[], int] = time.time_ns, max_payload_bytes: int = 1024**2
    ) -> None:
        self.clock_ns = clock_ns
        self.max_payload_bytes = max_payload_bytes
        self.streams: dict[str, MemoryStream] = {}
        self.declared = asyncio.Event()
        self.clients = 0

    def connect(self, link: LinkModel | None = None) -> MemoryBus:
        """Return a client of this broker, behind a link if one is given."""
        return MemoryBus(self, link)

    def stream(self, name: str) -> MemoryStream | None:
        """Return a stream after dropping what has expired, or None if there is none."""
        stream = self.streams.get(name)
        if stream is not None:
            stream.age(self.clock_ns())
        return stream

    def declare(self, spec: StreamSpec) -> tuple[str, ...]:
        """Create or change one stream and return its differences; StreamDrift as the port says."""
        found = self.streams.get(spec.name)
        if found is None:
            self.streams[spec.name] = MemoryStream(normal(spec))
            self.declared.set()
            self.declared = asyncio.Event()
            return ()
        differences = changes(spec, found.spec)
        found.spec = normal(spec)
        return differences

    def infos(self) -> list[StreamInfo]:
        """Return every Skerry stream, by name."""
        names = sorted(name for name in self.streams if name.startswith(STREAM_PREFIX))
        return [stream.info() for name in names if (stream := self.stream(name))]

    def rooms(self) -> tuple[Room, ...]:
        """Return what its streams hold; nothing bounds them all together."""
        used = dict.fromkeys((Storage.FILE, Storage.MEMORY), 0)
        for stream in self.streams.values():
            used[stream.spec.storage] += stream.bytes
        return tuple(Room(storage, held) for storage, held in used.items())

    def restart(self) -> None:
        """Do what a restart does: streams in memory are gone, those in files are as they were."""
        lost = [n for n, s in self.streams.items() if s.spec.storage is Storage.MEMORY]
        for stream in [self.streams.pop(name) for name in lost]:
            stream.lost = True
            stream.wake()

    def append(self, message: Message) -> Receipt:
        """Store one message, checking its expectation before its id, as the server does."""
        subject, expect, msg_id = message.subject, message.expect, message.msg_id
        stream = self.stream(stream_of(subject))
        if stream is None:
            raise NoAnswer(sent=False)
        if not any(matches(p, subject) for p in stream.spec.subjects):
            msg = f"No stream takes {subject}: declare the run's streams first."
            raise BusError(msg)
        if expect is not None and stream.newest_of(expect.subject) != expect.sequence:
            msg = f"{expect.subject} is no longer at sequence {expect.sequence}."
            raise Conflict(msg, subject=expect.subject, expected=expect.sequence)
        if msg_id is not None and msg_id in stream.seen:
            return Receipt(stream.seen[msg_id][0], duplicate=True)
        kept = message.headers if msg_id is None else {**message.headers, MSG_ID: msg_id}
        sequence, payload = stream.last_seq + 1, bytes(message.payload)
        record = Record(subject, sequence, self.clock_ns(), payload, kept)
        stream.store(record)
        if msg_id is not None:
            stream.seen[msg_id] = (record.sequence, record.time_ns)
        return Receipt(record.sequence)


class MemoryRequests:
    """One client's requests to the broker, repeated where that is safe."""

    def __init__(self, broker: MemoryBroker, link: LinkModel) -> None:
        self._broker = broker
        self._link = link
        self.patience_s = ATTEMPTS_WORTH * link.timeout_s

    async def ask(self, act: Callable[[], T], deadline: float | None = None) -> T:
        """Ask until there is an answer; BrokerUnavailable if there is none by the deadline."""
        now = now_s()
        retries = Retries(now + self.patience_s if deadline is None else deadline)
        while True:
            try:
                return await self._link.request(act)
            except NoAnswer as e:
                if not await retries.pause():
                    raise self.failure(self.patience_s) from e

    async def store(self, message: Message, deadline: float) -> Receipt:
        del deadline  # an attempt takes no longer than the link waits
        return await self._link.request(lambda: self._broker.append(message), message)

    async def exists(self, stream: str, deadline: float) -> bool:
        return await self.ask(lambda: self._broker.stream(stream) is not None, deadline)

    async def create(self, spec: StreamSpec) -> tuple[str, ...]:
        return await self.ask(lambda: self._broker.declare(spec))

    def failure(self, seconds: float, subject: str = "") -> BusError:
        if not subject:
            msg = f"The broker has not answered for {seconds:.3g} s."
            return BrokerUnavailable(msg, url="memory")
        msg = f"The broker answers, but has not stored a message on {subject} for {seconds:.3g} s."
        return StorageFull(msg)


class MemoryBus:
    """One client of a MemoryBroker; implements ``skerry.log.base.Bus``.

    It treats the faults of its link as every client of the log does.
    """

    def __init__(self, broker: MemoryBroker, link: LinkModel | None = None) -> None:
        self.broker = broker
        self.link = link or DirectLink()
        self._requests = waits = MemoryRequests(broker, self.link)
        broker.clients += 1  # its ids are the same in each run of a seed, and no other client's
        key = f"client {broker.clients}".encode()
        self._publisher = Publisher(waits, self, key, self.link.timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    @property
    def shared_reads(self) -> SharedReads:
        return SharedReads()

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        return await self._publisher.declare(specs)

    async def streams(self) -> list[StreamInfo]:
        return await self._requests.ask(self.broker.infos)

    async def now_ns(self, subject: str) -> int:
        def look() -> int:
            if self.broker.stream(stream_of(subject)) is None:
                msg = f"There is no stream {stream_of(subject)}."
                raise BusError(msg)
            return self.broker.clock_ns()

        return await self._requests.ask(look)

    async def rooms(self) -> tuple[Room, ...]:
        return await self._requests.ask(self.broker.rooms)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        if len(payload) > self.max_payload_bytes:
            msg = (
                f"A message of {len(payload)} bytes does not fit the broker's max_payload of"
                f" {self.max_payload_bytes}: lower sync.chunk_bytes."
            )
            raise BrokerUnfit(msg)
        message = Message(subject, payload, msg_id, expect, dict(headers or {}))
        deadline = now_s() + self._requests.patience_s
        return await self._publisher.publish(message, deadline)

    async def last(self, subject: str) -> Record | None:
        def look() -> Record | None:
            stream = self.broker.stream(stream_of(subject))
            return None if stream is None else stream.last(subject)

        return await self._requests.ask(look)

    async def last_each(self, pattern: str) -> list[Record]:
        def look() -> list[Record]:
            stream = self.broker.stream(stream_of(pattern))
            return [] if stream is None else stream.newest_each((pattern,))

        return await self._requests.ask(look)

    async def get(self, stream: str, sequence: int) -> Record | None:
        def look() -> Record | None:
            found = self.broker.stream(stream)
            return None if found is None else found.records.get(sequence)

        return await self._requests.ask(look)

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        return one_by_one(self.get, stream_of(pattern), sequences)

    async def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        live, since_s = deliver is Deliver.LIVE, now_s()
        cursor = Cursor(Deliver.NEW if live else deliver, after)
        while True:
            stream = await self._stream(stream_of(patterns[0]))
            cursor.place(stream.extent())
            batch = stream.from_cursor(cursor, patterns)
            if not batch:
                await stream.more(patterns)
                continue
            async with aclosing(self.link.deliver(batch, since_s)) as arriving:
                async for record in arriving:
                    cursor.move(record)
                    yield record
            if live and cursor.sequence < batch[-1].sequence:  # the connection was lost
                cursor = Cursor(Deliver.NEW)

    async def _stream(self, name: str) -> MemoryStream:
        """Return a stream, waiting for the broker and until a client has declared it."""
        while True:
            await self.link.usable()
            if (stream := self.broker.stream(name)) is not None:
                return stream
            await self.broker.declared.wait()
