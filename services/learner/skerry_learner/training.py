"""A learner's training loop: warm up, catch up, train, and answer until it is asked to end.

It is a generator of pauses, so that its driver decides what time is: a thread, in which steps take
as long as they take, or a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import structlog

from skerry.client.inner import RestoredState
from skerry.client.island import Island
from skerry.client.telemetry import StepTimes
from skerry.data.corpus import HostBatch
from skerry.data.stream import Prefetched
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import InnerState, LearnerPhase
from skerry.settings.models import TrainConfig
from skerry.telemetry import instruments, metrics
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer

log = structlog.get_logger()

Feed = Callable[[int], AbstractContextManager[Iterator[Prefetched]]]
"""Opens the data at a cursor; ``data.stream.Prefetch`` does so, and reads ahead in a thread."""


class SavesInnerState(Protocol):
    """Saves the inner optimizer's state, as ``InnerStateSaver`` does on a disk."""

    def due(self) -> bool: ...
    def save(self, state: Any, now: TrainingProgress) -> None: ...


Pause: TypeAlias = float | None
"""A pause of the trainer: until the mailbox changes, but at most this many seconds.

None: a step has been handed to the device, and the pause lasts as long as that step.
"""


def rewarm_share(config: TrainConfig, steps: int) -> float:
    """Return the factor on the learning rate after a cold start: fresh moments say little."""
    return min(1.0, (steps + 1) / max(1, config.rewarm_steps))


@dataclass(slots=True, kw_only=True)
class TrainingLoop(Island):
    """An island that trains a model of ours; ``life`` is the body of its thread.

    ``restored`` is how its inner optimizer begins, ``saver`` saves it; without them it begins as it
    was made and is not saved. ``example`` is a batch, for which steps are compiled.
    """

    trainer: Trainer
    feed: Feed
    restored: Future[RestoredState] | None = None
    saver: SavesInnerState | None = None
    example: HostBatch | None = None
    _rewarms: bool = False

    def life(self) -> Generator[Pause]:
        """Live until the mailbox says stop; the caller waits at each pause.

        Between pauses the step loop never waits.
        """
        yield from self._prepare()
        if not (self.stopping or self.done()):
            yield from self._train()
        yield from self.outlast()

    def _prepare(self) -> Iterator[Pause]:
        """Offer what the log lacks, compile, and adopt what it has.

        The saved inner state was read while everything compiled.
        """
        yield from self.offer()
        began_s = self.meter.clock()
        self.trainer.warm(self.tick, self.example)
        log.info("compiled", seconds=round(self.meter.clock() - began_s, 2))
        yield from self.catch_up()
        while self.restored is not None and not self.stopping:
            if self.restored.done():
                restored, self.restored = self.restored.result(), None
                self._rewarms = restored.inner is InnerState.COLD
                if restored.inner is InnerState.WARM:
                    self.trainer.restore_moments(restored.tensors, *restored.point)
            else:
                yield self.idle()

    def _train(self) -> Iterator[Pause]:
        with self.feed(self.now.cursor) as batches:
            self.enter(LearnerPhase.TRAINING)
            before: StepResult | None = None
            while not (self.stopping or self.done()):
                before = yield from self._step(batches, before)
        if before is not None:
            self._note(before)

    def _step(
        self, batches: Iterator[Prefetched], before: StepResult | None
    ) -> Generator[Pause, None, StepResult | None]:
        """Take one step; return its outcome, unless it was read already.

        Meanwhile the outcome of the step before is read. This step's own outcome is read, too, when
        a blocking mode has a round due, where that wait counts as training; and after a skipped
        step, until one is not skipped, so that no contribution claims what is not known yet.
        """
        began_s = self.meter.clock()
        replayed = self.now.cursor < self.place.seen
        batch, cursor, tokens = next(batches)
        data_s = self.meter.clock() - began_s
        share = rewarm_share(self.config.train, self.now.steps) if self._rewarms else 1.0
        after = self.trainer.step(batch, self.progress(), share)
        if before is not None:
            self._note(before)
        yield None
        self.now = self.now.after_step(tokens, cursor, self.trainer.routed)
        known = self.diverged > 0 or self.session.must_wait(self.now)
        if known:
            self._note(after)
        busy_s = self.meter.clock() - began_s
        self.meter.trained(busy_s, replayed=replayed)
        yield from self.boundary()
        if self.saver is not None and self.saver.due():
            self.saver.save(self.trainer.state.optimizer, self.now)
        whole_s = self.meter.clock() - began_s
        self.stepped(StepTimes(data_s, busy_s - data_s, whole_s - busy_s))
        return None if known else after

    def _note(self, result: StepResult) -> None:
        """Read the outcome of the newest step, or of the one before it, which still runs."""
        finite = bool(result.finite)
        self.read(float(result.loss) if finite else math.nan, finite=finite)
        labels = self.place.learner.labels
        if finite:
            instruments.record(metrics.GRADIENT_NORM, float(result.grad_norm), labels)
        if result.expert_tokens:
            instruments.record(metrics.EXPERT_SHARE, float(result.busiest), labels)
