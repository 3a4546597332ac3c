"""The run's messages as the monitor reads them: what cannot be read is counted and left out."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from skerry.bus.base import Start
from skerry.errors import WireError
from skerry.wire.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Pulse,
    Round,
    RunRecord,
)
from skerry.wire.records import decode
from skerry.wire.subjects import TOKEN, Subjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skerry.bus.base import Bus, Record

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


@dataclass(slots=True)
class Tally:
    """How many messages of each kind were read, and how many were none."""

    read: Counter[str] = field(default_factory=Counter[str])
    malformed: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True)
class Sources:
    """One run's messages, each with the record it came in; every one of them goes on for ever."""

    bus: Bus
    run: str
    tally: Tally

    def runs(self) -> AsyncGenerator[tuple[Record, RunRecord]]:
        return self._follow(RunRecord, Subjects(self.run).run_record(), Start.LAST_PER_SUBJECT)

    def members(self) -> AsyncGenerator[tuple[Record, MemberRecord]]:
        return self._follow(MemberRecord, Subjects(self.run).members(), Start.LAST_PER_SUBJECT)

    def commits(self) -> AsyncGenerator[tuple[Record, Commit]]:
        return self._follow(Commit, Subjects(self.run).commits(), Start.ALL)

    def checkpoints(self) -> AsyncGenerator[tuple[Record, CheckpointRecord]]:
        return self._follow(CheckpointRecord, Subjects(self.run).checkpoint(), Start.ALL)

    def evaluations(self) -> AsyncGenerator[tuple[Record, Evaluation]]:
        return self._follow(Evaluation, Subjects(self.run).evaluation(), Start.ALL)

    def pulses(self) -> AsyncGenerator[tuple[Record, Pulse]]:
        return self._follow(Pulse, Subjects(self.run).pulses(), Start.LAST_PER_SUBJECT)

    def rounds(self) -> AsyncGenerator[tuple[Record, Round]]:
        return self._follow(Round, Subjects(self.run).rounds(), Start.LAST_PER_SUBJECT)

    async def _follow(
        self, kind: type[T], pattern: str, start: Start
    ) -> AsyncGenerator[tuple[Record, T]]:
        name = NAMES[kind]
        records = self.bus.follow(pattern, start=start)
        async with aclosing(records):
            async for record in records:
                try:
                    message = decode(kind, record.payload, run=self.run)
                except WireError:
                    self.tally.malformed[name] += 1
                    continue
                if not _is_whose_it_says(message, record.subject):
                    self.tally.malformed[name] += 1
                    continue
                self.tally.read[name] += 1
                yield record, message


def _is_whose_it_says(message: Read, subject: str) -> bool:
    """Say whether a learner's message names the learner of its subject, by a name one can have."""
    if not isinstance(message, Pulse | MemberRecord):
        return True
    name = message.learner
    return name == subject.rpartition(".")[2] and TOKEN.fullmatch(name) is not None
