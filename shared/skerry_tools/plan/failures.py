"""One learner's time, failure by failure: what it did when, and what took the rest.

All its slices fail by one process, whose rate follows how many of them are exposed, so the cost of
a simulation grows with failures and not with chips. An *elastic* learner pauses, goes on without
the slice that failed, and pauses again to take it back; any other one halts until it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from skerry_tools.plan.tables import (
    FailureClock,
    PauseTable,
    RecoveryDistribution,
    RecoveryTable,
    SavingTable,
    Upscale,
)

BLOCK = 4096
GRID = 8192
"""Points by which the mean of a Weibull distribution is integrated; error below 1e-6."""


class TimeUse(IntEnum):
    """What a learner's time goes into: TRAIN, and everything that takes from it."""

    TRAIN = 0
    MISSING = 1  # slices that are away while the others train
    DOWNSCALE = 2  # pauses to go on without a slice,
    UPSCALE = 3  # and to take slices back or start again
    RECOVER = 4  # waiting for what failed: nothing can run without it
    ROLLBACK = 5  # work done since the last checkpoint, and lost
    CHECKPOINT = 6
    OUTAGE = 7  # the site is away, or the learner was killed or stopped on purpose
    WAIT = 8  # standing still for others, in blocking modes
    PREEMPTED = 9  # not given to the run: no part of what goodput divides by


@dataclass(frozen=True, slots=True)
class FailingLearner:
    """One learner's hardware: ``slices`` equal parts that fail, leave and come back as one each.

    ``slice_rate_s`` is failures per second of one slice. Elastic learners never roll back.
    """

    slices: int
    slice_rate_s: float
    elastic: bool
    clock: FailureClock
    recovery: RecoveryTable
    pauses: PauseTable
    saving: SavingTable


@dataclass(frozen=True, slots=True)
class Absence:
    """A planned stretch in which a learner does nothing: an outage, a preemption, a fault.

    ``restart``: its state is gone, so it starts again afterwards, with a pause and rollback.
    """

    begin_s: float
    end_s: float
    use: TimeUse = TimeUse.OUTAGE
    restart: bool = True


@dataclass(frozen=True, slots=True)
class LearnerTimeline:
    """What a learner did: stretch i goes from ``times[i]`` to the next, the last to the end.

    ``shares[i]`` of it trained; the rest went into ``uses[i]``. ``undone`` is work in seconds that
    was lost again at ``undone_at``. All arrays are one-dimensional.
    """

    times: NDArray[np.float64]
    shares: NDArray[np.float64]
    uses: NDArray[np.int64]
    undone_at: NDArray[np.float64]
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

    Only uniforms are drawn, so that a seed means the same with every version of numpy. The
    Weibull distribution is exponentiated, ``F(x) = (1 - exp(-x^shape))^exponent`` (Mudholkar and
    Srivastava, 1993), and scaled by its mean, the integral of 1 - F.
    """
    if table.law is RecoveryDistribution.DETERMINISTIC:
        return np.full(count, table.mean_s)
    uniform = chance.random(count)
    if table.law is RecoveryDistribution.EXPONENTIAL:
        return -table.mean_s * np.log1p(-uniform)
    if table.law is RecoveryDistribution.LOG_NORMAL:
        normal = np.sqrt(-2.0 * np.log1p(-uniform)) * np.cos(2 * np.pi * chance.random(count))
        return table.mean_s * np.exp(table.spread * normal - 0.5 * table.spread**2)
    logs = np.linspace(-60.0, math.log(800.0) / table.spread, GRID)
    above = -np.expm1(table.exponent * np.log(-np.expm1(-np.exp(table.spread * logs))))
    root = np.minimum(np.power(uniform, 1.0 / table.exponent), 1.0 - 1e-16)
    scale = table.mean_s / float(np.trapezoid(above * np.exp(logs), logs))
    return scale * np.power(-np.log1p(-root), 1.0 / table.spread)


def walk(
    learner: FailingLearner, end_s: float, chance: Generator, absences: Sequence[Absence] = ()
) -> LearnerTimeline:
    """Return what a learner does until ``end_s``; the same generator state gives the same."""

    def stream(block: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
        while True:
            yield from block().tolist()

    hazards = stream(lambda: -np.log1p(-chance.random(BLOCK)))
    recoveries = stream(lambda: draw(learner.recovery, chance, BLOCK))
    ordered = sorted(absences, key=lambda one: one.begin_s)[::-1]
    walked = _FailureWalk(
        learner, end_s, ordered, hazards, recoveries, learner.slices, next(hazards)
    )
    walked.run()
    seen = walked.seen
    undone = np.array(seen.undone or np.empty((0, 2)), dtype=np.float64)
    return LearnerTimeline(
        times=np.minimum(np.array(seen.begins), end_s),
        shares=np.array(seen.trains) / learner.slices,
        uses=np.array(seen.uses, dtype=np.int64),
        undone_at=undone[:, 0],
        undone=undone[:, 1],
        failures=seen.failures,
        end_s=end_s,
    )


@dataclass(slots=True)
class _Stretches:
    """When each stretch begins, how many slices train in it, and what the rest goes into."""

    begins: list[float] = field(default_factory=list[float])
    trains: list[int] = field(default_factory=list[int])
    uses: list[int] = field(default_factory=list[int])
    undone: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    failures: int = 0


@dataclass(slots=True)
class _FailureWalk:
    """The walk along a learner's events.

    ``hazard`` is how much more exposure the learner survives, ``away`` when each failed slice works
    again, ``since`` how much work no checkpoint holds. ``absences`` begin with the last.
    """

    learner: FailingLearner
    end_s: float
    absences: list[Absence]
    hazards: Iterator[float]
    recoveries: Iterator[float]
    working: int
    hazard: float
    now: float = 0.0
    since: float = 0.0
    away: list[float] = field(default_factory=list[float])
    seen: _Stretches = field(default_factory=_Stretches)

    def run(self) -> None:
        """Walk from event to event: a failure, slices that are back, a checkpoint, an absence."""
        learner, end_s, away = self.learner, self.end_s, self.away
        pauses, every_s, gate = learner.pauses, learner.saving.every, 0.0
        batch_s = pauses.batch_s if pauses.upscale is Upscale.BATCH else 0.0
        all_back = pauses.upscale is Upscale.ALL_BACK
        every_s = math.inf if every_s is None or learner.elastic else every_s
        missing, recover = int(TimeUse.MISSING), int(TimeUse.RECOVER)  # faster than its members
        begins, trains, uses = (
            self.seen.begins.append,
            self.seen.trains.append,
            self.seen.uses.append,
        )
        while self.now < end_s:
            now, working = self.now, self.working
            exposed = working * learner.slice_rate_s
            fail = now + self.hazard / exposed if exposed else math.inf
            back = math.inf
            if away:
                back = max(now, gate, max(away) if all_back else away[0])
            leave = self._next_absence() if self.absences else end_s
            save = now + every_s - self.since
            stop = min(fail, back, save, leave)
            begins(now)
            trains(working)
            uses(missing if working else recover)
            self.now = stop
            self.hazard -= (stop - now) * exposed
            self.since += stop - now
            if stop == fail:
                self._fail()
            elif stop == back:
                gate = stop + batch_s
                while away and away[0] <= stop:
                    heappop(away)
                    self.working += 1
                self._pause(TimeUse.UPSCALE, pauses.upscale_s)
            elif stop == save:
                self._save()
            elif stop < end_s:
                self._leave()

    def _next_absence(self) -> float:
        """Return when the next absence begins, or the end."""
        return min(self.end_s, max(self.now, self.absences[-1].begin_s))

    def _stand(self, use: TimeUse, until: float) -> None:
        self.seen.begins.append(self.now)
        self.seen.trains.append(0)
        self.seen.uses.append(use)
        self.now = until

    def _fails_before(self, until: float) -> bool:
        """Spend the hazard until then, by the calendar; return True where a slice fails first.

        Then it is that slice's time, and nothing is drawn yet for when it works again.
        """
        if self.learner.clock is FailureClock.RUNNING:
            return False
        slices = self.working if self.learner.elastic else self.learner.slices
        exposed = slices * self.learner.slice_rate_s
        left = exposed * (until - self.now)
        if self.hazard >= left or self.now >= self.end_s:
            self.hazard -= left
            return False
        self.now += self.hazard / exposed
        self.seen.failures += 1
        self.hazard = next(self.hazards)
        return True

    def _fail(self) -> None:
        """Go on without a slice, or halt until all work again and start."""
        self.seen.failures += 1
        self.hazard = next(self.hazards)
        if self.learner.elastic:
            self.working -= 1
            heappush(self.away, self.now + next(self.recoveries))
            self._pause(TimeUse.DOWNSCALE, self.learner.pauses.downscale_s)
            return
        self._undo()
        failed = True
        while failed:  # by the calendar more may fail while it waits, and while it starts
            until = self.now + next(self.recoveries)
            self._stand(TimeUse.RECOVER, self.now)
            while self._fails_before(until):
                until = max(until, self.now + next(self.recoveries))
            self.now = until
            self._stand(TimeUse.UPSCALE, until)
            failed = self._fails_before(self.now + self.learner.pauses.upscale_s)
        self._start()

    def _pause(self, use: TimeUse, seconds: float) -> None:
        """Pause an elastic learner; by the calendar, what fails meanwhile takes one more pause."""
        begun = self.now
        self._stand(use, begun + seconds)
        while self.learner.clock is FailureClock.CALENDAR and begun < self.end_s:
            until, working, self.now = self.now, self.working, begun
            while self.working and self._fails_before(until):
                self.working -= 1
                heappush(self.away, self.now + next(self.recoveries))
            begun = self.now = until
            if self.working == working or not self.learner.pauses.downscale_s:
                break
            self._stand(TimeUse.DOWNSCALE, begun + self.learner.pauses.downscale_s)

    def _save(self) -> None:
        """Write a checkpoint, or fail on the way."""
        exposed = self.learner.slices * self.learner.slice_rate_s
        used = self.learner.saving.cost_s * exposed
        self._stand(TimeUse.CHECKPOINT, self.now)
        if self.hazard > used:
            self.hazard -= used
            self.now += self.learner.saving.cost_s
            self.since = 0.0
        else:
            self.now += self.hazard / exposed
            self._fail()

    def _start(self) -> None:
        """Come back: the pause that it takes.

        An absence that begins meanwhile interrupts it; one that lost the state begins it again.
        """
        pauses, left = self.learner.pauses, self.learner.pauses.upscale_s
        while self.absences and (soon := self._next_absence()) < self.now + left:
            absence = self.absences.pop()
            if absence.end_s <= self.now:
                continue
            left = pauses.upscale_s if absence.restart else left - (soon - self.now)
            self._stand(TimeUse.UPSCALE, soon)
            self._stand(absence.use, absence.end_s)
        self._stand(TimeUse.UPSCALE, self.now + left)

    def _leave(self) -> None:
        """Be away for the absence that begins now; nothing fails meanwhile, by either clock."""
        absence = self.absences.pop()
        if absence.end_s > self.now:
            if absence.restart:
                self._undo()
            self._stand(absence.use, absence.end_s)
            if absence.restart:
                self._start()

    def _undo(self) -> None:
        """Lose the work since the last checkpoint, where the learner rolls back."""
        if self.learner.saving.rollback and self.since and not self.learner.elastic:
            self.seen.undone.append((self.now, self.since))
        self.since = 0.0
