"""Rounds over simulated learners: which take part in a merge, why it closes, how long they wait.

When a round closes, and how soon the next one may open, is decided by the functions that the syncer
calls; this file only moves learners and time. Rounds are simulated in samples, since a month has a
million alike. Simplified: a learner that pauses is known at once not to be expected, an answer
always takes the same time, a round's grace uses the averages of the moment it opens, and all
fragments are of one shard.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import median
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import schedule
from skerry.protocol import rounds
from skerry_tools.plan.failures import LearnerTimeline

Stretch: TypeAlias = tuple[float, float]
"""Begin and end, in seconds since the run began."""
EMA = 0.2
"""The factor of the syncer's own moving averages."""
WINDOWS = 40
"""Samples of the run."""
GOLDEN = (math.sqrt(5) - 1) / 2
MOST_TRIES = 10_000


@dataclass(frozen=True, slots=True)
class RoundRules:
    """Schedule and policy of the run; ``commit_s``: from closing to readable.

    While syncer or broker are ``stalled``, nothing opens or closes.
    """

    schedule: schedule.Schedule
    policy: rounds.RoundPolicy
    commit_s: float = 0.0
    stalled: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledRound:
    """One closed round; times in seconds since the run began, ``by`` are learners by number."""

    opened_s: float
    closed_s: float
    readable_s: float
    by: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class SampledRounds:
    """The rounds of all samples; ``waited`` is the share of learners' time spent waiting."""

    rounds: tuple[SampledRound, ...] = ()
    waited: float = 0.0

    @property
    def participants(self) -> float | None:
        """Mean contributions of a merge, None without any round."""
        return sum(len(one.by) for one in self.rounds) / len(self.rounds) if self.rounds else None

    @property
    def reasons(self) -> dict[str, int]:
        """How many rounds closed for which reason."""
        return dict(sorted(Counter(one.reason for one in self.rounds).items()))


class Track:
    """When a learner runs, and where its steps end; nothing of it arrives while it is ``cut`` off.

    ``phase`` is how far into a step it begins, as a share.
    """

    def __init__(
        self,
        timeline: LearnerTimeline,
        step_s: float,
        upload_s: float = 0.0,
        cut: Sequence[Stretch] = (),
        phase: float = 0.0,
    ) -> None:
        self.step_s, self.upload_s, self.cut = step_s, upload_s, cut
        runs = (timeline.shares > 0) & (timeline.lengths > 0)
        keep = np.concatenate([[True], runs[1:] != runs[:-1]])
        self._times: NDArray[np.float64] = np.append(timeline.times[keep], timeline.end_s)
        self._running: NDArray[np.bool_] = np.append(runs[keep], False)
        ran = np.cumsum(np.diff(self._times) * runs[keep])
        self._ran: NDArray[np.float64] = np.append(0.0, ran) + phase * step_s

    def at(self, now: float) -> bool:
        """Return True if it runs."""
        return bool(self._running[self._index(now)])

    def ran_by(self, now: float) -> float:
        """Return how long it has run by then."""
        index = self._index(now)
        since = now - float(self._times[index])
        return float(self._ran[index]) + since * bool(self._running[index])

    def when(self, ran: float) -> float:
        """Return when it has run for so long; infinite if it never does."""
        if ran > float(self._ran[-1]):
            return math.inf
        index = max(int(np.searchsorted(self._ran, ran, side="left")) - 1, 0)
        return float(self._times[index]) + max(0.0, ran - float(self._ran[index]))

    def answers(self, opened: float) -> float:
        """Return when its answer to a round arrives: sent at the next boundary of its steps."""
        steps = math.floor(self.ran_by(opened) / self.step_s + 1e-9) + 1
        return after(self.when(steps * self.step_s), self.cut) + self.upload_s

    def changes(self, begin: float, end: float) -> list[float]:
        """Return when it stops or starts between two times."""
        low, high = np.searchsorted(self._times, [begin, end], side="right")
        return [float(at) for at in self._times[low:high]]

    def _index(self, now: float) -> int:
        return max(int(np.searchsorted(self._times, now, side="right")) - 1, 0)


def sample(rules: RoundRules, tracks: Sequence[Track], end_s: float, count: int) -> SampledRounds:
    """Simulate about ``count`` rounds in samples spread over the run."""
    each_s = rules.schedule.h_steps / rules.schedule.fragments * min(t.step_s for t in tracks)
    windows = 1 if end_s / each_s <= count else min(WINDOWS, count)
    each_s, samples = end_s / windows, [RoundSample(rules, tracks, end_s) for _ in range(windows)]
    for index, one in enumerate(samples):
        one.follow((index * each_s, (index + 1) * each_s), -(-count // windows), index * GOLDEN % 1)
    given = math.fsum(one.given_s for one in samples)
    waited = math.fsum(one.held_s for one in samples) / given if given else 0.0
    return SampledRounds(tuple(merged for one in samples for merged in one.rounds), waited)


def after(at: float, stretches: Sequence[Stretch]) -> float:
    """Return the time, or the end of the stretch that it lies in."""
    for begin, end in stretches:
        if begin <= at < end:
            at = end
    return at


@dataclass(slots=True)
class RoundSample:
    """Consecutive rounds, none of them followed beyond ``end_s``.

    ``held_s`` is how long learners waited for rounds, of ``given_s`` that they ran with that.
    """

    rules: RoundRules
    tracks: Sequence[Track]
    end_s: float
    timings: rounds.Timings = field(init=False)
    rounds: list[SampledRound] = field(default_factory=list[SampledRound])
    held_s: float = 0.0
    given_s: float = 0.0

    def __post_init__(self) -> None:
        step_s = float(median(one.step_s for one in self.tracks))
        self.timings = rounds.Timings(step_s=step_s, sync_s=self.rules.commit_s)

    def follow(self, within: Stretch, count: int, phase: float = 0.0) -> None:
        """Simulate so many rounds, none of which opens at the end of the stretch or later.

        Where learners go on, the first one opens after this share of a step.
        """
        if self.rules.schedule.blocking:
            self._blocking(*within, count)
        else:
            self._flowing(within[0] + phase * self.tracks[0].step_s, within[1], count)

    def _flowing(self, begin: float, until: float, count: int) -> None:
        """Open rounds as often as the schedule lets them while learners go on."""
        rules, tracks, now = self.rules, self.tracks, begin
        paces = sorted(one.step_s for one in tracks)
        clock_s = paces[min(rules.policy.quorum, len(paces)) - 1]  # the K-th fastest learner's
        gap_s = schedule.launch_floor_s(rules.schedule, max(clock_s, self.timings.step_s or 0.0))
        in_flight: list[float] = []
        for _ in range(count):
            if len(in_flight) == schedule.max_in_flight(rules.schedule):
                now = max(now, heappop(in_flight))
            now = after(now, rules.stalled)
            if not any(one.at(now) for one in tracks):
                back = [t for one in tracks for t in one.changes(now, until)[:1]]
                now = after(min(back, default=until), rules.stalled)
            if now >= until:
                break
            self._close(now, {str(i): one.answers(now) for i, one in enumerate(tracks)})
            heappush(in_flight, self.rounds[-1].readable_s)
            now += gap_s

    def _blocking(self, begin: float, until: float, count: int) -> None:
        """Let learners stop at each due step until its round is over."""
        rules, tracks, step = self.rules, self.tracks, 0
        ready = [begin] * len(tracks)
        for _ in range(count):
            fragments = range(rules.schedule.fragments)
            due = min(schedule.due_step(rules.schedule, f, step) for f in fragments)
            reach = [
                one.when(one.ran_by(at) + (due - step) * one.step_s)
                for one, at in zip(tracks, ready, strict=True)
            ]
            opened = sorted(reach)[min(rules.policy.quorum, len(reach)) - 1]
            if opened >= until:
                break
            opened, step = after(opened, rules.stalled), due
            sent = [after(max(at, opened), t.cut) for at, t in zip(reach, tracks, strict=True)]
            self._close(opened, {str(i): at + tracks[i].upload_s for i, at in enumerate(sent)})
            readable = self.rounds[-1].readable_s
            for index, (one, at) in enumerate(zip(tracks, reach, strict=True)):
                done = max(at, readable) if math.isfinite(at) else readable
                self.held_s += one.ran_by(done) - one.ran_by(min(at, done))
                self.given_s += one.ran_by(done) - one.ran_by(ready[index])
                ready[index] = done

    def _close(self, opened: float, arrivals: dict[str, float]) -> None:
        """Let the syncer's policy close a round whose answers arrive at these times."""
        policy, end, short = self.rules.policy, self.end_s, None
        horizon = opened + 3 * policy.round_timeout_s
        events = {t for one in self.tracks for t in one.changes(opened, horizon)}
        events |= {t for t in arrivals.values() if t < end}
        now, since, reason = opened, opened, "undecided"
        view = rounds.RoundView(since, {}, frozenset())
        for _ in range(MOST_TRIES):
            arrived = {name: at for name, at in arrivals.items() if at <= now}
            alive = frozenset(str(i) for i, one in enumerate(self.tracks) if one.at(now))
            short = rounds.short_since_s(now, short, len(alive), policy)
            view = rounds.RoundView(since, arrived, alive | frozenset(arrived), short)
            decision, why = rounds.decide(now, view, policy, self.timings)
            reason = str(why)
            if decision is rounds.Decision.CLOSE or now >= end:
                break
            if decision is rounds.Decision.REOPEN:
                since = now
            wake = now + rounds.next_wake_s(now, view, policy, self.timings)
            later = min((t for t in events if t > now), default=math.inf)
            now = max(min(wake, later, end), math.nextafter(now, math.inf))
        closed = after(now, self.rules.stalled)
        sync_s, reached = (
            self.rules.commit_s + closed - now,
            rounds.quorum_at_s(view, policy.quorum),
        )
        came = (at for at in arrivals.values() if at < math.inf)  # in time or late
        timings = rounds.measured_arrivals(self.timings, EMA, came, policy)
        quorum_s = None if reached is None else max(0.0, reached - since)
        self.timings = rounds.measured(timings, EMA, quorum_s=quorum_s, sync_s=sync_s)
        by, readable = tuple(sorted(map(int, view.arrived))), closed + self.rules.commit_s
        self.rounds.append(SampledRound(opened, closed, readable, by, reason))
