"""One learner's time, failure by failure: what it did when, and what took the rest.

An *elastic* learner pauses, goes on without the slice that failed, and pauses again to take it
back; any other one halts until it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from skerry_tools.plan.goodput import FailingLearner
from skerry_tools.plan.tables import RecoveryTable

BLOCK = 4096
Absence: TypeAlias = tuple[float, float]
"""Seconds from which and until which a learner does nothing, by plan; then it starts again."""
Stretch: TypeAlias = tuple[float, int, int, float]


class TimeUse(IntEnum):
    """What a learner's time goes into: TRAIN, and everything that takes from it, with its name."""

    def __new__(cls, number: int, text: str) -> Self:
        made = int.__new__(cls, number)
        made._value_, made.text = number, text
        return made

    text: str
    TRAIN = 0, "train"
    MISSING = 1, "slices away"  # while the others train
    DOWNSCALE = 2, "pauses to go on without a slice"
    UPSCALE = 3, "pauses to take slices back or start"
    RECOVER = 4, "waiting for what failed"  # nothing can run without it
    ROLLBACK = 5, "work lost and done again"  # that was done since the last checkpoint
    CHECKPOINT = 6, "writing checkpoints"
    OUTAGE = 7, "outages"  # the site is away
    WAIT = 8, "waiting for other learners"  # in blocking modes


class LearnerTimeline(NamedTuple):
    """What a learner did: stretch i goes from ``times[i]`` to the next, the last to the end.

    ``shares[i]`` of it trained; the rest went into ``uses[i]``. ``undone[i]`` is work in seconds
    that was lost again when it began. All arrays are one-dimensional.
    """

    times: NDArray[np.float64]
    shares: NDArray[np.float64]
    uses: NDArray[np.int64]
    undone: NDArray[np.float64]
    failures: int
    end_s: float

    @property
    def lengths(self) -> NDArray[np.float64]:
        return np.diff(self.times, append=self.end_s)

    @property
    def running_share(self) -> float:
        """Share of its time that the learner trains, with however many slices."""
        return float(self.lengths[self.shares > 0].sum() / self.end_s)

    def done_by(self, moments: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the work in seconds that is done by each moment; it counts until it is lost."""
        times, lost = np.append(self.times, self.end_s), np.append(0.0, np.cumsum(self.undone))
        done = np.interp(moments, times, np.append(0.0, np.cumsum(self.lengths * self.shares)))
        gone = lost[np.searchsorted(self.times, moments, side="right")]
        return np.asarray(done - gone, dtype=np.float64)

    def spent(self) -> NDArray[np.float64]:
        """Return seconds by use, of the whole learner: shape [len(TimeUse)]."""
        lengths, undone = self.lengths, float(self.undone.sum())
        lost = lengths * (1.0 - self.shares)
        sums = np.bincount(self.uses, weights=lost, minlength=len(TimeUse)).astype(np.float64)
        sums[TimeUse.TRAIN] += float(lengths @ self.shares) - undone
        sums[TimeUse.ROLLBACK] += undone
        return sums


def draw(table: RecoveryTable, chance: Generator, count: int) -> NDArray[np.float64]:
    """Return ``count`` durations of this distribution in seconds, shape [count].

    Only uniforms are drawn, so that a seed means the same with every version of numpy.
    """
    if table.law == "deterministic":
        return np.full(count, table.mean_s)
    uniform = chance.random(count)
    if table.law == "exponential":
        return -table.mean_s * np.log1p(-uniform)
    normal = np.sqrt(-2.0 * np.log1p(-uniform)) * np.cos(2 * np.pi * chance.random(count))
    return table.mean_s * np.exp(table.spread * normal - 0.5 * table.spread**2)


def walk(
    learner: FailingLearner, end_s: float, chance: Generator, absences: Sequence[Absence] = ()
) -> LearnerTimeline:
    """Return what a learner does until ``end_s``; the same generator state gives the same."""

    def stream(block: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
        while True:
            yield from block().tolist()

    hazards = stream(lambda: -np.log1p(-chance.random(BLOCK)))
    recoveries = stream(lambda: draw(learner.tables.recovery, chance, BLOCK))
    walked = _FailureWalk(learner, end_s, sorted(absences, reverse=True), hazards, recoveries)
    walked.run()
    times, trains, uses, undone = map(np.array, zip(*walked.stretches, strict=True))
    times, shares = np.minimum(times, end_s), trains / learner.slices
    return LearnerTimeline(times, shares, uses, undone, walked.failures, end_s)


@dataclass(slots=True)
class _FailureWalk:
    """The walk along a learner's events.

    ``hazard`` is how much more exposure the learner survives, ``away`` when each failed slice works
    again, ``since`` how much work no checkpoint holds. ``absences`` begin with the last. Of each
    stretch is known when it begins, how many slices train in it, what the rest goes into, and how
    much work is lost when it begins.
    """

    learner: FailingLearner
    end_s: float
    absences: list[Absence]
    hazards: Iterator[float]
    recoveries: Iterator[float]
    now: float = 0.0
    hazard: float = 0.0
    since: float = 0.0
    away: list[float] = field(default_factory=list[float])
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    failures: int = 0

    def run(self) -> None:
        """Walk from event to event: a failure, slices that are back, a checkpoint, an absence."""
        learner, end_s, away, gate = self.learner, self.end_s, self.away, 0.0
        pauses, every_s = learner.tables.pauses, learner.tables.checkpoints.every
        every_s = math.inf if every_s is None or learner.elastic else every_s
        missing, recover = int(TimeUse.MISSING), int(TimeUse.RECOVER)  # faster than its members
        self.hazard = next(self.hazards)
        while self.now < end_s:
            now, working = self.now, learner.slices - len(away)
            exposed = working * learner.slice_rate_s
            fail = now + self.hazard / exposed if exposed else math.inf
            back = max(now, gate, away[0]) if away else math.inf
            save = now + every_s - self.since
            leave = max(now, self.absences[-1][0]) if self.absences else end_s
            stop = min(fail, back, save, leave, end_s)
            self.stretches.append((now, working, missing if working else recover, 0.0))
            self.now = stop
            self.hazard -= (stop - now) * exposed
            self.since += stop - now
            if stop == fail:
                self._fail()
            elif stop == back:
                gate = stop + pauses.batch_s
                while away and away[0] <= stop:
                    heappop(away)
                self._stand(TimeUse.UPSCALE, stop + pauses.upscale_s)
            elif stop == save:
                self._save()
            elif stop < end_s and (until := self.absences.pop()[1]) > stop:
                self._halt(TimeUse.OUTAGE, until)  # nothing fails meanwhile

    def _stand(self, use: TimeUse, until: float, undone: float = 0.0) -> None:
        self.stretches.append((self.now, 0, use, undone))
        self.now = until

    def _fail(self) -> None:
        """Go on without a slice, or halt until all work again and start."""
        self.failures += 1
        self.hazard = next(self.hazards)
        back = self.now + next(self.recoveries)
        if self.learner.elastic:
            heappush(self.away, back)
            self._stand(TimeUse.DOWNSCALE, self.now + self.learner.tables.pauses.downscale_s)
        else:
            self._halt(TimeUse.RECOVER, back)

    def _save(self) -> None:
        """Write a checkpoint, or fail on the way."""
        exposed = self.learner.slices * self.learner.slice_rate_s
        cost_s = self.learner.tables.checkpoints.cost_s
        used = cost_s * exposed
        if self.hazard > used:
            self.hazard -= used
            self._stand(TimeUse.CHECKPOINT, self.now + cost_s)
            self.since = 0.0
        else:
            self._stand(TimeUse.CHECKPOINT, self.now + self.hazard / exposed)
            self._fail()

    def _halt(self, use: TimeUse, until: float) -> None:
        """Stand still and start again; work since the last checkpoint is lost by a rollback."""
        tables = self.learner.tables
        loses = tables.checkpoints.rollback and not self.learner.elastic
        self._stand(use, until, self.since if loses else 0.0)
        self.since = 0.0
        self._stand(TimeUse.UPSCALE, until + tables.pauses.upscale_s)
