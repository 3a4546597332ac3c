"""One island's time, failure by failure: what it did when, and what took the rest.

All its slices fail by one process together, whose rate follows how many of them are exposed, so the
cost of a simulation grows with failures and not with chips. An *elastic* island pauses, goes on
without the slice that failed, and pauses again to take it back; any other one halts until it is
whole. By which clock failures strike is said, never implied: ``RUNNING`` strikes nobody who pauses,
``CALENDAR`` everybody at any time.

Only the walk along the events is a loop. What is added up afterwards is added up in arrays.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

import numpy as np

from skerry_tools.plan.closed import Clock
from skerry_tools.plan.laws import Law, exponentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.random import Generator
    from numpy.typing import NDArray

BLOCK = 4096


class Use(IntEnum):
    """What an island's time goes into: TRAIN, and everything that takes from it."""

    TRAIN = 0
    MISSING = 1
    """Slices that are away while the others train."""
    DOWNSCALE = 2
    UPSCALE = 3
    """Pauses to go on without a slice, and to take slices back or start again."""
    RECOVER = 4
    """Waiting for what failed: nothing can run without it."""
    ROLLBACK = 5
    """Work done since the last checkpoint, and lost."""
    CHECKPOINT = 6
    OUTAGE = 7
    """The whole site is away, or the island was killed or stopped on purpose."""
    WAIT = 8
    """Standing still for others, in blocking modes."""
    PREEMPTED = 9
    """Not given to the run at all: this time is not part of what goodput divides by."""
    IDLE = 10
    """Alive, and at none of these: what a calibrated run loses between its steps."""


USES = len(Use)
DOWNSCALE, UPSCALE = int(Use.DOWNSCALE), int(Use.UPSCALE)
"""As plain numbers: members of an enumeration cost the hot loop a tenth."""


class Upscale(StrEnum):
    """When slices that work again are taken back."""

    EAGER = "eager"
    """At once,"""
    BATCH = "batch"
    """no more often than every ``batch_s``,"""
    ALL_BACK = "all-back"
    """or once none is away."""


@dataclass(frozen=True, slots=True)
class Island:
    """One learner's hardware: ``slices`` equal parts that fail, leave and come back as one each.

    ``slice_rate_s`` is failures per second of one slice. ``checkpoint_every_s`` is in seconds of
    work, None: none is written; ``rollback``: a failure loses the work since the last one. Elastic
    islands hold their state several times over and never roll back.
    """

    slices: int
    slice_rate_s: float
    recovery: Law
    clock: Clock = Clock.RUNNING
    elastic: bool = True
    downscale_s: float = 0.0
    upscale_s: float = 0.0
    upscale: Upscale = Upscale.EAGER
    batch_s: float = 0.0
    checkpoint_every_s: float | None = None
    checkpoint_s: float = 0.0
    rollback: bool = False
    replay_s: float = 0.0
    """Work that a halting island does again after each start, whatever checkpoints there are."""


@dataclass(frozen=True, slots=True)
class Absence:
    """A stretch in which an island does nothing, and known before: an outage, a preemption.

    ``restart``: its state is gone, so it starts again afterwards (``upscale_s``, and rollback).
    """

    begin_s: float
    end_s: float
    use: Use = Use.OUTAGE
    restart: bool = True


@dataclass(frozen=True, slots=True)
class Timeline:
    """What an island did: stretch i goes from ``times[i]`` to the next, the last to the end.

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
        """How long each stretch lasts, in seconds."""
        return np.diff(self.times, append=self.end_s)


def walk(
    island: Island, end_s: float, chance: Generator, absences: Sequence[Absence] = ()
) -> Timeline:
    """Return what an island does until ``end_s``; the same generator state gives the same."""
    walker = _Walker(island, end_s, chance, sorted(absences, key=lambda a: a.begin_s))
    if island.elastic:
        walker.elastic()
    else:
        walker.halting()
    return walker.timeline()


@dataclass(slots=True)
class _Walker:
    """The walk along the events of an island; ``hazard`` is how much more of it the island stands.

    Each pause is three numbers: when it begins, when it ends, and how many slices worked before it
    and what it is in one, so that a walk past a hundred thousand failures stays short.
    """

    island: Island
    end_s: float
    chance: Generator
    absences: Sequence[Absence]
    working: int = field(init=False)
    hazard: float = field(init=False)
    away: list[float] = field(default_factory=list[float])
    failures: int = 0
    at: list[float] = field(default_factory=list[float])
    code: list[int] = field(default_factory=list[int])
    until: list[float] = field(default_factory=list[float])
    undone_at: list[float] = field(default_factory=list[float])
    undone: list[float] = field(default_factory=list[float])
    _hazards: Iterator[float] = field(init=False)
    _recoveries: Iterator[float] = field(init=False)
    _absence: int = 0

    def __post_init__(self) -> None:
        self._hazards = _stream(lambda: exponentials(self.chance, BLOCK))
        self._recoveries = _stream(lambda: self.island.recovery.draw(self.chance, BLOCK))
        self.hazard = next(self._hazards)
        self.working = self.island.slices

    def timeline(self) -> Timeline:
        """Return what was walked: a stretch of running before each pause, and one at the end."""
        count, codes = len(self.at), np.array(self.code, dtype=np.int64)
        times, shares = np.zeros(2 * count + 1), np.zeros(2 * count + 1)
        uses = np.full(2 * count + 1, int(Use.MISSING), dtype=np.int64)
        times[1::2], times[2::2] = self.at, self.until
        shares[::2] = np.append(codes // USES, self.working) / self.island.slices
        uses[1::2] = codes % USES
        uses[::2][shares[::2] == 0] = Use.RECOVER
        return Timeline(
            times=np.minimum(times, self.end_s),
            shares=shares,
            uses=uses,
            undone_at=np.array(self.undone_at),
            undone=np.array(self.undone),
            failures=self.failures,
            end_s=self.end_s,
        )

    def elastic(self) -> None:
        """Go on with the slices that work; ``away`` says when each of the others works again.

        A slice that comes back while the island pauses waits for the pause to end.
        """
        island, away, end_s = self.island, self.away, self.end_s
        hazards, recoveries, push, pop = (
            self._hazards, self._recoveries, heapq.heappush, heapq.heappop
        )  # fmt: skip
        rate_s, pause_s, upscale_s = island.slice_rate_s, island.downscale_s, island.upscale_s
        batch_s = island.batch_s if island.upscale is Upscale.BATCH else 0.0
        all_back, calendar = island.upscale is Upscale.ALL_BACK, island.clock is Clock.CALENDAR
        at, code, until = self.at.append, self.code.append, self.until.append
        now, back_at, gate, limit = 0.0, math.inf, 0.0, self._limit(0.0)
        hazard, working, failures = self.hazard, self.working, 0
        while now < end_s:
            exposed = working * rate_s
            stop = now + hazard / exposed if exposed else math.inf
            if stop < back_at and stop < limit:
                at(stop)
                code(working * USES + DOWNSCALE)
                now = stop + pause_s
                until(now)
                hazard = next(hazards)
                working -= 1
                failures += 1
                push(away, stop + next(recoveries))
            elif back_at <= limit:
                stop = max(now, back_at)
                hazard -= (stop - now) * exposed
                at(stop)
                code(working * USES + UPSCALE)
                now = stop + upscale_s
                until(now)
                while away and away[0] <= stop:
                    pop(away)
                    working += 1
                gate = stop + batch_s
            elif limit < end_s:
                stop = max(now, limit)
                self.hazard, self.working = hazard - (stop - now) * exposed, working
                now = stop = self._leave(stop)
                hazard, limit = self.hazard, self._limit(now)
            else:
                break
            if calendar and stop < now:
                self.hazard, self.working = hazard, working
                now = self._struck(stop, now)
                hazard, working = self.hazard, self.working
            if away:
                back_at = max(away) if all_back else away[0]
                back_at = max(back_at, gate)
            else:
                back_at = math.inf
        self.failures, self.working = self.failures + failures, working

    def halting(self) -> None:
        """Run with all slices or not at all, and write checkpoints on the way."""
        island, end_s = self.island, self.end_s
        exposed = island.slices * island.slice_rate_s
        every_s = math.inf if island.checkpoint_every_s is None else island.checkpoint_every_s
        now, since = 0.0, 0.0
        while now < end_s:
            limit = self._limit(now)
            fail_at = now + self.hazard / exposed if exposed else math.inf
            stop = min(fail_at, now + every_s - since, limit)
            since += stop - now
            if stop == fail_at:
                now, since = self._fall(stop, since), 0.0
                continue
            self.hazard -= (stop - now) * exposed
            if stop < limit:
                now, since = self._write(stop, since), 0.0
            elif stop < end_s:
                restart = self.absences[self._absence].restart
                now = self._leave(stop)
                since = self._undo(stop, since) if restart else since
            else:
                break

    def _fall(self, at: float, since: float) -> float:
        """Halt for a failure; return when the island runs again."""
        self._undo(at, since)
        self.failures += 1
        self.hazard = next(self._hazards)
        return self._restart(self._await(at, at + next(self._recoveries)))

    def _write(self, at: float, since: float) -> float:
        """Write a checkpoint, or fail on the way; return when the island runs again."""
        island = self.island
        exposed = island.slices * island.slice_rate_s
        if self.hazard > island.checkpoint_s * exposed:
            self.hazard -= island.checkpoint_s * exposed
            return self._pause(at, Use.CHECKPOINT, at + island.checkpoint_s)
        fail_at = self._pause(at, Use.CHECKPOINT, at + self.hazard / exposed)
        return self._fall(fail_at, since)

    def _await(self, at: float, until: float) -> float:
        """Stand still until then, or later where more fails; return when all works again."""
        now, exposed = at, self.island.slices * self.island.slice_rate_s
        if self.island.clock is Clock.CALENDAR:
            while now + self.hazard / exposed < until and now < self.end_s:
                now += self.hazard / exposed
                self.failures += 1
                self.hazard = next(self._hazards)
                until = max(until, now + next(self._recoveries))
            self.hazard -= (until - now) * exposed
        return self._pause(at, Use.RECOVER, until)

    def _restart(self, at: float) -> float:
        """Start again; by the calendar a failure meanwhile means to wait and start once more."""
        island = self.island
        exposed = island.slices * island.slice_rate_s
        while island.upscale_s:
            if island.clock is Clock.RUNNING:
                return self._start(at)
            if self.hazard > island.upscale_s * exposed or at > self.end_s:
                self.hazard -= island.upscale_s * exposed
                return self._start(at)
            fail_at = self._pause(at, Use.UPSCALE, at + self.hazard / exposed)
            self.failures += 1
            self.hazard = next(self._hazards)
            at = self._await(fail_at, fail_at + next(self._recoveries))
        return self._start(at)

    def _start(self, at: float) -> float:
        """Come back: the pause that it takes, and the work that is done again.

        An absence that begins meanwhile interrupts it; one that lost the state begins it anew.
        """
        left = self.island.upscale_s
        while (soon := self._limit(at)) < at + left and self._absence < len(self.absences):
            absence = self.absences[self._absence]
            self._absence += 1
            if absence.end_s <= at:
                continue
            if soon > at:
                self._pause(at, Use.UPSCALE, soon)
            left = self.island.upscale_s if absence.restart else left - (soon - at)
            at = self._pause(soon, absence.use, absence.end_s)
        until = self._pause(at, Use.UPSCALE, at + left)
        if self.island.replay_s:
            until = self._pause(until, Use.ROLLBACK, until + self.island.replay_s)
        return until

    def _struck(self, at: float, until: float) -> float:
        """Let slices fail during a pause, by the calendar; return when the island runs again.

        What failed during one pause is left out in one more pause after it.
        """
        island = self.island
        while at < self.end_s:
            failed = 0
            while self.working:
                exposed = self.working * island.slice_rate_s
                if not exposed or at + self.hazard / exposed >= until:
                    break
                at += self.hazard / exposed
                failed += 1
                self.failures += 1
                self.hazard = next(self._hazards)
                heapq.heappush(self.away, at + next(self._recoveries))
                self.working -= 1
            self.hazard -= (until - at) * self.working * island.slice_rate_s
            if not (failed and island.downscale_s):
                return until
            at = until
            until = self._pause(at, Use.DOWNSCALE, at + island.downscale_s)
        return until

    def _limit(self, now: float) -> float:
        """Return when the next absence begins, or the end."""
        if self._absence >= len(self.absences):
            return self.end_s
        return min(self.end_s, max(now, self.absences[self._absence].begin_s))

    def _leave(self, at: float) -> float:
        """Be away for the absence that begins now; return when the island runs again.

        Nothing fails meanwhile, by either clock: what does is mended before anybody waits for it.
        """
        absence = self.absences[self._absence]
        self._absence += 1
        if absence.end_s <= at:
            return at
        until = self._pause(at, absence.use, absence.end_s)
        return self._start(until) if absence.restart else until

    def _pause(self, at: float, use: Use, until: float) -> float:
        self.at.append(at)
        self.code.append(self.working * USES + use)
        self.until.append(until)
        return until

    def _undo(self, at: float, since: float) -> float:
        """Lose the work since the last checkpoint, where islands roll back; return what is left."""
        if self.island.rollback and since:
            self.undone_at.append(at)
            self.undone.append(since)
        return 0.0


def _stream(more: Callable[[], NDArray[np.float64]]) -> Iterator[float]:
    while True:
        yield from more().tolist()
