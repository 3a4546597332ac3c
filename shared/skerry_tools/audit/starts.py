"""The starts of the learners: none begins in data that was counted, none leaves data out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry_tools.audit.violations import Violation, What

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.protocol.messages import MemberRecord


@dataclass(slots=True)
class Starts:
    """One learner's starts; ``known`` is, by incarnation, how far its data is known to be used.

    ``cursor`` is where the newest incarnation that has said so began; ``begun`` says which that
    was, and ``inner`` counts what became of the inner optimizer's state.
    """

    learner: str
    shard: int = -1
    incarnation: int = -1
    begun: int = -1
    cursor: int = 0
    inner: dict[str, int] = field(default_factory=dict[str, int])
    known: dict[int, int] = field(default_factory=dict[int, int])
    unproven: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    def member(self, record: MemberRecord, sequence: int, used: int) -> Iterator[Violation]:
        """Take a record of the learner; ``used`` is up to where its data is counted by now."""
        if self.shard < 0:
            self.shard = record.shard
        if not record.incarnation:
            return  # a place that a restored run keeps for a name
        again = record.inner is not None
        if record.shard != self.shard:
            yield self._violation(
                What.MEMBER, f"changed from data shard {self.shard} to {record.shard}", sequence
            )
        expected = record.incarnation == self.incarnation
        if again != expected or record.incarnation < self.incarnation:
            yield self._violation(
                What.MEMBER,
                f"came as incarnation {record.incarnation} after {self.incarnation}",
                sequence,
            )
        self.incarnation = max(self.incarnation, record.incarnation)
        if record.inner is None:
            return
        self.inner[record.inner.value] = self.inner.get(record.inner.value, 0) + 1
        self.begun, self.cursor = record.incarnation, record.cursor
        if record.cursor < used:
            yield self._violation(
                What.COUNTED_AGAIN,
                f"began incarnation {record.incarnation} at {record.cursor} in its data, which was"
                f" counted up to {used}",
                sequence,
            )
        if record.cursor > self._known_before(record.incarnation):
            self.unproven.append((record.incarnation, record.cursor, sequence))

    def know(self, incarnation: int, cursor: int) -> None:
        """Note that the log has seen data of an incarnation up to ``cursor``."""
        self.known[incarnation] = max(self.known.get(incarnation, 0), cursor)

    def cursor_of(self, incarnation: int) -> int:
        """Return where the newest incarnation began in the data; 0 for every other one."""
        return self.cursor if incarnation == self.begun else 0

    def late(self, incarnation: int, cursor: int) -> str:
        """Return what is wrong with consuming data up to ``cursor`` now; empty if nothing is."""
        if incarnation < self.begun and cursor > self.cursor:
            return (
                f"incarnation {incarnation} had data counted up to {cursor} although incarnation"
                f" {self.begun} had begun at {self.cursor}"
            )
        return ""

    def gaps(self) -> Iterator[Violation]:
        """Yield the starts after data that no incarnation is known to have used."""
        for incarnation, cursor, sequence in self.unproven:
            known = self._known_before(incarnation)
            if cursor > known:
                yield self._violation(
                    What.GAP,
                    f"began incarnation {incarnation} at {cursor} in its data, of which"
                    f" [{known}, {cursor}) was never offered to the log",
                    sequence,
                )

    def _known_before(self, incarnation: int) -> int:
        return max((c for i, c in self.known.items() if i < incarnation), default=0)

    def _violation(self, what: What, text: str, sequence: int) -> Violation:
        return Violation(
            what, f"Learner {self.learner} {text}.", learner=self.learner, sequence=sequence
        )
