"""The account of one learner in one fragment: what the log has counted, folded commit by commit.

Memory does not grow with the history: contributions are counted in order, so what comes before the
newest one is either resolved or one of a few holes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.protocol.messages import Consumed
from skerry_tools.audit.violations import What

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.protocol.messages import LearnerProgress, Refused
    from skerry_tools.audit.offers import ContributionId

MOST_HOLES = 10_000
"""Holes that are kept one by one; a log that has more of them is broken anyhow, and says so."""

MOST_DAMAGED = 10_000
"""Places of unreadable bytes that are kept until it is known between which contributions they lie.
"""

Found = tuple[What, str]


def named(number: ContributionId) -> str:
    """Return how a sentence names a contribution."""
    return f"contribution {number[1]} of incarnation {number[0]}"


@dataclass(slots=True, eq=False)
class Gap:
    """Contributions that are missing one after the other, and where in CONTRIB they lay.

    ``damaged`` are places between ``after`` and ``before`` that hold unreadable bytes: each of them
    may have been one of those that are missing.
    """

    after: int
    before: float
    size: int
    damaged: set[int] = field(default_factory=set[int])

    def take(self, place: int) -> None:
        """Note unreadable bytes, if they can have been any of these."""
        if self.after < place < self.before and len(self.damaged) < self.size:
            self.damaged.add(place)


@dataclass(slots=True)
class Account:
    """What has been counted; ``cursor`` and ``refused`` in sequences of the learner's data.

    ``last`` is the newest contribution consumed, ``newest`` the newest consumed or refused,
    ``place`` where in CONTRIB that begins as far as it is known, ``holes`` those before it that are
    neither. ``damaged`` are places after it that hold unreadable bytes; ``unnamed`` counts those
    that earlier releases recorded without their place. ``refused`` is what was refused
    since ``last``, ``reached`` how far in the data the newest lies, ``discarded`` what was trained
    and never offered. The first contribution of every incarnation up
    to ``pardoned`` may have been an offer of initial parameters that lost to another one.
    """

    last: ContributionId = (0, 0)
    tokens: int = 0
    cursor: int = 0
    newest: ContributionId = (0, 0)
    place: int = 0
    holes: dict[ContributionId, Gap] = field(default_factory=dict["ContributionId", Gap])
    damaged: set[int] = field(default_factory=set[int])
    unnamed: int = 0
    contributions: int = 0
    refused: int = 0
    reached: int = 0
    discarded: int = 0
    pardoned: int = 0

    @classmethod
    def of(cls, row: LearnerProgress) -> Account:
        """Return the account of a learner in a fragment that was restored from a checkpoint."""
        number = (row.incarnation, row.identity)
        return cls(last=number, tokens=row.tokens, cursor=row.cursor, newest=number)

    def agrees(self, row: LearnerProgress) -> bool:
        """Return True if a row of a commit's progress table is this account."""
        held = (*self.last, self.tokens, self.cursor)
        return held == (row.incarnation, row.identity, row.tokens, row.cursor)

    def ahead(self, row: LearnerProgress) -> bool:
        """Return True if a row has less of anything than was counted."""
        number = (row.incarnation, row.identity)
        return number < self.last or row.tokens < self.tokens or row.cursor < self.cursor

    def put(self, row: LearnerProgress) -> None:
        """Go on after a row that a checkpoint brought: what lies before it is accounted for."""
        self.follow(row)
        self.newest = max(self.newest, self.last)
        self.holes.clear()
        self.place = self.refused = 0

    def follow(self, row: LearnerProgress) -> None:
        """Go on from what a table says, so that one wrong row is one violation."""
        self.last, self.tokens, self.cursor = (
            (row.incarnation, row.identity),
            row.tokens,
            row.cursor,
        )

    def consume(self, item: Consumed, *, genesis: bool, begun: int = 0) -> Iterator[Found]:
        """Count a contribution and yield what is wrong with that.

        ``begun`` is where its incarnation began in the data.
        """
        number = (item.incarnation, item.identity)
        if number <= self.newest and number not in self.holes:
            yield What.TWICE, f"{named(number)} was consumed though it had been resolved before"
        elif number < self.last:
            yield What.ORDER, f"{named(number)} was consumed after {named(self.last)}"
        if item.cursor_from < self.cursor and item.cursor_to > item.cursor_from:
            again = f"[{item.cursor_from}, {min(self.cursor, item.cursor_to)})"
            data = f"[{item.cursor_from}, {item.cursor_to}), of which {again} had been counted"
            yield What.OVERLAP, f"{named(number)} was made from the data {data} before"
        if not genesis:
            self.contributions += 1
            self.tokens += item.tokens
            if self.contributions > 1:
                self.discarded += max(0, item.cursor_from - self.cursor - self.refused)
        self._resolve(number, item, begun)
        self.refused = 0
        self.cursor = max(self.cursor, item.cursor_to)
        self.last = number

    def refuse(self, item: Refused, *, begun: int = 0) -> None:
        """Note a refusal; one without numbers may be one that is missing where it lies."""
        if not item.identity:
            self._damage(item.sequence)
            return
        number = (item.incarnation, item.identity)
        newer = number > self.newest
        self._resolve(number, item, begun)
        if newer:
            self.refused += item.cursor_to - item.cursor_from

    def missing(self) -> list[ContributionId]:
        """Return the contributions that were numbered and are neither consumed nor refused."""
        holes = sorted(h for h in self.holes if h[1] > 1 or h[0] > self.pardoned)
        found: list[ContributionId] = []
        excused: Counter[Gap] = Counter()
        for number in holes:
            gap = self.holes[number]
            if excused[gap] < len(gap.damaged):
                excused[gap] += 1
            else:
                found.append(number)
        return found[self.unnamed :]

    def _damage(self, place: int) -> None:
        """Note unreadable bytes at a place of CONTRIB (0: unknown)."""
        if not place:
            self.unnamed += 1
            return
        for gap in set(self.holes.values()):
            gap.take(place)
        if place > self.place and len(self.damaged) < MOST_DAMAGED:
            self.damaged.add(place)

    def _leave(self, number: ContributionId, after: int, before: int) -> None:
        """Note that all between the newest and a contribution at ``before`` is missing."""
        first = self.newest[1] + 1 if self.newest[0] == number[0] else 1
        room = MOST_HOLES - len(self.holes)
        missing = range(first, min(number[1], first + max(0, room)))
        gap = Gap(after, before or math.inf, len(missing))
        for place in sorted(self.damaged):
            gap.take(place)
        self.holes.update(((number[0], identity), gap) for identity in missing)

    def _resolve(self, number: ContributionId, item: Consumed | Refused, begun: int) -> None:
        """Note that a contribution is resolved, and which ones it has skipped.

        Where its data begins where what is resolved ends, nothing is: its learner has taken back
        what had left the log unmerged, and this one contains it.
        """
        self.holes.pop(number, None)
        if number <= self.newest:
            return
        reached = max(self.cursor, self.reached, begun)
        self.reached = max(self.reached, item.cursor_to)
        after = self.place if self.newest[0] == number[0] else 0
        first, last = (
            (item.sequence_first, item.sequence_last) if isinstance(item, Consumed) else (0, 0)
        )
        if not (item.cursor_to and item.cursor_from <= reached):
            self._leave(number, after, last)
        self.newest, self.place = number, first or after
        self.damaged = {place for place in self.damaged if place > self.place}
