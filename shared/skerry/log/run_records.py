"""Publish and read the records of a run; what is refused is left out, counted and reported."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import structlog

from skerry.errors import WireError
from skerry.log.base import Bus, Deliver, Expect, Receipt, Record
from skerry.log.reading import read_now
from skerry.protocol import messages
from skerry.protocol.records import encode, read, subject_of
from skerry.protocol.subjects import Subjects

T = TypeVar("T", bound=messages.Record)

log = structlog.get_logger()

EVERY_S = 1.0
PATTERNS: Mapping[type[object], Callable[[Subjects], str]] = {
    messages.RunRecord: lambda subjects: subjects.ledger("run"),
    messages.MemberRecord: Subjects.member,
    messages.Commit: Subjects.commit,
    messages.Quarantine: Subjects.quarantine,
    messages.CheckpointRecord: lambda subjects: subjects.ledger("checkpoint"),
    messages.Evaluation: lambda subjects: subjects.ledger("eval"),
    messages.Pulse: Subjects.pulse,
    messages.Round: Subjects.round,
    messages.SyncerPulse: Subjects.syncer,
}
"""Where the records of each kind lie."""
HISTORY = frozenset({messages.Commit, messages.CheckpointRecord, messages.Evaluation})
"""Kinds of which every record counts, and not only the newest on each subject."""


@dataclass(slots=True)
class Rejections:
    """Counts what was refused by cause, and logs ``event`` at most once a second.

    A line says the newest refusal in full, and how many there were since the line before.
    """

    event: str
    monotonic_s: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    logged_s: float = float("-inf")

    def note(self, cause: str, **about: object) -> None:
        """Note one refusal; ``about`` are the fields of its line."""
        self.counts[cause] += 1
        now = self.monotonic_s()
        if now - self.logged_s >= EVERY_S:
            log.warning(self.event, cause=cause, counts=dict(self.counts), **about)
            self.counts.clear()
            self.logged_s = now


UNREADABLE = Rejections("messages_refused")
"""Messages of the log that this process refused at the door, over all of its readers."""


def refuse(error: Exception, subject: str, sequence: int) -> None:
    """Note that a message was refused, whatever reading it raised."""
    cause = error.cause if isinstance(error, WireError) else type(error).__name__
    UNREADABLE.note(cause, subject=subject[:200], sequence=sequence, detail=str(error)[:200])


def readable(kind: type[T], record: Record, run: str, plan_digest: int | None = None) -> T | None:
    """Return the record in a stored message, or None for one that is refused, which is reported.

    Whatever reading raises: no message ends a reader.
    """
    try:
        return read(kind, record, run=run, plan_digest=plan_digest)
    except Exception as error:  # noqa: BLE001 - what a hostile message raises is not foreseen
        refuse(error, record.subject, record.sequence)
        return None


async def publish(
    bus: Bus,
    record: messages.Record,
    *,
    msg_id: str | None = None,
    expect: Expect | None = None,
    headers: Mapping[str, str] | None = None,
) -> Receipt:
    """Publish a record on its own subject; raises as the bus does."""
    subject, data = subject_of(record), encode(record)
    return await bus.publish(subject, data, msg_id=msg_id, expect=expect, headers=headers)


async def follow(
    bus: Bus, run: str, kind: type[T], plan_digest: int | None = None
) -> AsyncGenerator[T]:
    """Yield the newest record on each subject of that kind, then each new one, for ever.

    For a kind in ``HISTORY`` all older records come first. With ``plan_digest`` records of another
    plan are left out.
    """
    deliver = Deliver.ALL if kind in HISTORY else Deliver.LAST_PER_SUBJECT
    async with aclosing(bus.follow(PATTERNS[kind](Subjects(run)), deliver=deliver)) as follower:
        async for stored in follower:
            if (value := readable(kind, stored, run, plan_digest)) is not None:
                yield value


async def read_all(bus: Bus, run: str, kind: type[T]) -> list[T]:
    """Return every record of that kind that the log holds by now, oldest first."""
    async with aclosing(read_now(bus, PATTERNS[kind](Subjects(run)))) as records:
        found = [readable(kind, stored, run) async for stored in records]
    return [value for value in found if value is not None]


async def newest(bus: Bus, run: str, kind: type[T], subject: str) -> T | None:
    """Return the newest record on one subject; None where there is none, or it is refused."""
    stored = await bus.last(subject)
    return None if stored is None else readable(kind, stored, run)


async def newest_each(bus: Bus, run: str, kind: type[T], plan_digest: int | None = None) -> list[T]:
    """Return the newest record on each subject of that kind, without those that are refused."""
    stored = await bus.last_each(PATTERNS[kind](Subjects(run)))
    found = (readable(kind, record, run, plan_digest) for record in stored)
    return [value for value in found if value is not None]


@dataclass(frozen=True, slots=True)
class NewestRecord(Generic[T]):
    """The newest message of a subject, and the newest one there that can be read.

    ``sequence`` is that of the newest message, ``stored`` the one that holds ``value``; None where
    none can be read.
    """

    subject: str
    sequence: int
    stored: Record
    value: T | None


async def newest_readable(bus: Bus, run: str, kind: type[T]) -> list[NewestRecord[T]]:
    """Return the newest record of each subject that can be read, whatever lies above it.

    What somebody has written stays long, in the ledger for ever: it must not keep others from
    reading.
    """
    stored = await bus.last_each(PATTERNS[kind](Subjects(run)))
    return [await readable_up_to(bus, run, kind, record) for record in stored]


async def readable_up_to(bus: Bus, run: str, kind: type[T], last: Record) -> NewestRecord[T]:
    """Return the newest record of a subject that can be read, given its newest message."""
    if (value := readable(kind, last, run)) is not None:
        return NewestRecord(last.subject, last.sequence, last, value)
    found: NewestRecord[T] = NewestRecord(last.subject, last.sequence, last, None)
    async with aclosing(bus.follow(last.subject)) as follower:
        async for stored in follower:
            if stored.sequence >= last.sequence:
                break
            if (value := readable(kind, stored, run)) is not None:
                found = NewestRecord(last.subject, last.sequence, stored, value)
    return found
