"""The run's messages as the monitor reads them: what cannot be read is counted and left out.

So is what can be read and cannot be: a monitor that took any number for a fragment's, or any name
for a learner's, would be filled by whoever may publish.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from skerry.errors import WireError
from skerry.log.base import Deliver
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Pulse,
    Round,
    RunRecord,
)
from skerry.protocol.records import believable, decode
from skerry.protocol.subjects import TOKEN, Subjects
from skerry.status.view import seen_s

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from skerry.log.base import Bus, Record

Read = RunRecord | MemberRecord | Commit | CheckpointRecord | Evaluation | Pulse | Round
T = TypeVar("T", RunRecord, MemberRecord, Commit, CheckpointRecord, Evaluation, Pulse, Round)

NAMES: dict[type[Read], str] = {
    RunRecord: "run",
    MemberRecord: "member",
    Commit: "commit",
    CheckpointRecord: "checkpoint",
    Evaluation: "evaluation",
    Pulse: "pulse",
    Round: "round",
}
"""What a kind of message is counted as."""


MOST_LEARNERS = 1000
"""Names come from the log: more learners than these are not taken in."""
MOST_LATELY = 1000


@dataclass(slots=True)
class Tally:
    """How many messages of each kind were read, and how many were none.

    ``joined`` are the names so far that have a member's record, ``heard`` those that have only
    pulsed, so that invented ones do not keep out who joins later; ``lately`` is when the newest
    were there that were none, in seconds since the epoch: what came since we watch by our clock,
    what lay there before by the broker's.
    """

    read: Counter[str] = field(default_factory=Counter[str])
    malformed: Counter[str] = field(default_factory=Counter[str])
    joined: set[str] = field(default_factory=set[str])
    heard: set[str] = field(default_factory=set[str])
    lately: deque[float] = field(default_factory=lambda: deque[float](maxlen=MOST_LATELY))

    def since(self, at_s: float) -> int:
        """Return how many that were none came since then, as far as they are remembered."""
        return sum(came_s >= at_s for came_s in self.lately)

    def fits(self, message: Read, fragments: int) -> bool:
        """Say whether a run of so many fragments can have this message."""
        match message:
            case Pulse():
                if len(message.versions) > fragments or not believable(message):
                    return False
                return self._known(message.learner, joined=False)
            case MemberRecord():
                return self._known(message.learner, joined=True)
            case Commit():
                return message.fragment < fragments and believable(message)
            case Round():
                return message.fragment < fragments
            case _:
                return True

    def _known(self, learner: str, *, joined: bool) -> bool:
        if TOKEN.fullmatch(learner) is None:
            return False
        if learner in self.joined or (learner in self.heard and not joined):
            return True
        names = self.joined if joined else self.heard
        if len(names) >= MOST_LEARNERS:
            return False
        names.add(learner)
        return True


@dataclass(frozen=True, slots=True)
class Sources:
    """One run's messages, each with the record it came in; every one of them goes on for ever.

    ``fragments`` is P, ``clock_s`` gives seconds since the epoch.
    """

    bus: Bus
    run: str
    tally: Tally
    fragments: int
    clock_s: Callable[[], float] = time.time

    def runs(self) -> AsyncGenerator[tuple[Record, RunRecord]]:
        return self._follow(RunRecord, Subjects(self.run).run_record(), Deliver.LAST_PER_SUBJECT)

    def members(self) -> AsyncGenerator[tuple[Record, MemberRecord]]:
        """Yield every start that the ledger has, old ones too: who flaps did so before."""
        return self._follow(MemberRecord, Subjects(self.run).members(), Deliver.ALL)

    def commits(self) -> AsyncGenerator[tuple[Record, Commit]]:
        return self._follow(Commit, Subjects(self.run).commits(), Deliver.ALL)

    def checkpoints(self) -> AsyncGenerator[tuple[Record, CheckpointRecord]]:
        return self._follow(CheckpointRecord, Subjects(self.run).checkpoint(), Deliver.ALL)

    def evaluations(self) -> AsyncGenerator[tuple[Record, Evaluation]]:
        return self._follow(Evaluation, Subjects(self.run).evaluation(), Deliver.ALL)

    def pulses(self) -> AsyncGenerator[tuple[Record, Pulse]]:
        return self._follow(Pulse, Subjects(self.run).pulses(), Deliver.LAST_PER_SUBJECT)

    def rounds(self) -> AsyncGenerator[tuple[Record, Round]]:
        return self._follow(Round, Subjects(self.run).rounds(), Deliver.LAST_PER_SUBJECT)

    async def newest_members(self) -> list[tuple[Record, MemberRecord]]:
        return await self._newest(MemberRecord, Subjects(self.run).members())

    async def newest_pulses(self) -> list[Pulse]:
        return [m for _, m in await self._newest(Pulse, Subjects(self.run).pulses())]

    async def newest_checkpoint(self) -> CheckpointRecord | None:
        return await self._newest_of(CheckpointRecord, Subjects(self.run).checkpoint())

    async def newest_evaluation(self) -> Evaluation | None:
        return await self._newest_of(Evaluation, Subjects(self.run).evaluation())

    async def newest_commits(self) -> list[tuple[Record, Commit]]:
        return await self._newest(Commit, Subjects(self.run).commits())

    async def _newest(self, kind: type[T], pattern: str) -> list[tuple[Record, T]]:
        """Return what is newest of each subject; following counts what is left out."""
        records = [(r, self._read(kind, r)) for r in await self.bus.last_each(pattern)]
        return [(record, message) for record, message in records if message is not None]

    async def _newest_of(self, kind: type[T], subject: str) -> T | None:
        record = await self.bus.last(subject)
        return None if record is None else self._read(kind, record)

    async def _follow(
        self, kind: type[T], pattern: str, deliver: Deliver
    ) -> AsyncGenerator[tuple[Record, T]]:
        name = NAMES[kind]
        known_to = max((r.sequence for r in await self.bus.last_each(pattern)), default=0)
        before = 0
        records = self.bus.follow(pattern, deliver=deliver)
        async with aclosing(records):
            async for record in records:
                if record.sequence <= before:  # a stream in memory that began anew with its broker
                    known_to = 0
                before = record.sequence
                message = self._read(kind, record)
                if message is None:
                    self.tally.malformed[name] += 1
                    came_s = seen_s(self.clock_s(), record.time_ns, record.sequence, known_to)
                    self.tally.lately.append(came_s)
                    continue
                self.tally.read[name] += 1
                yield record, message

    def _read(self, kind: type[T], record: Record) -> T | None:
        try:
            message = decode(kind, record.payload, run=self.run)
        except WireError:
            return None
        fits = _is_of(message, record.subject) and self.tally.fits(message, self.fragments)
        return message if fits else None


def _is_of(message: Read, subject: str) -> bool:
    """Say whether a message names the learner, or the fragment, of its subject."""
    match message:
        case Pulse() | MemberRecord():
            return message.learner == subject.rpartition(".")[2]
        case Commit() | Round():
            return str(message.fragment) == subject.rpartition(".")[2]
        case _:
            return True
