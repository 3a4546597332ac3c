"""Where the time goes: steps, tokens, seconds inside training steps; the material of pulses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skerry.wire.messages import LearnerPhase, Pulse
from skerry_learner.sync.mailbox import Traffic
from skerry_learner.sync.rules import Progress
from skerry_learner.sync.session import Learner, Session

STEP_TIME_SHARE = 0.1


@dataclass(slots=True)
class Meter:
    """Measures one incarnation; ``started_s`` is when its process began, by ``clock``.

    ``step_time_s`` is an exponential moving average over whole steps, boundary included; busy time
    leaves boundaries and compilation out.
    """

    started_s: float
    clock: Callable[[], float] = time.monotonic
    busy_s: float = 0.0
    steps: int = 0
    step_time_s: float = 0.0
    loss: float = math.nan
    pulsed_s: float = field(default=-math.inf)

    def stepped(self, busy_s: float, whole_s: float) -> None:
        """Count one step: ``busy_s`` of ``whole_s`` seconds were training.

        The outcome of a step is read during the next one, so the first only says how long it takes
        to hand work to the device: it tells nothing of the step time.
        """
        self.busy_s += busy_s
        self.steps += 1
        if self.steps == 1:
            return
        share = STEP_TIME_SHARE if self.step_time_s else 1.0
        self.step_time_s += share * (whole_s - self.step_time_s)

    def due(self, every_s: float) -> bool:
        """Tell whether a pulse is due, and count it as sent if so."""
        now = self.clock()
        if now - self.pulsed_s < every_s:
            return False
        self.pulsed_s = now
        return True

    def pulse(
        self,
        learner: Learner,
        phase: LearnerPhase,
        now: Progress,
        session: Session,
        traffic: Traffic,
        sent_ns: int,
    ) -> Pulse:
        """Return the pulse of this instant."""
        return Pulse(
            run=learner.run,
            learner=learner.name,
            incarnation=learner.incarnation,
            phase=phase,
            sent_ns=sent_ns,
            step=now.step,
            steps=now.steps,
            tokens=now.tokens,
            cursor=now.cursor,
            loss=self.loss,
            step_time_s=self.step_time_s,
            busy_s=self.busy_s,
            alive_s=self.clock() - self.started_s,
            bytes_up=traffic.bytes_up,
            bytes_down=traffic.bytes_down,
            contributions=traffic.contributions,
            versions=session.versions,
            max_staleness=session.staleness(),
            syncs_skipped=session.syncs_skipped,
        )
