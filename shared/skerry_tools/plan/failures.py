"""One learner's time, failure by failure: what it did when, and what took the rest.

An *elastic* learner pauses, goes on without the slice that failed, and pauses again to take it
back; any other one halts until it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
"""When it begins, how many slices train in it, what the rest goes into, and the work in seconds
that is lost when it begins."""


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
    planned = sorted(absences, reverse=True)
    stretches = _stretches(learner, end_s, planned, hazards, recoveries)
    times, trains, uses, undone = map(np.array, zip(*stretches, strict=True))
    times, shares = np.minimum(times, end_s), trains / learner.slices
    failures = uses == (TimeUse.DOWNSCALE if learner.elastic else TimeUse.RECOVER)
    return LearnerTimeline(times, shares, uses, undone, int(failures.sum()), end_s)


def _stretches(
    learner: FailingLearner,
    end_s: float,
    absences: list[Absence],
    hazards: Iterator[float],
    recoveries: Iterator[float],
) -> Iterator[Stretch]:
    """Yield from one event to the next: a failure, slices that are back, a checkpoint, an absence.

    ``hazard`` is how much more exposure the learner survives, ``away`` when each failed slice works
    again, ``since`` how much work no checkpoint holds. ``absences`` begin with the last.
    """
    pauses, saving = learner.tables.pauses, learner.tables.checkpoints
    every_s = math.inf if saving.every is None or learner.elastic else saving.every
    missing, recover = int(TimeUse.MISSING), int(TimeUse.RECOVER)  # faster than its members
    now = since = gate = 0.0
    hazard, away = next(hazards), list[float]()
    while now < end_s:
        working = learner.slices - len(away)
        exposed = working * learner.slice_rate_s
        fail = now + hazard / exposed if exposed else math.inf
        back = max(now, gate, away[0]) if away else math.inf
        save = now + every_s - since
        leave = max(now, absences[-1][0]) if absences else end_s
        stop = min(fail, back, save, leave, end_s)
        yield now, working, missing if working else recover, 0.0
        hazard -= (stop - now) * exposed
        since += stop - now
        now, fails = stop, stop == fail
        halts: tuple[TimeUse, float] | None = None
        if not fails and stop == back:
            gate = now + pauses.batch_s
            while away and away[0] <= now:
                heappop(away)
            yield now, 0, TimeUse.UPSCALE, 0.0
            now += pauses.upscale_s
        elif not fails and stop == save:
            fails = hazard <= saving.cost_s * exposed  # on the way
            yield now, 0, TimeUse.CHECKPOINT, 0.0
            now += hazard / exposed if fails else saving.cost_s
            if not fails:
                hazard -= saving.cost_s * exposed
                since = 0.0
        elif not fails and stop < end_s and (until := absences.pop()[1]) > now:
            halts = TimeUse.OUTAGE, until  # nothing fails meanwhile
        if fails:
            hazard, back = next(hazards), now + next(recoveries)
            if learner.elastic:
                heappush(away, back)
                yield now, 0, TimeUse.DOWNSCALE, 0.0
                now += pauses.downscale_s
            else:
                halts = TimeUse.RECOVER, back
        if halts:
            use, until = halts
            yield now, 0, use, since if saving.rollback and not learner.elastic else 0.0
            yield until, 0, TimeUse.UPSCALE, 0.0
            now, since = until + pauses.upscale_s, 0.0
