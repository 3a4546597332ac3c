"""The learners as the syncer sees them: through their pulses only."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from skerry.algorithm import liveness, schedule
from skerry.protocol.messages import LearnerPhase, activity

if TYPE_CHECKING:
    from skerry.protocol.messages import Pulse

WORKING = frozenset({LearnerPhase.TRAINING, LearnerPhase.FINISHED})
ON_THE_WAY = frozenset({LearnerPhase.STARTING, LearnerPhase.CATCHING_UP})


@dataclass(frozen=True, slots=True)
class Seen:
    """A learner's newest pulse and the rhythm of those before it."""

    pulse: Pulse
    heartbeat: liveness.Heartbeat
    progress: liveness.StepProgress

    def alive(self, now_s: float, policy: liveness.LivenessPolicy) -> bool:
        """Tell whether this learner is anything but gone."""
        judged, _ = liveness.judge(
            self.heartbeat,
            now_s,
            policy,
            activity=activity(self.pulse.phase),
            progress=self.progress,
        )
        return judged is not liveness.Liveness.GONE


@dataclass(slots=True)
class Fleet:
    """Every learner that has pulsed, newest incarnation only.

    One that went silent at work is waited for as long as ``patience_s`` before the run may end.
    """

    policy: liveness.LivenessPolicy
    patience_s: float = 0.0
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])

    def observe(self, pulse: Pulse, now_s: float) -> None:
        """Take a pulse; one of an older incarnation is ignored."""
        held = self.seen.get(pulse.learner)
        if held is not None and held.pulse.incarnation > pulse.incarnation:
            return
        step, step_s = pulse.step, pulse.step_time_s
        if held is None or held.pulse.incarnation != pulse.incarnation:
            heartbeat = liveness.first_heartbeat(now_s, self.policy)
            progress = liveness.StepProgress(step, now_s, step_s)
        else:
            heartbeat = liveness.observe(held.heartbeat, now_s)
            progress = liveness.advance(held.progress, step, now_s, step_s)
        self.seen[pulse.learner] = Seen(pulse, heartbeat, progress)

    def working(self, now_s: float) -> dict[str, Seen]:
        """Return the learners that could contribute now: working, and not gone."""
        return {
            name: seen
            for name, seen in self.seen.items()
            if seen.pulse.phase in WORKING and seen.alive(now_s, self.policy)
        }

    def clock(self, now_s: float, quorum: int) -> int:
        """Estimate the global clock: the step of the K-th fastest working learner by now."""
        steps = [_step_now(seen, now_s) for seen in self.working(now_s).values()]
        return schedule.global_clock(steps, quorum)

    def told_clock(self, now_s: float, quorum: int) -> int:
        """Return the global clock by what learners have said: what may be put on record."""
        steps = [seen.pulse.step for seen in self.working(now_s).values()]
        return schedule.global_clock(steps, quorum)

    def step_time_s(self, now_s: float) -> float:
        """Return the median step time of working learners; 0 when none has measured one."""
        times = [s.pulse.step_time_s for s in self.working(now_s).values()]
        measured = [t for t in times if t > 0]
        return float(median(measured)) if measured else 0.0

    def finished(self, now_s: float) -> bool:
        """Tell whether training is over: somebody finished and nobody still trains.

        Silence is no end: after a broker's restart, or behind a link that was cut, whoever has
        finished may be heard a moment before whoever has not.
        """
        phases = [s.pulse.phase for s in self.working(now_s).values()]
        coming = any(
            s.alive(now_s, self.policy) or now_s - s.heartbeat.last_s < self.patience_s
            for s in self.seen.values()
            if s.pulse.phase in ON_THE_WAY | {LearnerPhase.TRAINING}
        )
        return bool(phases) and set(phases) == {LearnerPhase.FINISHED} and not coming


def _step_now(seen: Seen, now_s: float) -> int:
    """Estimate where a learner is now; at most one pulse interval is extrapolated."""
    pulse, heartbeat = seen.pulse, seen.heartbeat
    if pulse.phase is not LearnerPhase.TRAINING or pulse.step_time_s <= 0:
        return pulse.step
    return schedule.extrapolated_step(
        pulse.step,
        now_s - heartbeat.last_s,
        pulse.step_time_s,
        int(heartbeat.mean_s / pulse.step_time_s),
    )
