"""The account of one learner in one fragment: what the log has counted, folded commit by commit.

Memory does not grow with the history: contributions are counted in order, so what is behind the
newest one is either resolved or one of a few holes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.audit.violations import What

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.audit.offers import Mark
    from skerry.wire.messages import Consumed, LearnerProgress, Refused

MOST_HOLES = 10_000
"""Holes that are told apart; a log that has more of them is broken anyhow, and says so."""

Found = tuple[What, str]


def named(mark: Mark) -> str:
    """Return how people are told about a contribution."""
    return f"contribution {mark[1]} of incarnation {mark[0]}"


@dataclass(slots=True)
class Account:
    """What has been counted; ``cursor`` and ``refused`` in sequences of the learner's data.

    ``last`` is the newest contribution consumed, ``newest`` the newest consumed or refused,
    ``holes`` those before it that are neither. ``refused`` is what was refused since ``last``,
    ``reached`` how far in the data the newest lies,
    ``discarded`` what was trained and never offered. The first contribution of every incarnation up
    to ``pardoned`` may have been an offer of initial parameters that lost to another one.
    """

    last: Mark = (0, 0)
    tokens: int = 0
    cursor: int = 0
    newest: Mark = (0, 0)
    holes: set[Mark] = field(default_factory=set["Mark"])
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
        """Take note of a refusal; one without numbers may be any of those that are missing."""
        if not item.identity:
            self.unnamed += 1
            return
        mark = (item.incarnation, item.identity)
        newer = mark > self.newest
        self._resolve(mark, item, begun)
        if newer:
            self.refused += item.cursor_to - item.cursor_from

    def missing(self) -> list[Mark]:
        """Return the contributions that were numbered and are neither consumed nor refused."""
        told = sorted(m for m in self.holes if m[1] > 1 or m[0] > self.pardoned)
        return told[self.unnamed :]

    def _resolve(self, mark: Mark, item: Consumed | Refused, begun: int) -> None:
        """Take note that a contribution is resolved, and which ones it has left behind.

        Where its data begins where what is resolved ends, nothing is: its learner has taken back
        what had left the log unmerged, and this one contains it.
        """
        self.holes.discard(mark)
        if mark <= self.newest:
            return
        reached = max(self.cursor, self.reached, begun)
        self.reached = max(self.reached, item.cursor_to)
        if item.cursor_to and item.cursor_from <= reached:
            self.newest = mark
            return
        first = self.newest[1] + 1 if self.newest[0] == mark[0] else 1
        room = MOST_HOLES - len(self.holes)
        numbers = range(first, min(mark[1], first + max(0, room)))
        self.holes.update((mark[0], number) for number in numbers)
        self.newest = mark
