"""The rounds of a shard: when each opens, closes, is opened again, and when the run ends.

``RoundCoordinator.decide`` returns the one thing to do next. Its driver does that, reports it back
and asks again; if there is nothing to do, it waits for ``idle_s`` or until something arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from skerry.algorithm import schedule
from skerry.protocol import rounds
from skerry.protocol.clock import ClockLimit, GlobalClock
from skerry.protocol.commit import Closing
from skerry.protocol.contribution import Contribution
from skerry.protocol.messages import CloseReason, Manifest, Round
from skerry.protocol.shard import Shard

REPUBLISH_S = 2.0
"""Open rounds are published again after this time, since a broker's restart loses them."""
EMA_FACTOR = 0.2
MOST_LAST_ROUNDS = 8
"""Last rounds of a fragment that refusals alone ask for: a learner that goes on sending what is
refused does not keep a run from ending."""
OTHERS_PATIENCE = 3
"""Timeouts of a round for which another shard is waited for: one in which it gives up what is not
whole, one for its last round, and one in which both are heard of."""


class Publish(NamedTuple):
    """Publish an open round, for the first time or again."""

    round: Round


class CommitVersion(NamedTuple):
    """Merge what waits for a fragment and commit its next version; closed at ``closed_s``.

    Without a round: commit version 1 from the initial parameters that wait.
    """

    fragment: int
    closing: Closing
    round: Round | None = None
    closed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndRun:
    """This shard has nothing left to do: mark the run as finished if no other shard has either."""


Action: TypeAlias = Publish | CommitVersion | EndRun


class EndReason(StrEnum):
    """Why a run may be marked as finished, or not yet."""

    UNREAD = "unread"
    LATE = "late"
    LEFT = "left"
    """Another shard's contributions were given up."""
    RESOLVED = "resolved"


def may_end(
    waited_s: float, patience_s: float, *, unread: bool, late: bool
) -> tuple[bool, EndReason]:
    """Return whether a run may be marked as finished by now, and why.

    Args:
        waited_s: how long something has held up the end.
        patience_s: how long a shard waits for an answer to a round.
        unread: this shard has contributions that it has not read, or not to their end.
        late: another shard has contributions beyond those that its newest commit has resolved. Its
            owner collects them in a last round, and gives up what is not whole within
            ``patience_s``. It leaves answers without steps, so the end does not wait for ever.
    """
    if unread:
        return False, EndReason.UNREAD
    if late:
        given_up = waited_s >= OTHERS_PATIENCE * patience_s
        return given_up, EndReason.LEFT if given_up else EndReason.LATE
    return True, EndReason.RESOLVED


@dataclass(slots=True)
class OpenRound:
    """A round that is open; times in seconds on the caller's clock."""

    record: Round
    opened_s: float
    published_s: float


@dataclass(slots=True)
class RunEnd:
    """What is left to do before the run may be marked as finished.

    ``finals`` are the fragments whose newest commit came after training. ``last_rounds`` counts
    their last rounds. ``held_up_s`` is since when contributions hold up the end, ``looked_s`` when
    the log was last asked, ``over_since_s`` since when the clock is at the run's last step.
    """

    finals: set[int] = field(default_factory=set[int])
    last_rounds: Counter[int] = field(default_factory=Counter[int])
    held_up_s: float | None = None
    looked_s: float | None = None
    over_since_s: float | None = None

    def left(self, shard: Shard) -> list[int]:
        """Return the fragments for which a last round has something to merge or to refuse."""
        return [
            index
            for index, state in shard.fragments.items()
            if index not in self.finals
            or any(c.header.steps for c in state.pending.values())
            or (state.refused.contributions and self.last_rounds[index] < MOST_LAST_ROUNDS)
        ]

    def committed(self, fragment: int, *, final: bool) -> None:
        """Note that a round of a fragment is over."""
        (self.finals.add if final else self.finals.discard)(fragment)
        self.looked_s = self.held_up_s = None

    def wait(self, now_s: float, *, held_up: bool) -> float:
        """Return for how many seconds something has held up the end by now."""
        began_s = now_s if self.held_up_s is None else self.held_up_s
        self.held_up_s = began_s if held_up else None
        return now_s - began_s


class CoordinatorSettings(NamedTuple):
    """The settings of a run that its rounds depend on.

    The run ends after ``steps``; with ``may_be_sooner`` time or tokens may end it before.
    """

    timetable: schedule.Schedule
    policy: rounds.RoundPolicy
    steps: int
    may_be_sooner: bool = False

    @property
    def slack_steps(self) -> int:
        """How many steps learners may be beyond the newest commit at once."""
        return 2 * self.timetable.h_steps


@dataclass(slots=True)
class RoundCoordinator:
    """Decides what becomes of the rounds of one shard; holds no connection and no clock.

    ``new_round`` makes the record of a round from (fragment, version, step of the clock, ns).
    ``closed`` has by fragment the version that the newest closed round made, and when its K-th
    contribution was there. Times are in seconds on the caller's clock.
    """

    shard: Shard
    clock: GlobalClock
    settings: CoordinatorSettings
    new_round: Callable[[int, int, int, int], Round]
    end: RunEnd = field(default_factory=RunEnd)
    timings: rounds.Timings = field(default_factory=rounds.Timings)
    open: dict[int, OpenRound] = field(default_factory=dict[int, OpenRound])
    closed: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    launched_s: float | None = None
    short_since_s: float | None = None

    def decide(self, now_s: float, now_ns: int) -> Action | None:
        """Return what is to be done now, None for nothing; ``now_ns`` is the wall clock."""
        self._measure(now_s)
        for index, state in self.shard.fragments.items():
            if state.version == 0 and state.pending:
                trace_id = self.new_round(index, 1, 0, now_ns).trace_id
                return CommitVersion(index, Closing(None, 0, now_ns, now_ns, trace_id=trace_id))
        action = self._close_or_reopen(now_s, now_ns) or self._end(now_s, now_ns)
        if action is not None:
            return action
        launch, _ = self._launch_state(now_s).next_round()
        if launch is not None and not self.over(now_s):
            self.shard.fragments[launch.fragment].launched_step = launch.due_step
            return self._launch(launch.fragment, now_s, now_ns, final=False)
        for opened in self.open.values():
            if now_s - opened.published_s >= REPUBLISH_S:
                opened.published_s = now_s
                return Publish(opened.record)
        return None

    def idle_s(self, now_s: float) -> float:
        """Return for how many seconds nothing can happen unless something arrives."""
        waits = [REPUBLISH_S]
        launch_s = self._launch_state(now_s).next_launch_s()
        if launch_s is not None and not self.over(now_s):
            waits.append(launch_s)
        policy = self.settings.policy
        waits += [
            rounds.next_wake_s(now_s, self._view(index, now_s), policy, self.timings)
            for index in self.open
        ]
        return min(waits)

    def over(self, now_s: float) -> bool:
        """Return True if learners say that training is over, and it can be by now.

        A learner that says so has come to the last step, or has heard of one that had and may be
        gone.
        """
        sooner, steps = self.settings.may_be_sooner, self.settings.steps
        can_be = sooner or self.clock.most(now_s) >= steps
        return can_be and self.clock.learners.finished(now_s, self.end.over_since_s)

    def arrived(self, contribution: Contribution, now_s: float) -> None:
        """Learn from a contribution that missed its round how long the next ones should wait."""
        closed = self.closed.get(contribution.header.fragment)
        if closed is not None and closed[0] == contribution.header.round_version:
            late_s, policy = now_s - closed[1], self.settings.policy
            self.timings = rounds.measured_behind(self.timings, EMA_FACTOR, late_s, policy)

    def committed(self, action: CommitVersion, manifest: Manifest | None, now_s: float) -> None:
        """Note that an action is done and its version in the log; None: nothing was to merge."""
        if action.round is not None:
            self.open.pop(action.fragment, None)
            self.end.committed(action.fragment, final=action.closing.final)
            if manifest is None:
                self.closed.pop(action.fragment, None)
                return
            quorate = action.fragment in self.closed
            self.timings = rounds.measured(
                self.timings,
                EMA_FACTOR,
                step_s=self.clock.learners.step_time_s(action.closed_s) or None,
                quorum_s=action.closing.quorum_s if quorate else None,
                sync_s=now_s - action.closed_s,
            )
        if manifest is not None:
            self.clock.committed(manifest.commit, now_s)

    def _measure(self, now_s: float) -> None:
        """Note since when the clock is at the last step, and since when fewer than K learners work.

        Also the step time before any round closed.
        """
        if self.clock.limit.step >= self.settings.steps and self.end.over_since_s is None:
            self.end.over_since_s = now_s
        working = len(self.clock.learners.working(now_s))
        policy = self.settings.policy
        self.short_since_s = rounds.short_since_s(now_s, self.short_since_s, working, policy)
        if self.timings.step_s is None:
            step_s = self.clock.learners.step_time_s(now_s) or None
            self.timings = replace(self.timings, step_s=step_s)

    def _close_or_reopen(self, now_s: float, now_ns: int) -> CommitVersion | Publish | None:
        for index, opened in self.open.items():
            view = self._view(index, now_s)
            match rounds.decide(now_s, view, self.settings.policy, self.timings):
                case _, CloseReason() as reason:
                    return self._close(index, view, reason, (now_s, now_ns))
                case rounds.Decision.REOPEN, _:
                    final, attempt = opened.record.final or self.over(now_s), opened.record.attempt
                    return self._launch(index, now_s, now_ns, final=final, attempt=attempt + 1)
                case _:
                    pass
        return None

    def _close(
        self, index: int, view: rounds.RoundView, reason: CloseReason, now: tuple[float, int]
    ) -> CommitVersion:
        state, opened, (now_s, now_ns) = self.shard.fragments[index], self.open[index], now
        policy, began_s, began_ns = self.settings.policy, opened.opened_s, opened.record.opened_ns
        quorum_at = rounds.quorum_at_s(view, policy.quorum)
        quorum_s = max(0.0, (quorum_at or now_s) - began_s)
        closing = Closing(
            reason=reason,
            step=self.clock.at_close(state.launched_step, now_s),
            opened_ns=began_ns,
            closed_ns=now_ns,
            quorum_s=quorum_s,
            grace_s=max(0.0, now_s - began_s - quorum_s),
            final=opened.record.final,
            arrived_ns={
                name: began_ns + max(0, round((at_s - began_s) * 1e9))
                for name, at_s in view.arrived.items()
            },
            trace_id=opened.record.trace_id,
        )
        self.closed.pop(index, None)
        times = view.arrived.values()
        self.timings = rounds.measured_arrivals(self.timings, EMA_FACTOR, times, policy)
        if quorum_at is not None:  # what comes from here on is late
            self.closed[index] = (state.version + 1, quorum_at)
        return CommitVersion(index, closing, opened.record, now_s)

    def _end(self, now_s: float, now_ns: int) -> Publish | EndRun | None:
        """Collect what is left once training is over.

        An open round must close first: learners that have answered it have taken steps since, which
        only another round collects. It also takes room: if more were open than learners have room
        for, each might answer other ones, and all would wait for each other.
        """
        if not self.over(now_s):
            self.end.held_up_s = None
            return None
        left = self.end.left(self.shard)
        if not left:
            if self.end.looked_s is not None and now_s - self.end.looked_s < REPUBLISH_S:
                return None
            self.end.looked_s = now_s
            return EndRun()
        room = schedule.max_in_flight(self.settings.timetable) - len(self.open)
        waiting = [index for index in left if index not in self.open]
        if not waiting or room < 1:
            return None
        self.end.last_rounds[waiting[0]] += 1
        return self._launch(waiting[0], now_s, now_ns, final=True)

    def _launch(
        self, fragment: int, now_s: float, now_ns: int, *, final: bool, attempt: int = 0
    ) -> Publish:
        version = self.shard.fragments[fragment].version + 1
        record = replace(
            self.new_round(fragment, version, self.clock.on_record(now_s), now_ns),
            final=final,
            attempt=max(attempt, self.shard.again.pop(fragment, 0)),
        )
        self.open[fragment] = OpenRound(record, now_s, now_s)
        self.launched_s = now_s
        return Publish(record)

    def _view(self, index: int, now_s: float) -> rounds.RoundView:
        opened, arrived_s = self.open[index], self.shard.fragments[index].arrived_s
        return rounds.RoundView(
            opened_s=opened.opened_s,
            # The commit refuses what a learner sent before it came into quarantine.
            arrived={n: at_s for n, at_s in arrived_s.items() if n not in self.shard.quarantined},
            expected=frozenset(self.clock.learners.working(now_s)),
            short_since_s=self.short_since_s,
            final=opened.record.final,
        )

    def _launch_state(self, now_s: float) -> schedule.LaunchState:
        states = [
            schedule.FragmentDue(index, s.version, s.last_due_step, index in self.open)
            for index, s in self.shard.fragments.items()
            if s.version > 0
        ]
        return schedule.LaunchState(
            self.settings.timetable,
            self.clock.now(now_s),
            now_s,
            self.launched_s,
            self.clock.learners.step_time_s(now_s),
            states,
            schedule.max_in_flight(self.settings.timetable),
        )


def clock_limit(shard: Shard, settings: CoordinatorSettings, since_s: float) -> ClockLimit:
    """Return how far the clock may go by the shard's commits; the newest is of ``since_s``."""
    rows = (row for state in shard.fragments.values() for row in state.progress)
    step = max(state.step for state in shard.fragments.values())
    return ClockLimit(step, since_s, settings.slack_steps, frozenset(rows))
