"""How a run has gone recently, in bounded memory: goodput, starts, refusals, the rhythm of rounds.

A ten-day run hides in its totals whatever has happened in the last hour.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

from skerry.protocol.messages import Commit, MemberRecord, Pulse, RefusalCause, refusals

WINDOW_S = 900.0
"""Recent goodput is that of this time."""
WATCHED_S = 300.0
"""Recent goodput is reported once this much was watched: learners that start compile."""
MARK_S = 15.0
HURRIED_S = 5.0
"""Added to the time between two pulses: some are held up and come right after each other."""
RECENT_S = 600.0
"""Refusals, restarts and fragments that differ are reported for this long."""
MOST_TROUBLES = 400
"""Most restarts that are kept, and most refusals."""
MOST_INTERVALS = 64
REST, LEAST_REST_S = 20.0, 120.0
"""A pause longer than REST usual intervals and than LEAST_REST_S was a rest or an outage. The pause
between two bursts of commits is shorter, and belongs to the rhythm."""


class Counted(NamedTuple):
    """What a learner's pulse of ``at_s`` counted: seconds of its process in steps, and in all.

    ``mismatches`` are global fragments that were not what was committed.
    """

    at_s: float
    incarnation: int
    train_s: float
    alive_s: float
    mismatches: int


class GoodputMark(NamedTuple):
    """What all learners together had counted at a moment, since somebody began to watch."""

    at_s: float
    train_s: float
    alive_s: float


@dataclass(slots=True)
class Recent:
    """What learners did recently.

    Goodput is that of processes that live: a learner that is gone is reported by name. A pulse
    counts by its difference to the one before, so that what a learner did before anybody watched
    is not taken for recent.
    """

    train_s: float = 0.0
    alive_s: float = 0.0
    counted: dict[str, Counted] = field(default_factory=dict[str, Counted])
    marks: deque[GoodputMark] = field(
        default_factory=lambda: deque[GoodputMark](maxlen=round(WINDOW_S / MARK_S) + 1)
    )
    _started: deque[tuple[float, str, int]] = field(
        default_factory=lambda: deque[tuple[float, str, int]](maxlen=MOST_TROUBLES)
    )
    _refused: deque[tuple[float, Counter[RefusalCause]]] = field(
        default_factory=lambda: deque[tuple[float, Counter[RefusalCause]]](maxlen=MOST_TROUBLES)
    )
    _differed: dict[str, float] = field(default_factory=dict[str, float])
    """When a global fragment was last not what was committed, by learner."""

    def pulsed(self, pulse: Pulse, now_s: float) -> None:
        """Take in a pulse that came at ``now_s``; an older or a known one changes nothing."""
        before = self.counted.get(pulse.learner)
        if before is not None and pulse.incarnation < before.incarnation:
            return
        now = Counted(
            now_s, pulse.incarnation, pulse.busy_s, pulse.alive_s, pulse.digest_mismatches
        )
        self.counted[pulse.learner] = now
        known = before if before and before.incarnation == now.incarnation else None
        if now.mismatches > (known.mismatches if known else 0):
            # In a process that is seen for the first time it may have been at its start.
            self._differed[pulse.learner] = now_s if known else now_s - now.alive_s
        if before is not None:
            self._count(before, now)
        if self.marks and now_s < self.marks[-1].at_s:  # a clock was set back
            self.marks.clear()
        if not self.marks or now_s - self.marks[-1].at_s >= MARK_S:
            self.marks.append(GoodputMark(now_s, self.train_s, self.alive_s))

    def joined(self, member: MemberRecord, at_s: float) -> None:
        """Take in a start, once, in any order; a learner's first start is no trouble.

        ``at_s`` is when the log had it: the learner's own clock may be off by a day.
        """
        start = member.learner, member.incarnation
        if member.incarnation > 1 and start not in {held[1:] for held in self._started}:
            self._started.append((at_s, *start))

    def committed(self, commit: Commit, at_s: float) -> None:
        """Take in a commit, once; ``at_s`` is when the log had it: a syncer's clock may be off."""
        if causes := refusals(commit):
            self._refused.append((at_s, Counter(causes)))

    def starts(self, now_s: float) -> Counter[str]:
        """Return how often each learner was started again in the last RECENT_S."""
        return Counter(name for at_s, name, _ in self._started if at_s >= now_s - RECENT_S)

    def refused(self, now_s: float) -> Counter[RefusalCause]:
        """Return how many contributions were refused in the last RECENT_S, by cause."""
        recent = [causes for at_s, causes in self._refused if at_s >= now_s - RECENT_S]
        return sum(recent, Counter[RefusalCause]())

    def mismatched(self, now_s: float) -> set[str]:
        """Return the learners whose global fragments differed within the last RECENT_S."""
        since = now_s - RECENT_S
        return {name for name, at_s in self._differed.items() if at_s >= since}

    def _count(self, before: Counted, now: Counted) -> None:
        """Add the time between two pulses, as much of it as can be recent.

        That is no more than has passed (pulses may lie), and no more than the window: the first
        pulse after a broker's outage covers all of the outage.
        """
        if now.incarnation > before.incarnation:
            before = before._replace(train_s=0.0, alive_s=0.0)
        passed_s = max(0.0, now.at_s - before.at_s) + HURRIED_S
        reported_s = max(0.0, now.alive_s - before.alive_s)
        alive_s = min(passed_s, WINDOW_S, reported_s)
        if alive_s > 0:
            train_s = max(0.0, now.train_s - before.train_s) * (alive_s / reported_s)
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

    Rests and outages are left out: with a night in the mean, no missing round shows for hours.
    """
    times = sorted(closed_s)[-MOST_INTERVALS:]
    if len(times) < 3:
        return None
    gaps = [later - before for before, later in pairwise(times)]
    usual_s = median_low([gap for gap in gaps if gap > 0] or [0.0])
    kept = [gap for gap in gaps if gap <= max(LEAST_REST_S, REST * usual_s)]
    return sum(kept) / len(kept)
