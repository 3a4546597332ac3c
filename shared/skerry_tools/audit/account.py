"""The account of one learner in one fragment: what the log has counted, folded commit by commit.

Memory does not grow with the history: contributions are counted in order, so what is behind the
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
    from skerry_tools.audit.offers import Mark

MOST_HOLES = 10_000
"""Holes that are told apart; a log that has more of them is broken anyhow, and says so."""

MOST_DAMAGED = 10_000
"""Places of unreadable bytes that are kept until it is known between which contributions they lie.
"""

Found = tuple[What, str]


def named(mark: Mark) -> str:
    """Return how people are told about a contribution."""
    return f"contribution {mark[1]} of incarnation {mark[0]}"


@dataclass(slots=True, eq=False)
class Gap:
    """Contributions that are missing one behind the other, and where in CONTRIB they lay.

    ``damaged`` are places between ``after`` and ``before`` that hold bytes nobody could read: each
    of them may have been one of those that are missing.
    """

    after: int
    before: float
    size: int
    damaged: set[int] = field(default_factory=set[int])

    def take(self, place: int) -> None:
        """Take note of bytes that nobody could read, if they can have been any of these."""
        if self.after < place < self.before and len(self.damaged) < self.size:
            self.damaged.add(place)


@dataclass(slots=True)
class Account:
    """What has been counted; ``cursor`` and ``refused`` in sequences of the learner's data.

    ``last`` is the newest contribution consumed, ``newest`` the newest consumed or refused,
    ``place`` where in CONTRIB that begins as far as it is known, ``holes`` those before it that are
    neither. ``damaged`` are places behind it that hold bytes which nobody could read; ``unnamed``
    counts those that earlier releases told of without their place. ``refused`` is what was refused
    since ``last``, ``reached`` how far in the data the newest lies, ``discarded`` what was trained
    and never offered. The first contribution of every incarnation up
    to ``pardoned`` may have been an offer of initial parameters that lost to another one.
    """

    last: Mark = (0, 0)
    tokens: int = 0
    cursor: int = 0
    newest: Mark = (0, 0)
    place: int = 0
    holes: dict[Mark, Gap] = field(default_factory=dict["Mark", Gap])
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
        mark = (row.incarnation, row.identity)
        return cls(last=mark, tokens=row.tokens, cursor=row.cursor, newest=mark)

    def agrees(self, row: LearnerProgress) -> bool:
        """Tell whether a row of a commit's progress table is this account."""
        held = (*self.last, self.tokens, self.cursor)
        return held == (row.incarnation, row.identity, row.tokens, row.cursor)

    def ahead(self, row: LearnerProgress) -> bool:
        """Tell whether a row has less of anything than was counted."""
        mark = (row.incarnation, row.identity)
        return mark < self.last or row.tokens < self.tokens or row.cursor < self.cursor

    def put(self, row: LearnerProgress) -> None:
        """Go on behind a row that a checkpoint brought: what lies before it is accounted for."""
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
        mark = (item.incarnation, item.identity)
        if mark <= self.newest and mark not in self.holes:
            yield What.TWICE, f"{named(mark)} was consumed though it had been resolved before"
        elif mark < self.last:
            yield What.ORDER, f"{named(mark)} was consumed behind {named(self.last)}"
        if item.cursor_from < self.cursor and item.cursor_to > item.cursor_from:
            yield (
                What.OVERLAP,
                (
                    f"{named(mark)} was made from the data [{item.cursor_from}, {item.cursor_to}),"
                    f" of which [{item.cursor_from}, {min(self.cursor, item.cursor_to)})"
                    " had been counted before"
                ),
            )
        if not genesis:
            self.contributions += 1
            self.tokens += item.tokens
            if self.contributions > 1:
                self.discarded += max(0, item.cursor_from - self.cursor - self.refused)
        self._resolve(mark, item, begun)
        self.refused = 0
        self.cursor = max(self.cursor, item.cursor_to)
        self.last = mark

    def refuse(self, item: Refused, *, begun: int = 0) -> None:
        """Take note of a refusal; one without numbers may be one that is missing where it lies."""
        if not item.identity:
            self._damage(item.sequence)
            return
        mark = (item.incarnation, item.identity)
        newer = mark > self.newest
        self._resolve(mark, item, begun)
        if newer:
            self.refused += item.cursor_to - item.cursor_from

    def missing(self) -> list[Mark]:
        """Return the contributions that were numbered and are neither consumed nor refused."""
        told = sorted(m for m in self.holes if m[1] > 1 or m[0] > self.pardoned)
        found: list[Mark] = []
        excused: Counter[Gap] = Counter()
        for mark in told:
            gap = self.holes[mark]
            if excused[gap] < len(gap.damaged):
                excused[gap] += 1
            else:
                found.append(mark)
        return found[self.unnamed :]

    def _damage(self, place: int) -> None:
        """Take note of bytes that nobody could read, at a place of CONTRIB (0: not told)."""
        if not place:
            self.unnamed += 1
            return
        for gap in set(self.holes.values()):
            gap.take(place)
        if place > self.place and len(self.damaged) < MOST_DAMAGED:
            self.damaged.add(place)

    def _leave(self, mark: Mark, behind: int, before: int) -> None:
        """Take note that all between the newest and a contribution at ``before`` is missing."""
        first = self.newest[1] + 1 if self.newest[0] == mark[0] else 1
        room = MOST_HOLES - len(self.holes)
        numbers = range(first, min(mark[1], first + max(0, room)))
        gap = Gap(behind, before or math.inf, len(numbers))
        for place in sorted(self.damaged):
            gap.take(place)
        self.holes.update(((mark[0], number), gap) for number in numbers)

    def _resolve(self, mark: Mark, item: Consumed | Refused, begun: int) -> None:
        """Take note that a contribution is resolved, and which ones it has left behind.

        Where its data begins where what is resolved ends, nothing is: its learner has taken back
        what had left the log unmerged, and this one contains it.
        """
        self.holes.pop(mark, None)
        if mark <= self.newest:
            return
        reached = max(self.cursor, self.reached, begun)
        self.reached = max(self.reached, item.cursor_to)
        behind = self.place if self.newest[0] == mark[0] else 0
        first, last = (
            (item.sequence_first, item.sequence_last) if isinstance(item, Consumed) else (0, 0)
        )
        if not (item.cursor_to and item.cursor_from <= reached):
            self._leave(mark, behind, last)
        self.newest, self.place = mark, first or behind
        self.damaged = {place for place in self.damaged if place > self.place}
