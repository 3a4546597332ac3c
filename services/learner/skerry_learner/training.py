"""A learner's training loop: warm up, catch up, train, and answer until it is asked to end.

It is a generator of pauses, so that its driver decides what time is: a thread, in which steps take
as long as they take, or a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import structlog

from skerry.client.inner import RestoredState
from skerry.client.joining import LearnerPlace
from skerry.client.meter import Meter
from skerry.client.session import Session
from skerry.data.stream import Prefetched
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import InnerState, LearnerPhase
from skerry.settings.models import RunConfig, TrainConfig
from skerry.telemetry import instruments, metrics
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer

log = structlog.get_logger()

DIVERGED_IN_A_ROW = 5
REPORT_S = 10.0

Feed = Callable[[int], AbstractContextManager[Iterator[Prefetched]]]
"""Opens the data at a cursor, as ``data.prefetch.Prefetch`` does ahead and in a thread."""


class SavesInnerState(Protocol):
    """Saves the inner optimizer's state, as ``inner_state.InnerStateSaver`` does on a disk."""

    def due(self) -> bool: ...
    def save(self, moments: Any, now: TrainingProgress) -> None: ...


Pause: TypeAlias = float | None
"""Where a trainer may be held up: until the mailbox changes, but so many seconds at most.

None: a step has been handed to the device, and lasts as long as a step lasts here.
"""


def progress(config: TrainConfig, step: int, elapsed_s: float) -> float:
    """Return how much of the run is done, in [0, 1]: by steps or by time, whichever is further."""
    by_time = elapsed_s / config.duration_s if config.duration_s else 0.0
    return min(1.0, max(0.0, step / config.steps, by_time))


def rewarm_share(config: TrainConfig, steps: int) -> float:
    """Return the factor on the learning rate after a cold start: fresh moments say little."""
    return min(1.0, (steps + 1) / max(1, config.rewarm_steps))


@dataclass(slots=True)
class TrainingLoop:
    """Everything that training owns; ``life`` is the body of its thread.

    ``restored`` is how its inner optimizer begins, ``saver`` saves it; without them it begins as it
    was made and is not saved. ``now`` is where training is, ``diverged`` counts the newest steps
    that were skipped in a row.
    """

    place: LearnerPlace
    config: RunConfig
    trainer: Trainer
    session: Session
    meter: Meter
    feed: Feed
    restored: Future[RestoredState] | None = None
    saver: SavesInnerState | None = None
    now: TrainingProgress = field(init=False)
    diverged: int = 0
    _rewarms: bool = False
    _logged_s: float = -math.inf

    def __post_init__(self) -> None:
        self.now = self.place.start

    def life(self) -> Generator[Pause]:
        """Live until the mailbox says stop; the caller waits at each pause.

        A step loop that never waits lies in between.
        """
        yield from self._prepare()
        if not (self.stopping or self._done()):
            yield from self._train()
        if not self.stopping:
            self.enter(LearnerPhase.FINISHED)
        while not self.stopping:
            self.session.boundary(self.now, self.meter.loss, idle=True)
            yield self._idle()

    def report(self) -> None:
        """Report a pulse now; also called by the network's side once this thread has ended."""
        self.session.report(self.meter.pulse(self.place.learner, self.now))

    def enter(self, phase: LearnerPhase) -> None:
        """Begin another phase, and report it."""
        self.meter.enter(phase)
        log.info("phase", phase=phase.value, step=self.now.step, cursor=self.now.cursor)
        self.report()

    @property
    def stopping(self) -> bool:
        """Return True once this learner has been asked to end."""
        return self.session.mailbox.stopping

    def _prepare(self) -> Iterator[Pause]:
        """Offer what the log lacks, compile, and adopt what it has.

        The saved inner state was read while everything compiled.
        """
        for fragment in self.place.missing:
            while not (self.stopping or self.session.offer_genesis(fragment, self.now)):
                yield self._idle()
        began_s = self.meter.clock()
        self.trainer.warm(self._tick)
        log.info("compiled", seconds=round(self.meter.clock() - began_s, 2))
        self.enter(LearnerPhase.CATCHING_UP)
        while not self.stopping:
            self.session.boundary(self.now, self.meter.loss)
            if self.session.caught_up and self.session.mailbox.began_s is not None:
                break
            yield self._idle()
        while self.restored is not None and not self.stopping:
            if self.restored.done():
                restored, self.restored = self.restored.result(), None
                self._rewarms = restored.inner is InnerState.COLD
                if restored.inner is InnerState.WARM:
                    self.trainer.restore_moments(restored.tensors)
            else:
                yield self._idle()

    def _train(self) -> Iterator[Pause]:
        with self.feed(self.now.cursor) as batches:
            self.enter(LearnerPhase.TRAINING)
            before: StepResult | None = None
            while not (self.stopping or self._done()):
                before = yield from self._step(batches, before)
        if before is not None:
            self._read(before)

    def _step(
        self, batches: Iterator[Prefetched], before: StepResult | None
    ) -> Generator[Pause, None, StepResult | None]:
        """Take one step; return its outcome, unless it was read already.

        The outcome read meanwhile is that of the step before. In a blocking mode this one's is read
        as well where a round is due: the wait for it is training, and no wait for others. So it is
        behind a step that was skipped, until one is not: no contribution then claims what is not
        known yet, and the device has nothing better to do.
        """
        data, began_s = self.config.data, self.meter.clock()
        replayed = self.now.cursor < self.place.seen
        tokens, cursor = next(batches)
        share = rewarm_share(self.config.train, self.now.steps) if self._rewarms else 1.0
        after = self.trainer.step({"tokens": tokens}, self._progress(), share)
        if before is not None:
            self._read(before)
        yield None
        self.now = replace(
            self.now,
            step=self.now.step + 1,
            steps=self.now.steps + 1,
            tokens=self.now.tokens + data.batch * data.seq_len,
            cursor=cursor,
            routed=self.trainer.routed,
        )
        known = self.diverged > 0 or self.session.must_wait(self.now)
        if known:
            self._read(after)
        self.meter.trained(self.meter.clock() - began_s, replayed=replayed)
        yield from self._boundary()
        if self.saver is not None and self.saver.due():
            self.saver.save(self.trainer.state.optimizer, self.now)
        whole_s = self.meter.clock() - began_s
        self.meter.stepped(whole_s)
        if self.meter.steps > 1:  # the first one's time is not its own
            instruments.record(metrics.STEP_DURATION, whole_s, self.place.learner.labels)
        else:  # a rate sees the first skipped step only if something was there before
            instruments.record(metrics.STEPS_SKIPPED, 0, self.place.learner.labels)
        return None if known else after

    def _boundary(self) -> Iterator[Pause]:
        self.session.boundary(self.now, self.meter.loss)
        if self._is_held():
            self.report()  # rounds open by what learners report: all wait for what is missing
        elif not self._done():  # else the next report is that training is over
            self._tick()
        while self._is_held():
            began_s = self.meter.clock()
            yield self.config.liveness.pulse_s
            self.session.boundary(self.now, self.meter.loss, idle=True)
            self.meter.wait_s += self.meter.clock() - began_s
            self._tick()

    def _is_held(self) -> bool:
        """Return True if a blocking mode holds this learner up here."""
        return self.session.must_wait(self.now) and not (self.stopping or self._done())

    def _read(self, result: StepResult) -> None:
        """Read the outcome of the newest step, or of the one before it, which still runs.

        A skipped one is reported until a finite one follows: the loss is not a number meanwhile.
        """
        if bool(result.finite):
            self.meter.loss = float(result.loss)
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

    def _progress(self) -> float:
        began_s = self.session.mailbox.began_s
        elapsed_s = self.meter.clock() - began_s if began_s is not None else 0.0
        return progress(self.config.train, max(self.now.step, self.session.clock()), elapsed_s)

    def _done(self) -> bool:
        return self._progress() >= 1.0 or self.session.ended()

    def _idle(self) -> float:
        """Report what is due, and wait for news until the next report."""
        self._tick()
        return self.config.liveness.pulse_s

    def _tick(self) -> None:
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
