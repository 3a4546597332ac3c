"""When which fragment is synchronised.

Fragment p is due each H steps of the global clock, at an offset of its own, so that the fragments
take turns and the link is used evenly. Sources: Streaming DiLoCo (arXiv 2501.18512), sections on
streaming partial updates (offsets) and on overlapping communication (tau); Decoupled DiLoCo
(arXiv 2604.21428), on the syncer (global clock by the K-th fastest learner). The launch floor is
ours: on a fast link rounds would otherwise follow each other far more often than H steps apart.

Where tau = 0 (*blocking*) a learner stops at a due step until its round is over, and says so. Then
no clock needs to be estimated and no floor to be kept: the stop itself puts H steps between two
rounds, and any other wait would be added to every round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Schedule:
    """P fragments, each due once per H steps, each round meant to last tau steps.

    ``own`` of them are launched by this syncer, the rest by others; None: all are.
    """

    fragments: int
    h_steps: int
    overlap_steps: int
    own: int | None = None

    @property
    def launched(self) -> int:
        """Fragments that this syncer launches."""
        return self.fragments if self.own is None else self.own

    @property
    def blocking(self) -> bool:
        """True if learners stop at each due step until the round is over."""
        return self.overlap_steps == 0


@dataclass(frozen=True, slots=True)
class FragmentDue:
    """Where a fragment stands; ``last_due_step`` is that of its newest round, 0 at genesis."""

    fragment: int
    version: int
    last_due_step: int
    in_flight: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """A round to open: towards ``version`` of ``fragment``, due at ``due_step``."""

    fragment: int
    version: int
    due_step: int


class LaunchReason(StrEnum):
    """Why a round is opened now, or none is."""

    DUE = "due"
    IN_FLIGHT = "in_flight"
    """No further round may be open."""
    NOT_DUE = "not_due"
    LAUNCH_FLOOR = "launch_floor"
    """The newest launch was too short a time ago."""


def offset(schedule: Schedule, fragment: int) -> int:
    """Return the first step of a period at which the fragment is due: ``p * H // P``."""
    return fragment * schedule.h_steps // schedule.fragments


def due_step(schedule: Schedule, fragment: int, after_step: int) -> int:
    """Return the first step strictly after ``after_step`` at which the fragment is due."""
    start = offset(schedule, fragment)
    periods = (after_step - start) // schedule.h_steps + 1
    return start + max(0, periods) * schedule.h_steps


def latest_due_step(schedule: Schedule, fragment: int, clock: int) -> int:
    """Return the last step <= ``clock`` at which the fragment was due; below 0 if it never was."""
    start = offset(schedule, fragment)
    return start + (clock - start) // schedule.h_steps * schedule.h_steps


def global_clock(steps: Iterable[float], quorum: int) -> int:
    """Return the step of the K-th fastest learner; of the slowest if there are fewer, 0 if none.

    Decoupled DiLoCo (arXiv 2604.21428), on the syncer: a round can only be answered by a quorum
    that has got there, so the K-th fastest learner, not the fastest, sets the clock.
    """
    fastest = sorted(steps, reverse=True)
    return math.floor(fastest[min(max(quorum, 1), len(fastest)) - 1]) if fastest else 0


def extrapolated_step(step: int, age_s: float, step_time_s: float, limit: int) -> int:
    """Estimate where a learner is now from a report ``age_s`` seconds old, in whole steps.

    At most ``limit`` steps are added, so that a learner that died does not carry the clock on, and
    none if its step time is not known yet.
    """
    if step_time_s <= 0 or age_s <= 0:
        return step
    return step + int(min(age_s / step_time_s, float(max(limit, 0))))


def launch_floor_s(schedule: Schedule, step_time_s: float) -> float:
    """Return the least time between two launches in seconds: ``H * step_time / P``.

    P is the number of fragments launched here, so that the floors of all syncers together allow one
    launch per ``H * step_time / P``. Blocking learners keep the distance themselves, and their step
    time includes the wait for the round before: a floor made from it could only grow.
    """
    if schedule.blocking:
        return 0.0
    return schedule.h_steps * step_time_s / schedule.launched


def max_in_flight(schedule: Schedule) -> int:
    """Return how many rounds may be open at once.

    A round is meant to live for tau steps and P / H rounds start per step, so ``tau * P / H``
    overlap; the fragments due at one and the same step come on top: one, or P / H where P exceeds
    H. P is the number of fragments that are launched here.
    """
    per_step = schedule.launched / schedule.h_steps
    room = math.ceil(schedule.overlap_steps * per_step) + math.ceil(per_step)
    return min(room, schedule.launched)


def room_steps(schedule: Schedule) -> float:
    """Return how many steps a round may last without delaying later ones.

    One is launched each H / P steps, and ``max_in_flight`` may be open.
    """
    return max_in_flight(schedule) * schedule.h_steps / schedule.launched


def learner_room(schedule: Schedule, shards: int) -> int:
    """Return how many fragments a learner may have in flight in each direction.

    At least two, and as many as all shards together keep open; all of them in a blocking mode.
    """
    if schedule.blocking:
        return schedule.fragments
    least, more = divmod(schedule.fragments, shards)
    owns = ((least + 1, more), (least, shards - more))  # fragments a shard owns, and such shards
    opened = (max_in_flight(replace(schedule, own=own)) * count for own, count in owns if own)
    return max(2, sum(opened))


class LaunchState(NamedTuple):
    """Everything that decides which round is opened next, and when."""

    schedule: Schedule
    clock: int
    now_s: float
    last_launch_s: float | None
    step_time_s: float
    states: Sequence[FragmentDue]
    max_in_flight: int

    def next_round(self) -> tuple[Launch | None, LaunchReason]:
        """Return the round to open now, if any, and why.

        The most overdue fragment goes first, the lowest number among equals. A fragment that missed
        several periods gets one round, at its latest due step, not one per period.
        """
        if sum(state.in_flight for state in self.states) >= self.max_in_flight:
            return None, LaunchReason.IN_FLIGHT
        missed = (
            (due_step(self.schedule, s.fragment, s.last_due_step), s.fragment, s.version)
            for s in self.states
            if not s.in_flight
        )
        since, fragment, version = min(missed, default=(math.inf, 0, 0))
        if since > self.clock:
            return None, LaunchReason.NOT_DUE
        if self._floor_left_s() > 0:
            return None, LaunchReason.LAUNCH_FLOOR
        due = latest_due_step(self.schedule, fragment, self.clock)
        return Launch(fragment, version + 1, due), LaunchReason.DUE

    def next_launch_s(self) -> float | None:
        """Return the seconds after which ``next_round`` may launch without any event; 0: now.

        None if it waits for an event: a round that closes, a first measurement of the step time, or
        a blocking learner that has come to its due step.
        """
        idle = [state for state in self.states if not state.in_flight]
        if len(self.states) - len(idle) >= self.max_in_flight or not idle:
            return None
        due = min(due_step(self.schedule, s.fragment, s.last_due_step) for s in idle)
        if due <= self.clock:
            return self._floor_left_s()
        if self.schedule.blocking or self.step_time_s <= 0:
            return None
        return max(self._floor_left_s(), (due - self.clock) * self.step_time_s)

    def _floor_left_s(self) -> float:
        if self.last_launch_s is None:
            return 0.0
        floor_s = launch_floor_s(self.schedule, self.step_time_s)
        return max(0.0, self.last_launch_s + floor_s - self.now_s)
