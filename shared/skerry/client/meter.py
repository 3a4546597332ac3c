"""Counts a learner's steps, tokens and seconds per phase, for its pulses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skerry.client.telemetry import LearnerIdentity
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import LearnerPhase, Pulse

STEP_TIME_SHARE = 0.1


@dataclass(slots=True)
class Meter:
    """Measures one incarnation; ``started_s`` is when its process began, by ``clock``.

    ``step_time_s`` is an exponential moving average over whole steps, boundaries included; busy
    time excludes boundaries, compilation and replayed steps. ``wait_s`` is the time for which a
    blocking mode held this learner.
    """

    started_s: float
    clock: Callable[[], float] = time.monotonic
    phase: LearnerPhase = LearnerPhase.STARTING
    steps: int = 0
    busy_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    step_time_s: float = 0.0
    loss: float = math.nan
    _pulsed_s: float = -math.inf
    _spent_s: dict[LearnerPhase, float] = field(default_factory=dict[LearnerPhase, float])
    _entered_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._entered_s = self.started_s

    def enter(self, phase: LearnerPhase) -> None:
        """Begin another phase now."""
        self._spent_s[self.phase] = self.spent_s(self.phase)
        self.phase, self._entered_s = phase, self.clock()

    def spent_s(self, phase: LearnerPhase) -> float:
        """Return the seconds that this incarnation has been in a phase so far."""
        now_s = self.clock() - self._entered_s if phase is self.phase else 0.0
        return self._spent_s.get(phase, 0.0) + now_s

    def trained(self, busy_s: float, *, replayed: bool = False) -> None:
        """Count the training of one step, before any pulse can be sent after it.

        A ``replayed`` step is one that an earlier incarnation took, and whose result was lost.
        """
        if replayed:
            self.replay_s += busy_s
        else:
            self.busy_s += busy_s
        self.steps += 1

    def stepped(self, whole_s: float) -> None:
        """Note how long a whole step took, its boundary included.

        The outcome of a step is read during the next one, so the first only measures how long it
        takes to hand work to the device: it is left out.
        """
        if self.steps > 1:
            share = STEP_TIME_SHARE if self.step_time_s else 1.0
            self.step_time_s += share * (whole_s - self.step_time_s)

    def due(self, every_s: float) -> bool:
        """Return True if a pulse is due, and count it as sent then."""
        now_s = self.clock()
        due = now_s - self._pulsed_s >= every_s
        self._pulsed_s = now_s if due else self._pulsed_s
        return due

    def pulse(self, learner: LearnerIdentity, now: TrainingProgress) -> Pulse:
        """Return a pulse with the progress of training now; the sync session adds the rest."""
        return Pulse(
            run=learner.run,
            learner=learner.name,
            incarnation=learner.incarnation,
            phase=self.phase,
            sent_ns=0,
            step=now.step,
            steps=now.steps,
            tokens=now.tokens,
            cursor=now.cursor,
            loss=self.loss,
            step_time_s=self.step_time_s,
            busy_s=self.busy_s,
            alive_s=self.clock() - self.started_s,
            bytes_up=0,
            bytes_down=0,
            contributions=0,
            versions=(),
            compile_s=self.spent_s(LearnerPhase.STARTING),
            recover_s=self.spent_s(LearnerPhase.CATCHING_UP),
            wait_s=self.wait_s,
            replay_s=self.replay_s,
        )
