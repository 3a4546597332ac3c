"""What the log has counted of each learner, folded record by record.

Memory does not grow with the history: contributions are counted in order, so what comes before the
newest one is either resolved or one of a few holes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from skerry.protocol.contribution import ContributionId, id_of
from skerry.protocol.messages import Consumed, LearnerProgress, MemberRecord, Refused

MOST_HOLES = 10_000
"""Holes that are kept one by one; a log that has more of them is broken anyhow, and says so."""
MOST_DAMAGED = 10_000
"""Places of unreadable bytes that are kept until it is known between which contributions they lie.
"""


class What(StrEnum):
    """Which promise is broken."""

    UNREADABLE = "unreadable"
    MISSING = "missing"
    VERSIONS = "versions"
    CHAIN = "chain"
    TWICE = "twice"
    ORDER = "order"
    UNRESOLVED = "unresolved"
    PROGRESS = "progress"
    TOKENS = "tokens"
    OVERLAP = "overlap"
    COUNTED_AGAIN = "counted_again"
    GAP = "gap"
    MEMBER = "member"
    FENCE = "fence"
    FLOOR = "floor"
    WEIGHTS = "weights"
    STALENESS = "staleness"
    STATE = "state"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise; ``fragment`` and ``version`` are -1 and ``learner`` empty where none is.

    ``sentence`` says it to a person; ``sequence`` is where in the ledger it shows, or in MEMBERS
    for a learner's start, 0 if elsewhere.
    """

    what: What
    sentence: str
    fragment: int = -1
    version: int = -1
    learner: str = ""
    sequence: int = 0


Finding = tuple[What, str]
"""Which promise is broken, and how: the end of a sentence about a learner or a commit."""


def named(number: ContributionId) -> str:
    return f"contribution {number.identity} of incarnation {number.incarnation}"


class Gap(NamedTuple):
    """Contributions that are missing one after the other lay between these places of CONTRIB."""

    after: int
    before: float


@dataclass(slots=True)
class Account:
    """The contributions of one learner to one fragment that the log has resolved.

    ``newest`` is the newest consumed or refused, ``place`` where in CONTRIB that begins as far as
    it is known, ``reached`` how far in the learner's data it lies. ``holes`` are those before it
    that are neither. ``damaged`` are places that hold unreadable bytes: each may have been one that
    is missing there. The first contribution of every incarnation up to ``pardoned`` may have been
    an offer of initial parameters that lost to another one. ``unnamed`` were refused by commits
    that had no room to name them.
    """

    newest: ContributionId
    place: int = 0
    reached: int = 0
    holes: dict[ContributionId, Gap] = field(default_factory=dict["ContributionId", Gap])
    damaged: set[int] = field(default_factory=set[int])
    pardoned: int = 0
    unnamed: int = 0

    def follow(self, row: LearnerProgress) -> None:
        """Go on after a row of a table: what lies before it is accounted for."""
        self.newest = max(self.newest, id_of(row))
        self.holes.clear()
        self.place = 0

    def consume(self, item: Consumed, before: LearnerProgress, begun: int) -> Iterator[Finding]:
        """Count a contribution and yield what is wrong with that.

        ``before`` is its learner's progress so far; ``begun`` is where its incarnation began in
        the data.
        """
        number = id_of(item)
        last = id_of(before)
        if number <= self.newest and number not in self.holes:
            yield What.TWICE, f"{named(number)} was consumed though it had been resolved before"
        elif number < last:
            yield What.ORDER, f"{named(number)} was consumed after {named(last)}"
        if item.cursor_from < before.cursor and item.cursor_to > item.cursor_from:
            again = f"[{item.cursor_from}, {min(before.cursor, item.cursor_to)})"
            data = f"[{item.cursor_from}, {item.cursor_to}), of which {again} had been counted"
            yield What.OVERLAP, f"{named(number)} was made from the data {data} before"
        self.resolve(item, max(before.cursor, begun))

    def resolve(self, item: Consumed | Refused, counted: int) -> None:
        """Note that a contribution is resolved, and which ones it has skipped.

        Where its data begins within what is ``counted`` or resolved, it has skipped nothing: its
        learner has taken back what had left the log unmerged, and this one contains it.
        """
        number = id_of(item)
        self.holes.pop(number, None)
        if number <= self.newest:
            return
        fresh = self.newest.incarnation != number.incarnation
        after = 0 if fresh else self.place
        place, last = (
            (item.sequence_first, item.sequence_last) if isinstance(item, Consumed) else (0, 0)
        )
        if not (item.cursor_to and item.cursor_from <= max(counted, self.reached)):
            first = 1 if fresh else self.newest.identity + 1
            room = max(0, MOST_HOLES - len(self.holes))
            gap = Gap(after, last or math.inf)
            for identity in range(first, min(number.identity, first + room)):
                self.holes[number._replace(identity=identity)] = gap
        self.reached = max(self.reached, counted, item.cursor_to)
        self.newest, self.place = number, place or after
        oldest = min((gap.after for gap in self.holes.values()), default=self.place)
        self.damaged = {at for at in self.damaged if at > oldest}

    def damage(self, place: int) -> None:
        """Note unreadable bytes at a place of CONTRIB."""
        if len(self.damaged) < MOST_DAMAGED:
            self.damaged.add(place)

    def missing(self, waiting: Container[ContributionId]) -> list[ContributionId]:
        """Return what was numbered and is neither consumed nor refused, nor waits still."""
        damaged = sorted(self.damaged)
        excused = Counter(
            {
                gap: bisect_left(damaged, gap.before) - bisect_right(damaged, gap.after)
                for gap in set(self.holes.values())
            }
        )
        found: list[ContributionId] = []
        for number, gap in sorted(self.holes.items()):
            lost = number.identity == 1 and number.incarnation <= self.pardoned
            if lost or number in waiting:
                continue
            if excused[gap] > 0:
                excused[gap] -= 1
            else:
                found.append(number)
        return found[: max(0, len(found) - self.unnamed)]  # named are the first of a flood


@dataclass(slots=True)
class Starts:
    """One learner's starts: none begins in data that was counted, and none leaves data out.

    ``known`` is, by incarnation, how far its data is known to be used. ``cursor`` is where the
    newest incarnation that has said so began; ``begun`` says which that was, and ``inner`` counts
    what became of the inner optimizer's state. ``data`` is the digest of what it reads, ``joined``
    the newest incarnation of which there is a record, wherever: the first ones may be dropped.
    """

    learner: str
    shard: int = -1
    joined: int = -1
    incarnation: int = -1
    begun: int = -1
    cursor: int = 0
    inner: Counter[str] = field(default_factory=Counter[str])
    data: str = ""
    known: dict[int, int] = field(default_factory=dict[int, int])
    unproven: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def member(self, record: MemberRecord, sequence: int, used: int) -> Iterator[Violation]:
        """Take a record of the learner; ``used`` is up to where its data is counted by now."""
        if self.shard < 0:
            self.shard = record.shard
        if not record.incarnation:
            return  # a place that a restored run keeps for a name
        if record.shard != self.shard:
            text = f"changed from data shard {self.shard} to {record.shard}"
            yield self._violation(What.MEMBER, text, sequence)
        first, again = self.incarnation < 0, record.incarnation == self.incarnation
        settled = record.inner is not None
        if (again != settled and not first) or record.incarnation < self.incarnation:
            text = f"came as incarnation {record.incarnation} after {self.incarnation}"
            yield self._violation(What.MEMBER, text, sequence)
        self.incarnation = max(self.incarnation, record.incarnation)
        if record.inner is None:
            return
        self.inner[record.inner.value] += 1
        self.data = record.data or self.data
        self.begun, self.cursor = record.incarnation, record.cursor
        if record.cursor < used:
            text = (
                f"began incarnation {record.incarnation} at {record.cursor} in its data, which was"
                f" counted up to {used}"
            )
            yield self._violation(What.COUNTED_AGAIN, text, sequence)
        if record.cursor > self._known_before(record.incarnation):
            self.unproven.append((record.incarnation, record.cursor, sequence))

    def know(self, incarnation: int, cursor: int) -> None:
        """Note that the log has seen data of an incarnation up to ``cursor``."""
        self.known[incarnation] = max(self.known.get(incarnation, 0), cursor)

    def cursor_of(self, incarnation: int) -> int:
        """Return where the newest incarnation began in the data; 0 for every other one."""
        return self.cursor if incarnation == self.begun else 0

    def consume(self, item: Consumed) -> Iterator[Finding]:
        """Yield what is wrong with consuming a contribution of its incarnation now."""
        if item.incarnation < self.begun and item.cursor_to > self.cursor:
            text = (
                f"incarnation {item.incarnation} had data counted up to {item.cursor_to} although"
                f" incarnation {self.begun} had begun at {self.cursor}"
            )
            yield What.COUNTED_AGAIN, text
        if item.incarnation > self.joined:
            self.joined = item.incarnation  # one that is missing is one violation
            text = f"{named(id_of(item))} was consumed, and no record says that it joined"
            yield What.MEMBER, text

    def gaps(self) -> Iterator[Violation]:
        """Yield the starts after data that no incarnation is known to have used."""
        for incarnation, cursor, sequence in self.unproven:
            known = self._known_before(incarnation)
            if cursor > known:
                text = (
                    f"began incarnation {incarnation} at {cursor} in its data, of which"
                    f" [{known}, {cursor}) was never offered to the log"
                )
                yield self._violation(What.GAP, text, sequence)

    def _known_before(self, incarnation: int) -> int:
        return max((c for i, c in self.known.items() if i < incarnation), default=0)

    def _violation(self, what: What, text: str, sequence: int) -> Violation:
        sentence = f"Learner {self.learner} {text}."
        return Violation(what, sentence, learner=self.learner, sequence=sequence)
