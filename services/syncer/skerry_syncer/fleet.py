"""The learners as the syncer sees them: through their pulses only."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from skerry.core import liveness, schedule
from skerry.wire.messages import LearnerPhase

if TYPE_CHECKING:
    from skerry.wire.messages import Pulse

WORKING = frozenset({LearnerPhase.TRAINING, LearnerPhase.FINISHED})


@dataclass(frozen=True, slots=True)
class Seen:
    """A learner's newest pulse and the rhythm of those before it."""

    pulse: Pulse
    heartbeat: liveness.Heartbeat


@dataclass(slots=True)
class Fleet:
    """Every learner that has pulsed, newest incarnation only."""

    policy: liveness.Policy
    seen: dict[str, Seen] = field(default_factory=dict[str, Seen])

    def observe(self, pulse: Pulse, now_s: float) -> None:
        """Take a pulse; one of an older incarnation is ignored."""
        held = self.seen.get(pulse.learner)
        if held is not None and held.pulse.incarnation > pulse.incarnation:
            return
        same = held is not None and held.pulse.incarnation == pulse.incarnation
        heartbeat = (
            liveness.observe(held.heartbeat, now_s)
            if held is not None and same
            else liveness.first_heartbeat(now_s, self.policy)
        )
        self.seen[pulse.learner] = Seen(pulse, heartbeat)

    def working(self, now_s: float) -> dict[str, Seen]:
        """Return the learners that could contribute now: working, and not gone."""
        return {
            name: seen
            for name, seen in self.seen.items()
            if seen.pulse.phase in WORKING
            and liveness.judge(seen.heartbeat, now_s, self.policy)[0] is not liveness.Liveness.GONE
        }

    def clock(self, now_s: float, quorum: int) -> int:
        """Return the global clock: the step of the K-th fastest working learner."""
        steps = [
            schedule.extrapolated_step(
                seen.pulse.step,
                now_s - seen.heartbeat.last_s,
                seen.pulse.step_time_s,
                seen.heartbeat.mean_s,
            )
            if seen.pulse.phase is LearnerPhase.TRAINING
            else float(seen.pulse.step)
            for seen in self.working(now_s).values()
        ]
        return schedule.global_clock(steps, quorum)

    def step_time_s(self, now_s: float) -> float:
        """Return the median step time of working learners; 0 when none has measured one."""
        times = [s.pulse.step_time_s for s in self.working(now_s).values()]
        measured = [t for t in times if t > 0]
        return median(measured) if measured else 0.0

    def finished(self, now_s: float) -> bool:
        """Tell whether training is over: somebody finished and nobody still trains."""
        phases = [s.pulse.phase for s in self.working(now_s).values()]
        starting = [
            s
            for s in self.seen.values()
            if s.pulse.phase in {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}
            and liveness.judge(s.heartbeat, now_s, self.policy)[0] is not liveness.Liveness.GONE
        ]
        return (
            bool(phases) and all(p is LearnerPhase.FINISHED for p in phases) and not starting
        )
