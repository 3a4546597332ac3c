"""A run's messages as viewers read them: unreadable and impossible ones are counted and left out.

A viewer that accepted any fragment number and any learner name could be filled up by everybody who
may publish.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skerry.errors import WireError
from skerry.log.base import Bus, Deliver, Record
from skerry.log.reading import newest_sequence, read_up_to
from skerry.log.run_records import HISTORY, PATTERNS
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Pulse,
    Round,
)
from skerry.protocol.records import read
from skerry.protocol.subjects import Subjects
from skerry.status.view import Message

RunMessage = Message | Round
T = TypeVar("T", bound=RunMessage)
T_co = TypeVar("T_co", bound=RunMessage, covariant=True)


READ_WHOLE = HISTORY | {MemberRecord}
"""Kinds of which viewers read old records, too: a learner that flaps started more than once."""

MOST_LEARNERS = 1000
"""Most learners that are taken in, since names come from the log."""
MOST_LATELY = 1000
LOOKED = 10_000
"""Ledger records that a single look reads at the beginning, and as many at the end."""


@dataclass(slots=True)
class MessageCounts:
    """How many messages of each kind were read, and how many were malformed.

    ``joined`` are the names with a member's record, ``heard`` those that have only pulsed, so that
    invented ones do not keep out learners that join later. ``lately`` is when the newest malformed
    ones came (seconds since the epoch): by our clock, or the broker's for those that were there
    when we began.
    """

    read: Counter[str] = field(default_factory=Counter[str])
    malformed: Counter[str] = field(default_factory=Counter[str])
    joined: set[str] = field(default_factory=set[str])
    heard: set[str] = field(default_factory=set[str])
    lately: deque[float] = field(default_factory=lambda: deque[float](maxlen=MOST_LATELY))

    def since(self, at_s: float) -> int:
        """Return how many malformed messages came since then, as far as they are remembered."""
        return sum(came_s >= at_s for came_s in self.lately)

    def fits(self, message: RunMessage, fragments: int) -> bool:
        """Return True if a run of so many fragments can have this message."""
        match message:
            case Pulse(learner=learner, versions=versions):
                return len(versions) <= fragments and self._known(learner, joined=False)
            case Evaluation(versions=versions) | CheckpointRecord(versions=versions):
                return len(versions) <= fragments
            case MemberRecord(learner=learner):
                return self._known(learner, joined=True)
            case Commit(fragment=fragment) | Round(fragment=fragment):
                return fragment < fragments
            case _:
                return True

    def _known(self, learner: str, *, joined: bool) -> bool:
        if learner in self.joined or (learner in self.heard and not joined):
            return True
        names = self.joined if joined else self.heard
        if len(names) >= MOST_LEARNERS:
            return False
        names.add(learner)
        return True


@dataclass(frozen=True, slots=True)
class Seen(Generic[T_co]):
    """A message, its place in its stream, and when the broker had it (ns, see ``behind_ns``).

    ``at_s`` is when it was there by the reader's clock, in seconds since the epoch. What comes
    while we watch is as new as its arrival: the broker's clock may be behind ours, and nothing
    would ever look new. How old history is, the broker alone can say: a learner's clock, or a
    syncer's, may be off by hours.
    """

    message: T_co
    sequence: int
    stored_ns: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Sources:
    """One run's messages by kind.

    ``fragments`` is P, ``clock_s`` gives seconds since the epoch, and the broker's clock is
    ``behind_ns`` nanoseconds behind it: known to a single look; ``follow`` goes by arrival.
    """

    bus: Bus
    run: str
    counts: MessageCounts
    fragments: int
    clock_s: Callable[[], float] = time.time
    behind_ns: int = 0

    async def follow(self, kind: type[T]) -> AsyncGenerator[Seen[T]]:
        """Yield the messages of a kind for ever."""
        name = kind.__name__.removesuffix("Record").lower()  # as metrics have it: pulse, member
        pattern = PATTERNS[kind](Subjects(self.run))
        deliver = Deliver.ALL if kind in READ_WHOLE else Deliver.LAST_PER_SUBJECT
        known_to, before = await newest_sequence(self.bus, pattern), 0
        records = self.bus.follow(pattern, deliver=deliver)
        async with aclosing(records):
            async for record in records:
                if record.sequence <= before:  # a stream in memory that restarted with its broker
                    known_to = 0
                before = record.sequence
                now_s = self.clock_s()
                at_s = now_s if record.sequence > known_to else self._stored_s(record)
                message = self._read(kind, record)
                if message is None:
                    self.counts.malformed[name] += 1
                    self.counts.lately.append(at_s)
                    continue
                self.counts.read[name] += 1
                yield Seen(message, record.sequence, self._stored_ns(record), at_s)

    async def newest(self, kind: type[T]) -> list[Seen[T]]:
        """Return the newest message of each subject; only ``follow`` counts what is left out."""
        records = await self.bus.last_each(PATTERNS[kind](Subjects(self.run)))
        return [seen for record in records if (seen := self._history(kind, record)) is not None]

    async def stored(self, kind: type[T]) -> AsyncGenerator[Seen[T]]:
        """Yield the messages of a kind that the log holds by now, oldest first.

        From the middle of a long ledger only the newest of each subject is read, such as that of a
        fragment without commits since: a million commits take three minutes to read.
        """
        pattern = PATTERNS[kind](Subjects(self.run))
        ends = await self.bus.last_each(pattern)
        newest = max((record.sequence for record in ends), default=0)
        late = max(0, newest - LOOKED) if kind in HISTORY else 0
        early = min(LOOKED, late)
        between = [record for record in ends if early < record.sequence <= late]
        for after, through, then in ((0, early, between), (late, newest, ())):
            async with aclosing(read_up_to(self.bus, pattern, through, after)) as records:
                async for record in records:
                    if (seen := self._history(kind, record)) is not None:
                        yield seen
            for record in then:
                if (seen := self._history(kind, record)) is not None:
                    yield seen

    def _history(self, kind: type[T], record: Record) -> Seen[T] | None:
        message = self._read(kind, record)
        if message is None:
            return None
        return Seen(message, record.sequence, self._stored_ns(record), self._stored_s(record))

    def _read(self, kind: type[T], record: Record) -> T | None:
        try:
            message = read(kind, record, run=self.run)
        except WireError:
            return None
        return message if self.counts.fits(message, self.fragments) else None

    def _stored_ns(self, record: Record) -> int:
        return record.time_ns + self.behind_ns

    def _stored_s(self, record: Record) -> float:
        return min(self.clock_s(), self._stored_ns(record) / 1e9)
