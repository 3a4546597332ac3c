"""One stream of the memory log: what it keeps, drops, remembers and hands out."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import lru_cache

from skerry.errors import BusError, StorageFull
from skerry.log.base import PER_SUBJECT, Deliver, Record, Retention, StreamInfo, StreamSpec
from skerry.log.client import Cursor, Extent

RECORD_OVERHEAD = 30
"""Bytes a stored message takes beside its subject, headers and payload."""


@lru_cache(maxsize=8192)
def matches(pattern: str, subject: str) -> bool:
    """Return True if a subject matches a pattern with ``*`` (one token) and ``>`` (the rest)."""
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
        """End the waits for this subject; None: all waits."""
        waiting, self.waiting = self.waiting, []
        for patterns, future in waiting:
            if subject is not None and not any(matches(p, subject) for p in patterns):
                self.waiting.append((patterns, future))
            elif not future.done():
                future.set_result(None)

    def after(self, position: int, patterns: tuple[str, ...]) -> list[Record]:
        """Return what is stored after a sequence on these subjects."""
        if position >= self.last_seq:
            return []
        found = (self.records.get(seq) for seq in range(position + 1, self.last_seq + 1))
        return [r for r in found if r is not None and any(matches(p, r.subject) for p in patterns)]

    def newest_each(self, patterns: tuple[str, ...]) -> list[Record]:
        """Return the newest message of every subject that matches, in sequence order."""
        found = (q for s, q in self.newest.items() if any(matches(p, s) for p in patterns))
        return [self.records[sequence] for sequence in sorted(found)]

    def from_cursor(self, cursor: Cursor, patterns: tuple[str, ...]) -> list[Record]:
        """Return the messages that a follower at this cursor has not had yet."""
        if cursor.deliver is not Deliver.LAST_PER_SUBJECT or cursor.sequence:
            return self.after(cursor.sequence, patterns)
        newest = self.newest_each(patterns)
        if not newest:
            cursor.deliver, cursor.sequence = Deliver.ALL, self.last_seq
        return newest

    def drop(self, sequence: int) -> None:
        record = self.records.pop(sequence)
        self.bytes -= stored_bytes(record)
        if self.newest.get(record.subject) == sequence:
            del self.newest[record.subject]
            if left := [s for s, r in self.records.items() if r.subject == record.subject]:
                self.newest[record.subject] = max(left)

    def age(self, now_ns: int) -> None:
        """Drop messages older than the stream's window and message ids older than theirs."""
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
        """Append a record, dropping what the stream's retention allows.

        Raises StorageFull if there is no room, BusError for a record that is too long.
        """
        size, spec = stored_bytes(record), self.spec
        if 0 < spec.max_message_bytes < len(record.payload):
            msg = f"A message on {record.subject} is longer than {spec.max_message_bytes} bytes."
            raise BusError(msg)
        replaced = self._replaced_by(record)
        freed = stored_bytes(self.records[replaced]) if replaced else 0
        if 0 < spec.max_bytes < self.bytes + size - freed:
            if spec.retention is not Retention.WINDOW or size > spec.max_bytes:
                msg = f"Stream {spec.name} is full ({spec.max_bytes} bytes): raise its max_bytes."
                raise StorageFull(msg)
            while spec.max_bytes < self.bytes + size:
                self.drop(next(iter(self.records)))
        if replaced:
            self.drop(replaced)
        self.records[record.sequence] = record
        self.newest[record.subject] = self.last_seq = record.sequence
        self.bytes += size
        self.wake(record.subject)

    def _replaced_by(self, record: Record) -> int:
        """Return the sequence of the message that a record replaces on its subject, 0 for none."""
        most = PER_SUBJECT.get(self.spec.retention, 0)
        if most <= 1:
            return self.newest.get(record.subject, 0) if most else 0
        held = [s for s, r in self.records.items() if r.subject == record.subject]
        return held[0] if len(held) >= most else 0

    def extent(self) -> Extent:
        """Return where the stream begins and ends."""
        if not self.records:
            return Extent(self.last_seq + 1, 0, self.last_seq, 0)
        first, last = next(iter(self.records.values())), next(reversed(self.records.values()))
        return Extent(first.sequence, first.time_ns, self.last_seq, last.time_ns)

    def info(self) -> StreamInfo:
        first = next(iter(self.records), self.last_seq + 1 if self.last_seq else 0)
        return StreamInfo(
            self.spec.name, len(self.records), self.bytes, first, self.last_seq, self.spec
        )
