"""The trainer's side of a learner: the work between steps, in any training loop.

Waiting is a generator of pauses, so the driver decides what time is: a thread in real time, or a
virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import structlog

from skerry.client.joining import LearnerPlace
from skerry.client.meter import Meter
from skerry.client.session import Session
from skerry.client.telemetry import StepTimes, trace_step
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import LearnerPhase
from skerry.settings.models import RunConfig, TrainConfig
from skerry.telemetry import instruments, metrics

log = structlog.get_logger()

DIVERGED_IN_A_ROW = 5
REPORT_S = 10.0


def progress(config: TrainConfig, step: int, elapsed_s: float, tokens: int) -> float:
    """Return how much of the run is done, in [0, 1]: the furthest by steps, time or tokens."""
    by_time = elapsed_s / config.duration_s if config.duration_s else 0.0
    by_tokens = tokens / config.tokens if config.tokens else 0.0
    return min(1.0, max(0.0, step / config.steps, by_time, by_tokens))


@dataclass(slots=True)
class Island:
    """One learner's training without the steps: its progress, and what each boundary does.

    ``now`` is the progress of training, ``diverged`` the number of newest steps skipped in a row.
    A pause is in seconds, and ends early when the mailbox changes.
    """

    place: LearnerPlace
    config: RunConfig
    session: Session
    meter: Meter
    now: TrainingProgress = field(init=False)
    diverged: int = field(init=False, default=0)
    _logged_s: float = field(init=False, default=-math.inf)

    def __post_init__(self) -> None:
        self.now = self.place.start

    @property
    def stopping(self) -> bool:
        """Return True once this learner has been asked to end."""
        return self.session.mailbox.stopping

    def report(self) -> None:
        """Report a pulse now; also called by the network's side once training has ended."""
        self.session.report(self.meter.pulse(self.place.learner, self.now))

    def enter(self, phase: LearnerPhase) -> None:
        """Begin another phase, and report it."""
        self.meter.enter(phase)
        log.info("phase", phase=phase.value, step=self.now.step, cursor=self.now.cursor)
        self.report()

    def progress(self) -> float:
        """Return how much of the run is done, in [0, 1]."""
        began_s = self.session.mailbox.began_s
        elapsed_s = self.meter.clock() - began_s if began_s is not None else 0.0
        step = max(self.now.step, self.session.clock())
        return progress(self.config.train, step, elapsed_s, self.session.merged_tokens)

    def done(self) -> bool:
        """Return True once there is no step left to take."""
        return self.progress() >= 1.0 or self.session.ended()

    def offer(self) -> Iterator[float]:
        """Offer the initial parameters that this learner must offer, once they are known."""
        mailbox = self.session.mailbox
        while self.place.missing and mailbox.to_offer is None and not self.stopping:
            yield self.idle()
        while mailbox.to_offer and not self.stopping:
            if self.session.offer_genesis(mailbox.to_offer[0], self.now):
                mailbox.to_offer.popleft()
            else:
                yield self.idle()

    def catch_up(self) -> Iterator[float]:
        """Adopt a version of every fragment."""
        self.enter(LearnerPhase.CATCHING_UP)
        while not self.stopping:
            yield from self.offer()  # the learner that was to offer them may be gone
            self.session.boundary(self.now, self.meter.loss)
            if self.session.caught_up and self.session.mailbox.began_s is not None:
                break
            yield self.idle()

    def read(self, loss: float, *, finite: bool) -> None:
        """Note the outcome of a step: the newest, or an earlier one while that still runs.

        After a skipped step the reported loss is not a number until a finite one follows.
        """
        if finite:
            self.meter.loss = loss
            self.diverged = 0
            return
        self.diverged += 1
        self.meter.loss = math.nan
        self.now = replace(self.now, skipped=self.now.skipped + 1)
        instruments.record(metrics.STEPS_SKIPPED, 1, self.place.learner.labels)
        log.warning("step_skipped", reason="loss or gradient not finite", in_a_row=self.diverged)
        if self.diverged >= DIVERGED_IN_A_ROW:
            log.warning("global_state_readopted", step=self.now.step)
            self.session.reset(self.now)
            self.diverged = 0

    def boundary(self) -> Iterator[float]:
        """Answer and adopt; pause only while a blocking mode holds this learner."""
        self.session.boundary(self.now, self.meter.loss)
        if self.is_held():
            self.report()  # rounds open by what learners report: all wait for what is missing
        elif not self.done():  # else the next report is that training is over
            self.tick()
        while self.is_held():
            began_s = self.meter.clock()
            yield self.config.liveness.pulse_s
            self.session.boundary(self.now, self.meter.loss, idle=True)
            self.meter.wait_s += self.meter.clock() - began_s
            self.tick()

    def stepped(self, lasted: StepTimes) -> None:
        """Note how long a step took."""
        whole_s = lasted.data_s + lasted.train_s + lasted.boundary_s
        self.meter.stepped(whole_s)
        trace_step(self.place.learner, self.now.step, lasted)
        if self.meter.steps > 1:  # the first one only hands work to the device
            instruments.record(metrics.STEP_DURATION, whole_s, self.place.learner.labels)
        else:  # a rate sees the first skipped step only if something was there before
            instruments.record(metrics.STEPS_SKIPPED, 0, self.place.learner.labels)

    def outlast(self) -> Iterator[float]:
        """Answer without steps until this learner is asked to end."""
        if not self.stopping:
            self.enter(LearnerPhase.FINISHED)
        while not self.stopping:
            self.session.boundary(self.now, self.meter.loss, idle=True)
            yield self.idle()

    def is_held(self) -> bool:
        """Return True if a blocking mode holds this learner at this boundary."""
        return self.session.must_wait(self.now) and not (self.stopping or self.done())

    def idle(self) -> float:
        """Report what is due, and wait for news until the next report."""
        self.tick()
        return self.config.liveness.pulse_s

    def tick(self) -> None:
        """Send a pulse and log a line, each if it is due."""
        if self.meter.due(self.config.liveness.pulse_s):
            self.report()
        if self.meter.clock() - self._logged_s >= REPORT_S:
            self._logged_s = self.meter.clock()
            log.info(
                "training",
                step=self.now.step,
                loss=round(self.meter.loss, 4) if math.isfinite(self.meter.loss) else None,
                step_ms=round(self.meter.step_time_s * 1e3, 1),
                versions=list(self.session.versions),
            )
