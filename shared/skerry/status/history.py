"""What the page shows and a view forgets: recent rounds, curves, lanes, checkpoints, samples.

A fold beside ``skerry.status.view``, over the same messages. All of it is bounded. What the ledger
gives is the same again after a restart; what only pulses give (who adopted when, when somebody fell
silent) begins with the monitor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Pulse,
    begins_history,
)
from skerry.status.commit_totals import Bin, Curves
from skerry.status.recent import Recent
from skerry.status.report import LearnerRow
from skerry.status.sources import MOST_LEARNERS
from skerry.status.timeline import Timeline, committed_round
from skerry.status.view import Message

MOST_TURNS = 32
"""Changes of state kept for each learner."""
MOST_MARKS = 12_000
"""Merged contributions kept, of all learners together."""
MARK_EVERY_S = 1.0
"""Of a learner's contributions that are not late, one in this time is kept."""
MOST_CHECKPOINTS = 24
MOST_SAMPLES = 24


@dataclass(frozen=True, slots=True)
class Turn:
    """From ``at_s`` on a learner was in this state: a phase, ``suspect`` or ``gone``."""

    at_s: float
    state: str


@dataclass(frozen=True, slots=True)
class MergedMark:
    """A contribution of a learner was merged at ``at_s``; ``late``: it was stale."""

    number: int
    learner: str
    at_s: float
    late: bool


@dataclass(slots=True)
class Lane:
    """What is known of one learner beyond its newest pulse."""

    host: str = ""
    turns: deque[Turn] = field(default_factory=lambda: deque[Turn](maxlen=MOST_TURNS))
    marked_s: float = float("-inf")
    last: tuple[int, int, float] | None = None
    """Fragment, version and time of its newest merged contribution."""


@dataclass(slots=True)
class History:
    """Everything beside the view; ``fragments`` is P."""

    fragments: int
    timeline: Timeline = field(default_factory=Timeline)
    curves: Curves = field(default_factory=Curves)
    lanes: dict[str, Lane] = field(default_factory=dict[str, Lane])
    lately: Recent = field(default_factory=Recent)
    marks: deque[MergedMark] = field(default_factory=lambda: deque[MergedMark](maxlen=MOST_MARKS))
    numbered: int = 0
    checkpoints: dict[str, CheckpointRecord] = field(default_factory=dict[str, "CheckpointRecord"])
    samples: list[Evaluation] = field(default_factory=list[Evaluation])

    def take(self, message: Message, now_s: float) -> None:
        """Fold in any message that comes without its place in the ledger."""
        match message:
            case Pulse():
                self.timeline.pulsed(message, now_s)
                self.lately.pulsed(message, now_s)
                self._lane(message.learner)
            case MemberRecord():
                self._lane(message.learner).host = message.host
                self.lately.joined(message, now_s)
            case CheckpointRecord():
                self.checkpoints.pop(message.path, None)
                self.checkpoints[message.path] = message
                while len(self.checkpoints) > MOST_CHECKPOINTS:
                    del self.checkpoints[next(iter(self.checkpoints))]
            case Evaluation(sample=sample, evaluated_ns=at_ns):
                if sample and all(held.evaluated_ns != at_ns for held in self.samples):
                    if len(self.samples) >= MOST_SAMPLES:
                        self.samples = self.samples[::2]
                    self.samples.append(message)
            case _:
                pass

    def committed(self, commit: Commit, sequence: int, stored_s: float, at_s: float) -> None:
        """Fold in the next commit of a fragment, at its ``sequence`` in the ledger.

        ``stored_s`` is when the ledger had it by the broker's clock, ``at_s`` by the watcher's
        clock.
        """
        row = committed_round(commit, sequence, stored_s)
        self.timeline.committed(row)
        self.lately.committed(commit, at_s)
        if not row.merged:
            if begins_history(commit):
                self.curves.total += sum(p.tokens for p in commit.progress) / self.fragments
            return
        weight = row.tokens if row.loss is not None and isfinite(row.loss) else 0.0
        self.curves.add(
            row.closed_s,
            Bin(
                step=row.step,
                tokens=row.tokens / self.fragments,
                loss_sum=(row.loss or 0.0) * weight if weight else 0.0,
                weight=weight,
                rounds=1,
            ),
        )
        for consumed in commit.consumed:
            if consumed.learner not in self.lanes and len(self.lanes) >= MOST_LEARNERS:
                continue  # commits name whom they like
            lane = self._lane(consumed.learner)
            lane.last = (commit.fragment, commit.version, row.closed_s)
            late = consumed.staleness > 0
            if late or row.closed_s - lane.marked_s >= MARK_EVERY_S:
                lane.marked_s = row.closed_s
                self.numbered += 1
                self.marks.append(MergedMark(self.numbered, consumed.learner, row.closed_s, late))

    def judged(self, rows: Iterable[LearnerRow], now_s: float) -> None:
        """Note who has changed state."""
        for row in rows:
            turns = self._lane(row.name).turns
            if not turns or turns[-1].state != row.state:
                turns.append(Turn(now_s, row.state))

    def _lane(self, learner: str) -> Lane:
        return self.lanes.setdefault(learner, Lane())
