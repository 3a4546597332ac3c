"""What the page shows and a view forgets: recent rounds, curves, lanes, checkpoints, samples.

A fold beside ``skerry.status.view``, over the same messages. All of it is bounded; all that is made
from the ledger is the same again after a restart. What only pulses tell (who adopted when, when
somebody fell silent) begins with the monitor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    LearnerPhase,
    Pulse,
    begins_history,
    is_round,
)
from skerry.status.curves import Bin, Curves
from skerry.status.recent import Recent
from skerry.status.sources import MOST_LEARNERS
from skerry.status.timeline import CommittedRound, Timeline, committed_round

if TYPE_CHECKING:
    from skerry.protocol.messages import MemberRecord
    from skerry.status.report import LearnerRow
    from skerry.status.view import Message

LANE_S = 900.0
"""How far back a learner's lane reaches."""
MOST_TURNS = 32
"""Changes of state kept of each learner,"""
MOST_MARKS = 12_000
"""and contributions of all learners together,"""
MARK_EVERY_S = 1.0
"""of each learner at most one in this time."""
MOST_CHECKPOINTS = 24
MOST_SAMPLES = 24
MOST_NOTES = 80


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
class StepCount:
    """Steps taken, summed over the incarnations that pulses reported."""

    earlier: int = 0
    incarnation: int = 0
    steps: int = 0

    def pulsed(self, pulse: Pulse) -> None:
        if pulse.incarnation > self.incarnation:
            self.earlier += self.steps
            self.incarnation, self.steps = pulse.incarnation, 0
        if pulse.incarnation == self.incarnation:
            self.steps = max(self.steps, pulse.steps)

    @property
    def total(self) -> int:
        return self.earlier + self.steps


@dataclass(slots=True)
class History:
    """Everything beside the view; ``fragments`` is P."""

    fragments: int
    timeline: Timeline = field(default_factory=Timeline)
    curves: Curves = field(default_factory=Curves)
    lanes: dict[str, Lane] = field(default_factory=dict[str, Lane])
    work: dict[str, StepCount] = field(default_factory=dict[str, StepCount])
    lately: Recent = field(default_factory=Recent)
    marks: deque[MergedMark] = field(default_factory=lambda: deque[MergedMark](maxlen=MOST_MARKS))
    numbered: int = 0
    checkpoints: dict[str, CheckpointRecord] = field(default_factory=dict[str, "CheckpointRecord"])
    samples: list[Evaluation] = field(default_factory=list[Evaluation])

    def take(self, message: Message, now_s: float) -> None:
        """Fold in any message that comes without its place in the ledger."""
        match message:
            case Pulse():
                self._pulsed(message, now_s)
            case CheckpointRecord():
                self._checkpoint(message)
            case Evaluation():
                self._evaluated(message)
            case _:
                pass

    def joined(self, member: MemberRecord, at_s: float) -> None:
        """Fold in a learner's start that the ledger had at ``at_s``; twice changes nothing."""
        self._lane(member.learner).host = member.host
        self.lately.joined(member, at_s)

    def committed(self, commit: Commit, sequence: int, stored_s: float, at_s: float) -> None:
        """Fold in a commit, where and when the ledger has it; twice changes nothing.

        ``stored_s`` is that time by the broker's clock, ``at_s`` by the watcher's clock.
        """
        newest = self.timeline.newest.get(commit.fragment)
        if newest is not None and commit.version <= newest.version:
            return
        row = committed_round(commit, sequence, stored_s)
        self.timeline.committed(row)
        self.lately.committed(commit, at_s)
        if not is_round(commit):
            if begins_history(commit):
                self.curves.begin(sum(p.tokens for p in commit.progress) / self.fragments)
            return
        self.curves.add(row.closed_s, self._bin(row))
        for consumed in commit.consumed:
            if consumed.learner not in self.lanes and len(self.lanes) >= MOST_LEARNERS:
                continue  # commits name whom they like
            lane = self._lane(consumed.learner)
            lane.last = (commit.fragment, commit.version, row.closed_s)
            self._mark(consumed.learner, lane, row.closed_s, late=consumed.staleness > 0)

    def judged(self, rows: tuple[LearnerRow, ...], now_s: float) -> None:
        """Note who has changed state since the last time."""
        for row in rows:
            lane = self._lane(row.name)
            state = state_of(row)
            if lane.turns and lane.turns[-1].state == state:
                continue
            lane.turns.append(Turn(now_s, state))

    def steps_by_learner(self) -> dict[str, int]:
        """Return the steps that each learner has reported."""
        return {name: work.total for name, work in self.work.items()}

    def _lane(self, learner: str) -> Lane:
        lane = self.lanes.get(learner)
        if lane is None:
            lane = self.lanes[learner] = Lane()
        return lane

    def _pulsed(self, pulse: Pulse, now_s: float) -> None:
        self.timeline.pulsed(pulse, now_s)
        self.lately.pulsed(pulse, now_s)
        work = self.work.get(pulse.learner)
        if work is None:
            work = self.work[pulse.learner] = StepCount()
        work.pulsed(pulse)
        self._lane(pulse.learner)

    def _mark(self, learner: str, lane: Lane, at_s: float, *, late: bool) -> None:
        if at_s - lane.marked_s < MARK_EVERY_S and not late:
            return
        lane.marked_s = at_s
        self.numbered += 1
        self.marks.append(MergedMark(self.numbered, learner, at_s, late))

    def _bin(self, row: CommittedRound) -> Bin:
        share = row.tokens / self.fragments
        has_loss = row.loss is not None and isfinite(row.loss)
        return Bin(
            step=row.step,
            tokens=share,
            loss_sum=(row.loss or 0.0) * row.tokens if has_loss else 0.0,
            weight=row.tokens if has_loss else 0.0,
            rounds=1,
        )

    def _checkpoint(self, record: CheckpointRecord) -> None:
        self.checkpoints.pop(record.path, None)
        self.checkpoints[record.path] = record
        while len(self.checkpoints) > MOST_CHECKPOINTS:
            del self.checkpoints[next(iter(self.checkpoints))]

    def _evaluated(self, evaluation: Evaluation) -> None:
        """Keep what the model wrote; of older ones every second where they become too many."""
        if not evaluation.sample or any(
            s.evaluated_ns == evaluation.evaluated_ns for s in self.samples
        ):
            return
        if len(self.samples) >= MOST_SAMPLES:
            self.samples = self.samples[::2]
        self.samples.append(evaluation)


def state_of(row: LearnerRow) -> str:
    """Return what a lane says of a learner: its liveness where that is in doubt, else its phase."""
    if row.liveness is Liveness.ALIVE or row.phase in {LearnerPhase.STOPPED, LearnerPhase.FINISHED}:
        return row.phase.value
    return row.liveness.value
