"""A learner's training loop: warm up, catch up, train, and answer until it is asked to end.

It is a generator of pauses, so that its driver decides what time is: a thread, in which steps take
as long as they take, or a virtual clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from skerry.data.prefetch import Prefetch, Prefetched
from skerry.data.stream import Stream
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import InnerState, LearnerPhase
from skerry.settings.models import RunConfig
from skerry.telemetry import instruments, metrics
from skerry_learner.inner import restore
from skerry_learner.inner.restore import RestoredState
from skerry_learner.sync.identity import LearnerIdentity, Traffic
from skerry_learner.sync.mailbox import Mailbox
from skerry_learner.sync.meter import Meter
from skerry_learner.sync.session import Session
from skerry_learner.trainer.schedule import progress
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer

log = structlog.get_logger()

DIVERGED_IN_A_ROW = 5
REPORT_S = 10.0
UNSENT_GENESIS = 2


class SavesInnerState(Protocol):
    """Saves the inner optimizer's state, as ``inner.saver.InnerStateSaver`` does on a disk."""

    def due(self) -> bool: ...
    def save(self, moments: Any, now: TrainingProgress) -> None: ...


class Feeds(Protocol):
    """Reads batches, as ``data.prefetch.Prefetch`` does ahead and in a thread."""

    def __call__(
        self, stream: Stream, *, cursor: int, batch: int, vocab: int | None
    ) -> AbstractContextManager[Iterator[Prefetched]]: ...


@dataclass(frozen=True, slots=True)
class Pause:
    """Where a trainer may be held up: until the mailbox changes, but ``wait_s`` seconds at most.

    None: a step has been handed to the device, and lasts as long as a step lasts here.
    """

    wait_s: float | None


STEP = Pause(None)


@dataclass(slots=True)
class TrainingLoop:
    """Everything that training owns; ``run`` is the body of its thread.

    ``missing`` are the fragments that the log had no version of when this learner joined,
    ``restored`` is how its inner optimizer begins, ``saver`` saves it; without them it begins as
    it was made and is not saved. Below the cursor ``seen`` an earlier incarnation has trained
    already, on what was lost with it. ``settled`` is called once, before the first step.
    """

    learner: LearnerIdentity
    config: RunConfig
    trainer: Trainer
    session: Session
    mailbox: Mailbox
    traffic: Traffic
    meter: Meter
    stream: Stream
    vocab: int | None
    missing: tuple[int, ...]
    now: TrainingProgress
    phase: LearnerPhase = LearnerPhase.STARTING
    diverged: int = 0
    reported_s: float = 0.0
    wall_ns: Callable[[], int] = time.time_ns
    restored: Future[RestoredState] | None = None
    saver: SavesInnerState | None = None
    feed: Feeds = Prefetch
    rewarming: bool = False
    seen: int = 0
    settled: Callable[[], None] | None = None

    def run(self) -> None:
        """Live until the mailbox says stop; a step loop that never waits lies in between."""
        for pause in self.life():
            if pause.wait_s is not None:
                self.mailbox.wait(pause.wait_s)

    def life(self) -> Generator[Pause]:
        """Do what ``run`` does, but leave the waiting to the caller."""
        yield from self._offer_genesis()
        began = self.meter.clock()
        self.trainer.warm(self._tick)
        log.info("compiled", seconds=round(self.meter.clock() - began, 2))
        yield from self._catch_up()
        yield from self._restore()
        yield from self._train()
        yield from self._linger()

    def pulse(self) -> None:
        """Post a pulse now; also called by the network's side once this thread has ended."""
        pulse = self.meter.pulse(
            self.learner, self.phase, self.now, self.session, self.traffic, self.wall_ns()
        )
        self.mailbox.post_pulse(pulse)

    def _offer_genesis(self) -> Iterator[Pause]:
        for fragment in self.missing:
            while self.mailbox.unsent() >= UNSENT_GENESIS and not self.mailbox.stopping():
                self._tick()
                yield self._idle
            if self.mailbox.stopping():
                return
            self.session.offer_genesis(fragment, self.now)

    def _catch_up(self) -> Iterator[Pause]:
        self._enter(LearnerPhase.CATCHING_UP)
        while not self.mailbox.stopping():
            self.session.boundary(self.now, self.meter.loss)
            if self.session.caught_up and self.mailbox.began_s is not None:
                return
            self._tick()
            yield self._idle

    def _restore(self) -> Iterator[Pause]:
        """Go on with the saved inner state, which was read while everything compiled."""
        while self.restored is not None and not self.mailbox.stopping():
            if self.restored.done():
                restored = self.restored.result()
                self.rewarming = restored.inner is InnerState.COLD
                if restored.inner is InnerState.WARM:
                    self.trainer.restore_moments(restored.tensors)
                self.restored = None
            else:
                self._tick()
                yield self._idle

    def _train(self) -> Iterator[Pause]:
        if self.mailbox.stopping() or self._done():
            return
        if self.settled is not None:
            self.settled()
        self._enter(LearnerPhase.TRAINING)
        batch = self.config.data.batch
        before: StepResult | None = None
        with self.feed(self.stream, cursor=self.now.cursor, batch=batch, vocab=self.vocab) as feed:
            while not self.mailbox.stopping() and not self._done():
                before = yield from self._step(feed, before)
        if before is not None:
            self._read(before)

    def _step(
        self, feed: Iterator[Prefetched], before: StepResult | None
    ) -> Generator[Pause, None, StepResult | None]:
        """Take one step; return its outcome, unless it was read already.

        The outcome read meanwhile is that of the step before. In a blocking mode this one's is read
        as well where a round is due: the wait for it is training, and no wait for others. So it is
        behind a step that was skipped, until one is not: no contribution then claims what is not
        known yet, and the device has nothing better to do.
        """
        began, replayed = self.meter.clock(), self.now.cursor < self.seen
        tokens, cursor = next(feed)
        after = self.trainer.step(tokens, self._progress(), self._share())
        if before is not None:
            self._read(before)
        yield STEP
        data = self.config.data
        self.now = replace(
            self.now,
            step=self.now.step + 1,
            steps=self.now.steps + 1,
            tokens=self.now.tokens + data.batch * data.seq_len,
            cursor=cursor,
        )
        known = self.diverged > 0 or self.session.must_wait(self.now)
        if known:
            self._read(after)
        self.meter.trained(self.meter.clock() - began, replayed=replayed)
        yield from self._boundary()
        if self.saver is not None and self.saver.due():
            self.saver.save(self.trainer.state.optimizer, self.now)
        self._stepped(self.meter.clock() - began)
        return None if known else after

    def _stepped(self, whole_s: float) -> None:
        self.meter.stepped(whole_s)
        if not instruments.on():
            return
        if self.meter.steps > 1:  # the first one's time is not its own
            instruments.record(metrics.STEP_DURATION, whole_s, self._attributes)
        else:  # a rate sees the first skipped step only if something was there before
            instruments.record(metrics.STEPS_SKIPPED, 0, self._attributes)

    def _boundary(self) -> Iterator[Pause]:
        self.session.boundary(self.now, self.meter.loss)
        if self._held():
            self.pulse()  # rounds open by what learners report: all wait for what is missing
        elif not self._done():  # else the next report is that training is over
            self._tick()
        while self._held():
            began = self.meter.clock()
            yield self._idle
            self.session.boundary(self.now, self.meter.loss, idle=True)
            self.meter.waited(self.meter.clock() - began)
            self._tick()

    def _held(self) -> bool:
        """Return True if a blocking mode holds this learner up here."""
        waits = self.session.must_wait(self.now)
        return waits and not self.mailbox.stopping() and not self._done()

    def _linger(self) -> Iterator[Pause]:
        if self.mailbox.stopping():
            return
        self._enter(LearnerPhase.FINISHED)
        while not self.mailbox.stopping():
            self.session.boundary(self.now, self.meter.loss, idle=True)
            self._tick()
            yield self._idle

    @property
    def _idle(self) -> Pause:
        return Pause(self.config.liveness.pulse_s)

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
        instruments.record(metrics.STEPS_SKIPPED, 1, self._attributes)
        log.warning("step_skipped", reason="loss or gradient not finite", in_a_row=self.diverged)
        if self.diverged >= DIVERGED_IN_A_ROW:
            log.warning("global_state_readopted", step=self.now.step)
            self.session.reset(self.now)
            self.diverged = 0

    @property
    def _attributes(self) -> dict[str, str]:
        return {metrics.RUN: self.learner.run, metrics.LEARNER_NAME: self.learner.name}

    def _progress(self) -> float:
        began_s = self.mailbox.began_s
        elapsed_s = self.meter.clock() - began_s if began_s is not None else 0.0
        return progress(self.config.train, max(self.now.step, self.session.clock()), elapsed_s)

    def _share(self) -> float:
        """Return the factor on the learning rate: fresh moments say little at first."""
        if not self.rewarming:
            return 1.0
        share = restore.rewarm_share(self.now.steps, self.config.train.rewarm_steps)
        self.rewarming = share < 1.0
        return share

    def _done(self) -> bool:
        return self._progress() >= 1.0 or self.session.ended()

    def _enter(self, phase: LearnerPhase) -> None:
        self.phase = phase
        self.meter.enter(phase)
        log.info("phase", phase=phase.value, step=self.now.step, cursor=self.now.cursor)
        self.pulse()

    def _tick(self) -> None:
        if self.meter.due(self.config.liveness.pulse_s):
            self.pulse()
        if self.meter.clock() - self.reported_s >= REPORT_S:
            self.reported_s = self.meter.clock()
            log.info(
                "training",
                step=self.now.step,
                loss=round(self.meter.loss, 4) if math.isfinite(self.meter.loss) else None,
                step_ms=round(self.meter.step_time_s * 1e3, 1),
                versions=list(self.session.versions),
            )
