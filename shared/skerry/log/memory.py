"""The log in memory: the broker's rules without a broker, for tests and simulation.

One ``MemoryBroker`` stands for the server; every ``connect()`` is one client of it. All of it
lives on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Self

from skerry.errors import BrokerUnfit, BusError, Conflict, StorageFull
from skerry.log.base import (
    MSG_ID,
    Bus,
    Deliver,
    Expect,
    Receipt,
    Record,
    Retention,
    Room,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.streams import STREAM_PREFIX, mend, normal, stream_of

RECORD_OVERHEAD = 30
"""Bytes a stored message takes beside its subject, headers and payload."""


@lru_cache(maxsize=8192)
def matches(pattern: str, subject: str) -> bool:
    """Tell whether a subject matches a pattern with ``*`` (one token) and ``>`` (the rest)."""
    wants, has = pattern.split("."), subject.split(".")
    for i, part in enumerate(wants):
        if part == ">":
            return len(has) > i
        if i >= len(has) or part not in ("*", has[i]):
            return False
    return len(wants) == len(has)


def stored_bytes(record: Record) -> int:
    """Return the room a record takes in its stream."""
    headers = sum(len(k) + len(v) + 4 for k, v in record.headers.items())
    return len(record.subject) + headers + len(record.payload) + RECORD_OVERHEAD


@dataclass(slots=True)
class MemoryStream:
    """One stream: its messages by sequence, and the newest sequence of each subject."""

    spec: StreamSpec
    records: dict[int, Record] = field(default_factory=dict[int, Record])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    seen: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    last_seq: int = 0
    bytes: int = 0
    lost: bool = False
    waiting: list[tuple[tuple[str, ...], asyncio.Future[None]]] = field(
        default_factory=list[tuple[tuple[str, ...], "asyncio.Future[None]"]]
    )

    async def more(self, patterns: tuple[str, ...]) -> None:
        """Wait until a message on one of these subjects is stored, or the stream is lost."""
        if self.lost:
            return
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((patterns, future))
        await future

    def wake(self, subject: str | None = None) -> None:
        """End the wait of those who wait for this subject; None: of everybody."""
        waiting, self.waiting = self.waiting, []
        for patterns, future in waiting:
            if subject is not None and not any(matches(p, subject) for p in patterns):
                self.waiting.append((patterns, future))
            elif not future.done():
                future.set_result(None)

    def after(self, position: int, patterns: tuple[str, ...]) -> list[Record]:
        """Return what lies behind a sequence on these subjects."""
        if position >= self.last_seq:
            return []
        found = (self.records.get(seq) for seq in range(position + 1, self.last_seq + 1))
        return [r for r in found if r is not None and any(matches(p, r.subject) for p in patterns)]

    def newest_each(self, patterns: tuple[str, ...]) -> list[Record]:
        """Return the newest message of every subject that matches, in sequence order."""
        found = (q for s, q in self.newest.items() if any(matches(p, s) for p in patterns))
        return [self.records[sequence] for sequence in sorted(found)]

    def drop(self, sequence: int) -> None:
        record = self.records.pop(sequence)
        self.bytes -= stored_bytes(record)
        if self.newest.get(record.subject) == sequence:
            del self.newest[record.subject]

    def age(self, now_ns: int) -> None:
        """Forget what is older than the window and message ids older than theirs."""
        if self.spec.max_age_s > 0:
            floor = now_ns - int(self.spec.max_age_s * 1e9)
            while self.records and (oldest := next(iter(self.records))):
                if self.records[oldest].time_ns > floor:
                    break
                self.drop(oldest)
        floor = now_ns - int(self.spec.duplicate_window_s * 1e9)
        while self.seen and self.seen[oldest_id := next(iter(self.seen))][1] <= floor:
            del self.seen[oldest_id]

    def last(self, subject: str) -> Record | None:
        return self.records.get(self.newest_of(subject))

    def newest_of(self, pattern: str) -> int:
        """Return the newest sequence on any subject that matches, 0 if there is none."""
        if "*" not in pattern and ">" not in pattern:
            return self.newest.get(pattern, 0)
        return max(
            (s for subject, s in self.newest.items() if matches(pattern, subject)), default=0
        )

    def store(self, record: Record) -> None:
        """Append a record and let retention make room; StorageFull if it may not."""
        size, spec = stored_bytes(record), self.spec
        previous = self.newest.get(record.subject)
        replaces = previous is not None and spec.retention is Retention.LAST_PER_SUBJECT
        freed = stored_bytes(self.records[previous]) if previous and replaces else 0
        if 0 < spec.max_bytes < self.bytes + size - freed:
            if spec.retention is not Retention.WINDOW or size > spec.max_bytes:
                msg = f"Stream {spec.name} is full ({spec.max_bytes} bytes): raise its max_bytes."
                raise StorageFull(msg)
            while spec.max_bytes < self.bytes + size:
                self.drop(next(iter(self.records)))
        if previous and replaces:
            self.drop(previous)
        self.records[record.sequence] = record
        self.newest[record.subject] = self.last_seq = record.sequence
        self.bytes += size
        self.wake(record.subject)

    def info(self) -> StreamInfo:
        first = next(iter(self.records), self.last_seq + 1 if self.last_seq else 0)
        return StreamInfo(
            self.spec.name, len(self.records), self.bytes, first, self.last_seq, self.spec
        )


class MemoryBroker:
    """The server: streams that all its clients share. ``clock_ns`` stamps records and ages them."""

    def __init__(
        self, *, clock_ns: Callable[[], int] = time.time_ns, max_payload_bytes: int = 1024**2
    ) -> None:
        self.clock_ns = clock_ns
        self.max_payload_bytes = max_payload_bytes
        self.streams: dict[str, MemoryStream] = {}
        self.declared = asyncio.Event()

    def connect(self) -> MemoryBus:
        """Return a client of this broker."""
        return MemoryBus(self)

    def stream(self, name: str) -> MemoryStream | None:
        """Return a stream with everything expired forgotten, or None."""
        stream = self.streams.get(name)
        if stream is not None:
            stream.age(self.clock_ns())
        return stream

    def declare(self, spec: StreamSpec) -> tuple[str, ...]:
        """Create or mend one stream and return its differences; StreamDrift as the port says."""
        found = self.streams.get(spec.name)
        if found is None:
            self.streams[spec.name] = MemoryStream(normal(spec))
            self.declared.set()
            self.declared = asyncio.Event()
            return ()
        changes = mend(spec, found.spec)
        found.spec = normal(spec)
        return changes

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

    def append(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None,
        expect: Expect | None,
        headers: Mapping[str, str],
    ) -> Receipt:
        """Store one message, the expectation checked before the message id, as the server does."""
        stream = self.stream(stream_of(subject))
        if stream is None or not any(matches(p, subject) for p in stream.spec.subjects):
            msg = f"No stream takes {subject}: declare the run's streams first."
            raise BusError(msg)
        if expect is not None and stream.newest_of(expect.subject) != expect.sequence:
            msg = f"{expect.subject} is no longer at sequence {expect.sequence}."
            raise Conflict(msg, subject=expect.subject, expected=expect.sequence)
        if msg_id is not None and msg_id in stream.seen:
            return Receipt(stream.seen[msg_id][0], duplicate=True)
        kept = dict(headers) if msg_id is None else {**headers, MSG_ID: msg_id}
        record = Record(subject, stream.last_seq + 1, self.clock_ns(), bytes(payload), kept)
        stream.store(record)
        if msg_id is not None:
            stream.seen[msg_id] = (record.sequence, record.time_ns)
        return Receipt(record.sequence)


async def one_by_one(bus: Bus, stream: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
    """Yield messages by their sequences up to the first that is gone, each by a request."""
    for sequence in sequences:
        record = await bus.get(stream, sequence)
        if record is None:
            return
        yield record


class MemoryBus:
    """One client of a MemoryBroker; implements ``skerry.log.base.Bus``."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    @property
    def max_payload_bytes(self) -> int:
        return self.broker.max_payload_bytes

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        await asyncio.sleep(0)
        return tuple(change for spec in specs for change in self.broker.declare(spec))

    async def streams(self) -> list[StreamInfo]:
        await asyncio.sleep(0)
        names = sorted(name for name in self.broker.streams if name.startswith(STREAM_PREFIX))
        return [stream.info() for name in names if (stream := self.broker.stream(name))]

    async def rooms(self) -> tuple[Room, ...]:
        await asyncio.sleep(0)
        return self.broker.rooms()

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        await asyncio.sleep(0)
        if len(payload) > self.max_payload_bytes:
            msg = (
                f"A message of {len(payload)} bytes does not fit the broker's max_payload of"
                f" {self.max_payload_bytes}: lower sync.chunk_bytes."
            )
            raise BrokerUnfit(msg)
        return self.broker.append(
            subject, payload, msg_id=msg_id, expect=expect, headers=headers or {}
        )

    async def last(self, subject: str) -> Record | None:
        await asyncio.sleep(0)
        stream = self.broker.stream(stream_of(subject))
        return None if stream is None else stream.last(subject)

    async def last_each(self, pattern: str) -> list[Record]:
        await asyncio.sleep(0)
        stream = self.broker.stream(stream_of(pattern))
        if stream is None:
            return []
        return stream.newest_each((pattern,))

    async def get(self, stream: str, sequence: int) -> Record | None:
        await asyncio.sleep(0)
        found = self.broker.stream(stream)
        return None if found is None else found.records.get(sequence)

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        return one_by_one(self, stream_of(pattern), sequences)

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        return self._follow(patterns, deliver, after)

    async def _follow(
        self, patterns: tuple[str, ...], deliver: Deliver, after: int
    ) -> AsyncGenerator[Record]:
        stream = await self._stream(stream_of(patterns[0]))
        if 0 < after > stream.last_seq:
            deliver, after = Deliver.ALL, 0
        position, batch = after, list[Record]()
        if not after and deliver is not Deliver.ALL:
            position = stream.last_seq
        if not after and deliver is Deliver.LAST_PER_SUBJECT:
            batch = stream.newest_each(patterns)
        while True:
            for record in batch:
                if record.sequence in stream.records:
                    yield record
                stream.age(self.broker.clock_ns())
            position = max(position, batch[-1].sequence if batch else 0)
            batch = stream.after(position, patterns)
            if not batch:
                await stream.more(patterns)
                now = await self._stream(stream.spec.name)
                stream, position = now, (position if now is stream else 0)
                batch = stream.after(position, patterns)

    async def _stream(self, name: str) -> MemoryStream:
        """Return a stream, waiting until it has been declared."""
        while (stream := self.broker.stream(name)) is None:
            await self.broker.declared.wait()
        return stream
