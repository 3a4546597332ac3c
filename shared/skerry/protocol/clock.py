"""The learners as a syncer sees them through their pulses, and the global clock.

Source: Decoupled DiLoCo (arXiv 2604.21428), on the syncer: the clock is that of the K-th fastest
learner. A pulse is a claim, so the clock follows it only as far as merged contributions and elapsed
time bear it out: ``ClockLimit``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from skerry.algorithm import liveness, schedule
from skerry.protocol.messages import Commit, LearnerPhase, Pulse, Quarantine, activity

WORKING = frozenset({LearnerPhase.TRAINING, LearnerPhase.FINISHED})
ON_THE_WAY = frozenset({LearnerPhase.STARTING, LearnerPhase.CATCHING_UP})
MOST_PULSING = 4096
"""Learners whose pulses are followed; a name beyond is one that somebody makes up."""
FASTEST = 8.0
"""While nothing is merged, the clock may run this many times as fast as the median learner."""
END_TIMEOUTS = 10.0
"""How many timeouts after the run's last step the end waits for learners that say they train."""


@dataclass(frozen=True, slots=True)
class SeenLearner:
    """A learner's newest pulse and the rhythm of those before it."""

    pulse: Pulse
    heartbeat: liveness.Heartbeat
    progress: liveness.StepProgress

    def step_now(self, now_s: float) -> int:
        """Estimate where a learner is now; at most one pulse interval is extrapolated."""
        pulse, beat = self.pulse, self.heartbeat
        if pulse.phase is not LearnerPhase.TRAINING or pulse.step_time_s <= 0:
            return pulse.step
        limit, age_s = int(beat.mean_s / pulse.step_time_s), now_s - beat.last_s
        return schedule.extrapolated_step(pulse.step, age_s, pulse.step_time_s, limit)

    def alive(self, now_s: float, policy: liveness.LivenessPolicy) -> bool:
        """Return True if this learner is anything but gone."""
        judged, _ = liveness.judge(
            self.heartbeat,
            now_s,
            policy,
            activity=activity(self.pulse.phase),
            progress=self.progress,
        )
        return judged is not liveness.Liveness.GONE


class ClockLimit(NamedTuple):
    """The limit of the global clock: how far the log bears out what learners say.

    ``step`` is the clock of the newest commit, made at ``since_s``; ``slack_steps`` is how far
    beyond it learners may be at once. ``merged`` are the learners that a commit has merged: where
    they make a quorum, the others' clocks do not count. While one of them works the clock goes on
    with time, at the median step time of all of them, even of those that are away.
    """

    step: int
    since_s: float
    slack_steps: int
    merged: frozenset[str] = frozenset()

    def most(self, now_s: float, step_time_s: float) -> int:
        """Return the highest clock that can be true now; ``step_time_s``: median of ``merged``."""
        by_time = FASTEST * max(0.0, now_s - self.since_s) / step_time_s if step_time_s > 0 else 0.0
        return self.step + self.slack_steps + int(by_time)


@dataclass(slots=True)
class LearnerTable:
    """Every learner that has pulsed, newest incarnation only.

    A learner that went silent at work is waited for as long as ``patience_s`` before the run may
    end. One in ``quarantined`` is not waited for, and its pulses do not move the clock.
    """

    policy: liveness.LivenessPolicy
    patience_s: float = 0.0
    seen: dict[str, SeenLearner] = field(default_factory=dict[str, SeenLearner])
    quarantined: set[str] = field(default_factory=set[str])
    _judged: dict[str, tuple[SeenLearner, float, bool]] = field(
        default_factory=dict[str, tuple[SeenLearner, float, bool]]
    )
    """Each learner as last judged: what was seen, when, and if it lived. A decision asks often."""

    def pulse_of(self, learner: str) -> Pulse | None:
        """Return a learner's newest pulse."""
        held = self.seen.get(learner)
        return held.pulse if held else None

    def counted(self) -> dict[str, SeenLearner]:
        return {name: seen for name, seen in self.seen.items() if name not in self.quarantined}

    def set_quarantine(self, record: Quarantine) -> bool:
        """Put a learner into quarantine or release it; return False if that changes nothing."""
        if record.released != (record.learner in self.quarantined):
            return False
        self.quarantined ^= {record.learner}
        return True

    def observe(self, pulse: Pulse, now_s: float) -> None:
        """Take a pulse; one of an older incarnation is ignored."""
        held = self.seen.get(pulse.learner)
        if held is not None and held.pulse.incarnation > pulse.incarnation:
            return
        if held is None and len(self.seen) >= MOST_PULSING:
            return
        step, step_s = pulse.step, pulse.step_time_s
        if held is None or held.pulse.incarnation != pulse.incarnation:
            heartbeat = liveness.first_heartbeat(now_s, self.policy)
            progress = liveness.StepProgress(step, now_s, step_s)
        else:
            heartbeat = liveness.observe(held.heartbeat, now_s)
            progress = liveness.advance(held.progress, step, now_s, step_s)
        self.seen[pulse.learner] = SeenLearner(pulse, heartbeat, progress)

    def working(self, now_s: float) -> dict[str, SeenLearner]:
        """Return the learners that could contribute now: working, and not gone."""
        return {
            name: seen
            for name, seen in self.counted().items()
            if seen.pulse.phase in WORKING and self._alive(name, seen, now_s)
        }

    def _alive(self, name: str, seen: SeenLearner, now_s: float) -> bool:
        known = self._judged.get(name)
        if known is None or known[0] is not seen or known[1] != now_s:
            known = self._judged[name] = seen, now_s, seen.alive(now_s, self.policy)
        return known[2]

    def clock(self, now_s: float, quorum: int, limit: ClockLimit, *, estimated: bool) -> int:
        """Return the global clock: the step of the K-th fastest working learner, within the limit.

        With ``estimated`` it is where that learner should be by now; without, the step that it has
        reported, which alone may be put on record.
        """
        working = self.working(now_s)
        counted = [seen for name, seen in working.items() if name in limit.merged]
        steps = [
            seen.step_now(now_s) if estimated else seen.pulse.step
            for seen in (counted if len(counted) >= quorum else working.values())
        ]
        return min(schedule.global_clock(steps, quorum), self.most(now_s, limit))

    def most(self, now_s: float, limit: ClockLimit) -> int:
        """Return the highest clock that can be true now, whatever learners say."""
        merged = [seen for name, seen in self.counted().items() if name in limit.merged]
        works = not limit.merged.isdisjoint(self.working(now_s))
        return limit.most(now_s, _step_time_s(merged) if works else 0.0)

    def step_time_s(self, now_s: float) -> float:
        """Return the median step time of working learners; 0 when none has measured one."""
        return _step_time_s(self.working(now_s).values())

    def finished(self, now_s: float, over_since_s: float | None = None) -> bool:
        """Return True if training is over: a learner has finished and none still trains.

        Silence is no end: after a broker's restart, or on a link that was cut, learners that have
        finished may be heard a moment before those that have not. Once the clock has been at the
        run's last step for long (``over_since_s``), a learner that still says it trains is not
        waited for any more.
        """
        working = self.working(now_s).values()
        if not any(s.pulse.phase is LearnerPhase.FINISHED for s in working):
            return False
        if over_since_s is not None and now_s - over_since_s > END_TIMEOUTS * self.patience_s:
            return True
        return not any(
            self._alive(name, s, now_s) or now_s - s.heartbeat.last_s < self.patience_s
            for name, s in self.counted().items()
            if s.pulse.phase in ON_THE_WAY | {LearnerPhase.TRAINING}
        )


def _step_time_s(learners: Iterable[SeenLearner]) -> float:
    measured = [seen.pulse.step_time_s for seen in learners if seen.pulse.step_time_s > 0]
    return float(median(measured)) if measured else 0.0


@dataclass(slots=True)
class GlobalClock:
    """The global clock of a shard: what learners say, as far as its commits bear that out.

    Where learners stop for rounds (``blocking``) and say so, nothing is estimated: a round that was
    opened early would be answered early, and learners that then come to its due step would wait
    for another one.
    """

    learners: LearnerTable
    quorum: int
    blocking: bool
    limit: ClockLimit

    def now(self, now_s: float) -> int:
        """Return the clock that rounds are opened by, a little ahead of ``on_record``."""
        clock = self.learners.clock(now_s, self.quorum, self.limit, estimated=not self.blocking)
        return max(clock, self.limit.step)

    def on_record(self, now_s: float) -> int:
        """Return the clock by the steps that learners have reported, for a round or a commit."""
        clock = self.learners.clock(now_s, self.quorum, self.limit, estimated=False)
        return max(clock, self.limit.step)

    def most(self, now_s: float) -> int:
        """Return the highest clock that can be true now, whatever learners say."""
        return max(self.learners.most(now_s, self.limit), self.limit.step)

    def at_close(self, launched_step: int, now_s: float) -> int:
        """Return the clock to put on record; where learners stop for a round, not below its step.

        A learner that joined meanwhile has reported a lower step. With that on record, learners
        that stopped would wait for this round for ever.
        """
        return max(launched_step if self.blocking else 0, self.on_record(now_s))

    def committed(self, commit: Commit, now_s: float) -> None:
        """Note a commit that has just come into the log."""
        moved = commit.step > self.limit.step
        self.limit = self.limit._replace(
            step=max(commit.step, self.limit.step),
            since_s=now_s if moved else self.limit.since_s,
            merged=self.limit.merged | {row.learner for row in commit.progress},
        )
