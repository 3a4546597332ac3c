"""How a run has gone recently: what the page and ``skerry top`` warn by, in bounded memory.

A ten-day run hides in its totals whatever has happened in the last hour.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import LearnerPhase, RefusalCause
from skerry.status.view import TEXTS_OF_LATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from skerry.protocol.messages import Commit, MemberRecord, Pulse
    from skerry.status.report import EvaluationRow, LearnerRow

WINDOW_S = 900.0
"""Recent goodput is that of this time,"""
WATCHED_S = 300.0
"""and is reported once so much of it was watched: a learner that starts compiles."""
MARK_S = 15.0
HURRIED_S = 5.0
"""Pulses that were held up come one right after the other."""
LEAST_GOODPUT = 0.5
"""Below this it is low."""
LATE_ROUNDS = 10.0
"""No commit for this many expected rounds,"""
LATE_S = 20.0
"""and for this long, is too long."""
FIRST_S = 120.0
"""While the first rounds are still to come, everybody compiles: it takes this long to be so."""
WAITED_S = 300.0
"""A learner that catches up for so long waits for parameters that no syncer commits."""
MOST_INTERVALS = 64
REST = 20.0
"""More than so many usual intervals, and than FIRST_S, was a rest or an outage: where fragments are
committed in bursts, the pause between two of those is shorter, and belongs to the rhythm."""
STARTING_S = 1800.0
"""A learner that starts when all others have finished may take this long: none compiles longer."""
RECENT_S = 600.0
"""Refusals and restarts are reported for this long."""
WORSE = 0.1
"""Held-out loss this share above its best goes the wrong way,"""
JUDGED = 3
"""where it does so many times in a row."""
MOST_TROUBLES = 400
"""So many of either are kept."""


class Counted(NamedTuple):
    """What a learner's pulse of ``at_s`` counted of its process: seconds of steps, and of all."""

    at_s: float
    incarnation: int
    train_s: float
    alive_s: float


class GoodputMark(NamedTuple):
    """What all learners together had counted at a moment, since somebody began to watch."""

    at_s: float
    train_s: float
    alive_s: float


@dataclass(slots=True)
class Recent:
    """What learners did recently: goodput, starts, refused contributions.

    Goodput is as Prometheus' rule has it, from what the learners' processes count. Down time is not
    in it: a learner that is gone is reported by name. A pulse counts by its difference to the one
    before, so that what a learner did before anybody watched is not taken for recent.
    """

    train_s: float = 0.0
    alive_s: float = 0.0
    counted: dict[str, Counted] = field(default_factory=dict[str, Counted])
    marks: deque[GoodputMark] = field(
        default_factory=lambda: deque[GoodputMark](maxlen=round(WINDOW_S / MARK_S) + 1)
    )
    incarnations: dict[str, int] = field(default_factory=dict[str, int])
    _started: deque[tuple[float, str, int]] = field(
        default_factory=lambda: deque[tuple[float, str, int]](maxlen=MOST_TROUBLES)
    )
    _refused: deque[tuple[float, Counter[RefusalCause]]] = field(
        default_factory=lambda: deque[tuple[float, Counter[RefusalCause]]](maxlen=MOST_TROUBLES)
    )

    def pulsed(self, pulse: Pulse, now_s: float) -> None:
        """Take in a pulse that came at ``now_s``; an older or a known one changes nothing."""
        known = self.incarnations.setdefault(pulse.learner, pulse.incarnation)
        if known and pulse.incarnation > known:
            self._start(pulse.learner, pulse.incarnation, now_s)
        else:
            self.incarnations[pulse.learner] = max(known, pulse.incarnation)
        before = self.counted.get(pulse.learner)
        if before is not None and pulse.incarnation < before.incarnation:
            return
        now = Counted(now_s, pulse.incarnation, pulse.busy_s, pulse.alive_s)
        self.counted[pulse.learner] = now
        if before is not None:
            self._count(before, now)
        if self.marks and now_s < self.marks[-1].at_s:  # a clock was set back
            self.marks.clear()
        if not self.marks or now_s - self.marks[-1].at_s >= MARK_S:
            self.marks.append(GoodputMark(now_s, self.train_s, self.alive_s))

    def joined(self, member: MemberRecord, at_s: float) -> None:
        """Take in a start that the log had at ``at_s``, once, in any order.

        The newest may be known before older ones. By the learner's own clock, which may be off by
        a day, starts would be reported for so long, or never. A first start is no trouble;
        incarnation 0 is a name that was kept for later.
        """
        known = self.incarnations.setdefault(member.learner, min(1, member.incarnation))
        if known and member.incarnation > 1:
            self._start(member.learner, member.incarnation, at_s)
        else:
            self.incarnations[member.learner] = max(known, member.incarnation)

    def committed(self, commit: Commit, at_s: float) -> None:
        """Take in a commit that was there at ``at_s``, once.

        Its syncer's clock may be off. A second offer of initial parameters is no trouble.
        """
        causes = Counter(r.cause for r in commit.refused)
        del causes[RefusalCause.GENESIS]
        if causes:
            self._refused.append((at_s, causes))

    def starts(self, now_s: float) -> Counter[str]:
        """Return how often each learner was started again in the last RECENT_S."""
        return Counter(name for at_s, name, _ in self._started if at_s >= now_s - RECENT_S)

    def refused(self, now_s: float) -> Counter[RefusalCause]:
        """Return how many contributions were refused in the last RECENT_S, by cause."""
        found = Counter[RefusalCause]()
        for at_s, causes in self._refused:
            if at_s >= now_s - RECENT_S:
                found += causes
        return found

    def _start(self, learner: str, incarnation: int, at_s: float) -> None:
        """Note that a learner was started again: a pulse may tell of it before its record does."""
        self.incarnations[learner] = max(incarnation, self.incarnations.get(learner, 0))
        if not any(name == learner and held == incarnation for _, name, held in self._started):
            self._started.append((at_s, learner, incarnation))

    def _count(self, before: Counted, now: Counted) -> None:
        """Add what lies between two pulses, as much of it as can be recent.

        No more than the time that has passed (pulses may lie), nor than the window holds: the
        first pulse after a broker's outage tells of all of it.
        """
        if now.incarnation > before.incarnation:
            before = before._replace(train_s=0.0, alive_s=0.0)
        passed_s = max(0.0, now.at_s - before.at_s) + HURRIED_S
        told_s = max(0.0, now.alive_s - before.alive_s)
        alive_s = min(passed_s, WINDOW_S, told_s)
        if alive_s > 0:
            train_s = max(0.0, now.train_s - before.train_s) * (alive_s / told_s)
            self.train_s += min(alive_s, train_s)
            self.alive_s += alive_s

    def goodput(self, now_s: float) -> float | None:
        """Return the goodput of the last WINDOW_S; None where no time was watched or allotted."""
        since = next((mark for mark in self.marks if mark.at_s >= now_s - WINDOW_S), None)
        if since is None or now_s - since.at_s < WATCHED_S:
            return None
        alive_s = self.alive_s - since.alive_s
        return (self.train_s - since.train_s) / alive_s if alive_s > 0 else None


def interval_s(closed_s: Iterable[float]) -> float | None:
    """Return the mean seconds between recent commits, None for fewer than three of them.

    Rests and outages are left out: one night in the mean, and no missing round shows for hours.
    """
    times = sorted(closed_s)[-MOST_INTERVALS:]
    if len(times) < 3:
        return None
    gaps = [later - before for before, later in pairwise(times)]
    usual_s = median_low([gap for gap in gaps if gap > 0] or [0.0])
    kept = [gap for gap in gaps if gap <= max(FIRST_S, REST * usual_s)]
    return sum(kept) / len(kept)


def round_s(gap_s: float | None, h_steps: int, rows: Iterable[LearnerRow]) -> float:
    """Return the seconds between two commits that are expected.

    By the interval of recent commits, ``gap_s``; before there is one, by the longest steps.
    """
    if gap_s is not None:
        return gap_s
    return h_steps * max((row.step_time_s for row in rows), default=0.0)


def late_after_s(gap_s: float | None, h_steps: int, rows: Iterable[LearnerRow]) -> float:
    """Return after how long without a commit something is wrong; see ``round_s``."""
    least_s = FIRST_S if gap_s is None else LATE_S
    return max(least_s, LATE_ROUNDS * round_s(gap_s, h_steps, rows))


def ending(rows: Iterable[LearnerRow]) -> list[LearnerRow]:
    """Return the learners that wait for the run's end; none while others are not done.

    The end waits for learners that still work or are on the way: no round is due until then.
    """
    there = [row for row in rows if row.liveness is not Liveness.GONE]
    return there if all(row.phase is LearnerPhase.FINISHED for row in there) else []


def awaited(rows: Iterable[LearnerRow]) -> list[LearnerRow]:
    """Return who is starting while all others have finished, and the end of the run waits for it.

    A learner that catches up is reported by how long it has waited.
    """
    there = [row for row in rows if row.liveness is not Liveness.GONE]
    coming = [row for row in there if row.phase is not LearnerPhase.FINISHED]
    starting = all(row.phase is LearnerPhase.STARTING for row in coming)
    return coming if starting and len(coming) < len(there) else []


class HeldOut(NamedTuple):
    """Losses on one text so far: the newest, the least of all, and the least of the newest three.

    In nats per token.
    """

    newest: float
    best: float
    recent: float

    @property
    def worse(self) -> bool:
        """Whether it goes the wrong way: one evaluation alone proves nothing."""
        return self.recent > self.best * (1 + WORSE)


def held_out(evaluations: Sequence[EvaluationRow]) -> dict[str, HeldOut]:
    """Return what recent evaluators found on the text that each read last, by their names.

    Losses on one text are those of one model: an evaluator that took another's
    place goes on from its best, one that was given another text starts again.
    """
    texts = {e.evaluator: e.text for e in evaluations[-TEXTS_OF_LATE:]}
    found: dict[str, HeldOut] = {}
    for evaluator, text in texts.items():
        losses = [e.loss for e in evaluations if e.text == text and e.loss is not None]
        if losses:
            found[evaluator] = HeldOut(losses[-1], min(losses), min(losses[-JUDGED:]))
    return found


def missed(rows: Sequence[LearnerRow]) -> list[LearnerRow]:
    """Return who is gone without a goodbye, and whose place no other has taken since.

    A view keeps every name: one that was replaced under another would be missed for ever. So each
    name that first joined after another fell silent stands in for one, whatever became of it; one
    that joined before is no stand-in, however many are left.
    """
    gone = [
        row
        for row in rows
        if row.liveness is Liveness.GONE and row.reason is not LivenessReason.STOPPED
    ]
    gone.sort(key=_silent_s, reverse=True)
    came = [row.joined_s_ago for row in rows if row.joined_s_ago is not None]
    for joined_s_ago in sorted(came, reverse=True):
        replaced = next((row for row in gone if _silent_s(row) > joined_s_ago), None)
        if replaced is not None:
            gone.remove(replaced)
    return [row for row in rows if row in gone]


def _silent_s(row: LearnerRow) -> float:
    """Return for how long it has been silent: never before it came, whatever its own clock says."""
    return row.seen_s_ago if row.joined_s_ago is None else min(row.seen_s_ago, row.joined_s_ago)


def diverged(rows: Iterable[LearnerRow]) -> list[LearnerRow]:
    """Return who trains with a loss that is no finite number."""
    return [row for row in rows if row.heard and row.loss is None and row.takes_steps]
