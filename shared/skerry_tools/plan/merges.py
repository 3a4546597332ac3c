"""Rounds over simulated learners: who takes part in a merge, why it closes, who waits how long.

When a round opens and when it closes is decided by the functions that the syncer itself calls,
``core.schedule`` and ``core.rounds``; this file only moves learners and time. Rounds are looked at
in samples, since a month has a million of them and they are all alike.

What is simplified: a learner that pauses is known at once not to be expected, an answer takes the
same time whenever it is sent, the averages that a round's grace is reckoned from are those of the
moment it opens and know who comes late as soon as it closes, and all fragments are of one shard.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm import schedule
from skerry.algorithm.schedule import FragmentState, Schedule
from skerry.protocol import rounds
from skerry.protocol.rounds import Decision, Policy, Timings, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from skerry_tools.plan.process import Timeline

EMA = 0.2
"""The factor of the syncer's own moving averages."""
WINDOWS = 40
"""Stretches of the run that are looked at."""
MOST_TRIES = 10_000


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a learner is: one training step, and its answer on the way to the syncer, in s."""

    step_s: float
    upload_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What rounds are like: schedule and policy of the run, and closing to readable in seconds."""

    schedule: Schedule
    policy: Policy
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Merge:
    """One closed round; times in seconds since the run began, ``by`` are learners by number."""

    fragment: int
    opened_s: float
    closed_s: float
    readable_s: float
    by: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Merges:
    """The rounds that were looked at; ``waited`` is the share of learners' time spent waiting."""

    seen: tuple[Merge, ...] = ()
    waited: float = 0.0

    @property
    def participants(self) -> float | None:
        """Mean contributions of a merge, None without any round."""
        return sum(len(m.by) for m in self.seen) / len(self.seen) if self.seen else None

    @property
    def reasons(self) -> dict[str, int]:
        """How many rounds closed for which reason."""
        return dict(sorted(Counter(m.reason for m in self.seen).items()))

    def shares(self, learners: int) -> list[float]:
        """Return the share of merges with n contributions, for n from 0 to all learners."""
        counts = Counter(len(m.by) for m in self.seen)
        return [counts[n] / len(self.seen) if self.seen else 0.0 for n in range(learners + 1)]


@dataclass(frozen=True, slots=True)
class Track:
    """When a learner runs: ``ran[i]`` is how long it has, in seconds, at ``times[i]``."""

    times: NDArray[np.float64]
    ran: NDArray[np.float64]
    running: NDArray[np.bool_]
    pace: Pace
    cut: tuple[tuple[float, float], ...] = ()
    """Stretches in which it runs but nothing reaches the syncer from it."""

    def at(self, now: float) -> bool:
        """Tell whether it runs."""
        return bool(self.running[self._index(now)])

    def ran_by(self, now: float) -> float:
        """Return how long it has run by then."""
        index = self._index(now)
        since = now - float(self.times[index])
        return float(self.ran[index]) + since * bool(self.running[index])

    def when(self, ran: float) -> float:
        """Return when it has run for so long; infinite if it never does."""
        if ran > float(self.ran[-1]):
            return math.inf
        index = max(int(np.searchsorted(self.ran, ran, side="left")) - 1, 0)
        return float(self.times[index]) + max(0.0, ran - float(self.ran[index]))

    def answers(self, opened: float) -> float:
        """Return when its answer to a round arrives: sent at the next boundary of its steps."""
        step_s, ran = self.pace.step_s, self.ran_by(opened)
        sent = self.when((math.floor(ran / step_s + 1e-9) + 1) * step_s)
        return _after(sent, self.cut) + self.pace.upload_s

    def changes(self, begin: float, end: float) -> list[float]:
        """Return when it stops or starts between two times."""
        low, high = np.searchsorted(self.times, [begin, end], side="right")
        return [float(at) for at in self.times[low:high]]

    def _index(self, now: float) -> int:
        return max(int(np.searchsorted(self.times, now, side="right")) - 1, 0)


def track(
    timeline: Timeline, pace: Pace, cut: Sequence[tuple[float, float]] = (), phase: float = 0.0
) -> Track:
    """Return when a learner runs; ``phase`` is how far into a step it begins, as a share."""
    runs = (timeline.shares > 0) & (timeline.lengths > 0)
    keep = np.concatenate([[True], runs[1:] != runs[:-1]])
    times, running = timeline.times[keep], runs[keep]
    lengths = np.diff(times, append=timeline.end_s)
    ran = np.concatenate([[0.0], np.cumsum(lengths * running)]) + phase * pace.step_s
    times = np.append(times, timeline.end_s)
    return Track(times, ran, np.append(running, False), pace, tuple(cut))


def observe(
    plan: Plan, tracks: Sequence[Track], end_s: float, count: int,
    stalled: Sequence[tuple[float, float]] = (),
) -> Merges:  # fmt: skip
    """Simulate about ``count`` rounds in stretches spread over the run.

    ``stalled`` are stretches in which neither syncer nor broker works: nothing opens or closes.
    """
    if count <= 0 or not tracks:
        return Merges()
    each_s = plan.schedule.h_steps / plan.schedule.fragments * min(t.pace.step_s for t in tracks)
    windows = 1 if end_s / each_s <= count else min(WINDOWS, count)
    seen: list[Merge] = []
    waited = given = 0.0
    for index in range(windows):
        begin_s, until_s = end_s * index / windows, end_s * (index + 1) / windows
        look = _Look(plan, tracks, tuple(stalled), end_s, until_s)
        lost_s, had_s = look.follow(begin_s, -(-count // windows))
        seen += look.seen
        waited += lost_s
        given += had_s
    return Merges(tuple(seen), waited / given if given > 0 else 0.0)


def stretch(
    plan: Plan, tracks: Sequence[Track], begin_s: float, until_s: float, most: int,
    stalled: Sequence[tuple[float, float]] = (),
) -> tuple[Merge, ...]:  # fmt: skip
    """Return the rounds that open within a stretch of the run, at most so many."""
    look = _Look(plan, tracks, tuple(stalled), until_s, until_s)
    look.follow(begin_s, most)
    return tuple(look.seen)


@dataclass(slots=True)
class _Look:
    """One stretch of rounds: what it has measured, and what it has seen.

    No round is opened at ``until_s`` or later, and none is followed beyond ``end_s``.
    """

    plan: Plan
    tracks: Sequence[Track]
    stalled: tuple[tuple[float, float], ...]
    end_s: float
    until_s: float
    step_s: float = field(init=False)
    timings: Timings = field(init=False)
    seen: list[Merge] = field(default_factory=list[Merge])

    def __post_init__(self) -> None:
        self.step_s = float(median(one.pace.step_s for one in self.tracks))
        self.timings = Timings(step_s=self.step_s, sync_s=self.plan.commit_s)

    def follow(self, begin: float, count: int) -> tuple[float, float]:
        """Look at so many rounds; return learners' seconds spent waiting, and of running in all."""
        if self.plan.schedule.blocking:
            return _blocking(self, begin, count)
        _flowing(self, begin, count)
        return 0.0, 0.0

    def close(self, fragment: int, opened: float, arrivals: dict[int, float]) -> Merge:
        """Let the core say when a round closes whose answers arrive at these times."""
        policy, tracks, end = self.plan.policy, self.tracks, self.end_s
        now, since, short = opened, opened, None
        names = {index: str(index) for index in range(len(tracks))}
        horizon = min(end, opened + 50.0 * policy.round_timeout_s)
        events = sorted(
            {t for t in arrivals.values() if t < horizon}
            | {
                t
                for one in tracks
                for t in one.changes(opened, opened + 3 * policy.round_timeout_s)
            }
        )
        for _ in range(MOST_TRIES):
            arrived = {names[i]: at for i, at in arrivals.items() if at <= now}
            alive = frozenset(names[i] for i, one in enumerate(tracks) if one.at(now))
            short = rounds.short_since_s(now, short, len(alive), policy)
            view = View(since, arrived, alive | frozenset(arrived), short)
            decision, reason = rounds.decide(now, view, policy, self.timings)
            if decision is Decision.CLOSE or now >= end:
                closed = _after(now, self.stalled)
                by = tuple(sorted(int(name) for name in arrived))
                self._measure(view, since, closed - now, arrivals.values())
                return Merge(fragment, opened, closed, closed + self.plan.commit_s, by, reason)
            if decision is Decision.REOPEN:
                since = now
            wake = now + rounds.next_wake_s(now, view, policy, self.timings)
            later = next((t for t in events if t > now), math.inf)
            now = max(min(wake, later, end), math.nextafter(now, math.inf))
        return Merge(fragment, opened, now, now, (), "undecided")

    def _measure(
        self, view: View, opened: float, stalled: float, arrivals: Iterable[float]
    ) -> None:
        """Fold one round in; ``arrivals`` are of all who answer it, in time or late."""
        policy, came = self.plan.policy, (at for at in arrivals if at < math.inf)
        self.timings = rounds.measured_arrivals(self.timings, EMA, came, policy)
        reached = rounds.quorum_at_s(view, policy.quorum)
        self.timings = rounds.measured(
            self.timings,
            EMA,
            quorum_s=None if reached is None else max(0.0, reached - opened),
            sync_s=self.plan.commit_s + stalled,
        )


@dataclass(slots=True)
class _Steps:
    """Where learners are on the global clock: one that was away comes back at the run's step."""

    tracks: Sequence[Track]
    now: float
    clock: int
    places: list[float] = field(init=False)
    ran: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.places = [float(self.clock)] * len(self.tracks)
        self.ran = [one.ran_by(self.now) for one in self.tracks]

    def by(self, now: float) -> list[float]:
        """Move on to ``now``; return the steps of those who run."""
        for index, one in enumerate(self.tracks):
            ran = one.ran_by(now)
            stepped = ran - self.ran[index]
            self.places[index] += stepped / one.pace.step_s
            if stepped < now - self.now - 1e-9:
                self.places[index] = max(self.places[index], float(self.clock))
            self.ran[index] = ran
        self.now = now
        return [at for at, one in zip(self.places, self.tracks, strict=True) if one.at(now)]


def _flowing(look: _Look, begin: float, count: int) -> None:
    """Let rounds follow the schedule while learners go on; nobody waits."""
    plan, tracks, step_s = look.plan, look.tracks, look.step_s
    timetable, end = plan.schedule, look.until_s
    walking = _Steps(tracks, begin, timetable.h_steps)
    states = [
        FragmentState(f, 1, schedule.latest_due_step(timetable, f, walking.clock), in_flight=False)
        for f in range(timetable.fragments)
    ]
    most, last = schedule.max_in_flight(timetable), None
    now = _after(begin, look.stalled)
    landing: list[tuple[float, int]] = []
    for _ in range(MOST_TRIES * count):
        if len(look.seen) >= count or now >= end:
            break
        while landing and landing[0][0] <= now:
            _, fragment = heapq.heappop(landing)
            states[fragment] = replace(states[fragment], in_flight=False)
        steps = walking.by(now)
        clock = walking.clock = max(walking.clock, schedule.global_clock(steps, plan.policy.quorum))
        asked = (timetable, clock, now, last, step_s, states, most)
        launch, _ = schedule.next_round(*asked)
        if launch is not None and steps:
            arrivals = {i: one.answers(now) for i, one in enumerate(tracks)}
            merge = look.close(launch.fragment, now, arrivals)
            look.seen.append(merge)
            states[launch.fragment] = FragmentState(
                launch.fragment, launch.version, launch.due_step, in_flight=True
            )
            heapq.heappush(landing, (merge.readable_s, launch.fragment))
            last = now
            continue
        wait = schedule.next_launch_s(*asked) if steps else None
        soon = [landing[0][0]] if landing else []
        soon += [] if wait is None else [now + max(wait, 1e-3 * step_s)]
        soon += [] if steps else [t for one in tracks for t in one.changes(now, end)[:1]]
        now = _after(min(soon, default=end), look.stalled)


def _blocking(look: _Look, begin: float, count: int) -> tuple[float, float]:
    """Let learners stop at each due step until its round is over.

    Return how long they did, and how long they ran with that, in seconds of all learners.
    """
    plan, tracks, timetable = look.plan, look.tracks, look.plan.schedule
    held = [0.0] * len(tracks)
    ready, step, given = [begin] * len(tracks), 0, 0.0
    for number in range(count):
        gap = min(schedule.due_step(timetable, f, step) for f in range(timetable.fragments)) - step
        reach = [
            one.when(one.ran_by(at) + gap * one.pace.step_s)
            for one, at in zip(tracks, ready, strict=True)
        ]
        quick = sorted(reach)[min(plan.policy.quorum, len(reach)) - 1]
        if not math.isfinite(quick) or quick >= look.until_s:
            break
        opened = _after(quick, look.stalled)
        arrivals = {
            i: _after(max(at, opened), tracks[i].cut) + tracks[i].pace.upload_s
            for i, at in enumerate(reach)
        }
        merge = look.close(number % timetable.fragments, opened, arrivals)
        look.seen.append(merge)
        for index, at in enumerate(reach):
            resumed = max(at, merge.readable_s) if math.isfinite(at) else merge.readable_s
            held[index] += tracks[index].ran_by(resumed) - tracks[index].ran_by(min(at, resumed))
            given += tracks[index].ran_by(resumed) - tracks[index].ran_by(ready[index])
            ready[index] = resumed
        step += gap
    return math.fsum(held), given


def _after(at: float, stretches: Sequence[tuple[float, float]]) -> float:
    """Return the time, or the end of the stretch that it lies in."""
    for begin, end in stretches:
        if begin <= at < end:
            at = end
    return at
