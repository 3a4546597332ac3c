"""One learner of the lab: the real session, network and trainer, without a thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import jax
import numpy as np

from skerry.data.prefetch import Prefetched, check_tokens
from skerry.data.stream import Stream
from skerry.log.base import Bus
from skerry.protocol.messages import LearnerPhase, RunRecord
from skerry.tasks import TaskGroup
from skerry_learner.inner.saver import RestoredState, fresh
from skerry_learner.joining import LearnerPlace, Work, settle, take_place
from skerry_learner.meter import Meter
from skerry_learner.sync.network import open_sync
from skerry_learner.trainer.trainer import Programs, Trainer
from skerry_learner.training import Pause, TrainingLoop
from skerry_tools.lab import scenario
from skerry_tools.lab.saved_optimizer import SavedOptimizer

AHEAD = 16
"""Batches read from the corpus in one go."""
FASTEST = 0.2
"""Share of its mean time that a step takes at least, whatever jitter draws."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all islands of a lab share; ``connect`` makes one more client of the log."""

    record: RunRecord
    work: Work
    programs: Programs
    seed: int
    connect: Callable[[], Bus]
    clock: Callable[[], float]
    wall_ns: Callable[[], int]


@dataclass(slots=True)
class TrainedTime:
    """What all incarnations on one island have done: whole steps, and seconds inside them."""

    steps: int = 0
    busy_s: float = 0.0


class Signal:
    """What a mailbox notifies where there are no threads."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def notify_all(self) -> None:
        self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        msg = f"No other thread ends a wait of {timeout} s here: await changed()."
        raise RuntimeError(msg)

    async def changed(self, timeout_s: float) -> None:
        """Wait until something was notified since the last time, ``timeout_s`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()


async def drive(
    life: Generator[Pause], signal: Signal, step: Callable[[], Awaitable[None]]
) -> None:
    """Run a training loop to its end, where ``step`` lasts as long as a step does."""
    try:
        for pause in life:
            if pause.wait_s is not None:
                await signal.changed(pause.wait_s)
            else:
                await step()
    finally:
        life.close()


@contextmanager
def feed(
    stream: Stream, batch: int, vocab: int | None, cursor: int
) -> Generator[Iterator[Prefetched]]:
    """Read batches when they are asked for: what a prefetching thread would have given."""

    def batches(at: int) -> Iterator[Prefetched]:
        while True:
            rows = stream.read(at, AHEAD * batch)
            check_tokens(rows, vocab)
            for tokens in jax.device_put(np.split(rows, AHEAD)):
                at += batch
                yield Prefetched(tokens, at)

    yield batches(cursor)


@dataclass(slots=True)
class LabLearner:
    """One incarnation on one island; ``live`` is its whole life."""

    ground: Ground
    hardware: scenario.Island
    shelf: SavedOptimizer | None
    tally: TrainedTime

    async def live(self) -> None:
        """Join, train, and leave when the run is finished."""
        ground, work = self.ground, self.ground.work
        bus = ground.connect()
        place = await take_place(
            bus, ground.record, work, self.hardware.name, "lab", ground.wall_ns
        )
        trainer = Trainer(work.model, work.config, work.plan, ground.programs)
        signal = Signal()
        session, network = open_sync(
            bus,
            place.learner,
            work.plan,
            work.config,
            trainer,
            place.start,
            changed=signal,
            wall_ns=ground.wall_ns,
            clock=ground.clock,
        )
        restored = self._restored(place)
        known = Future[RestoredState]()
        known.set_result(restored)
        training = TrainingLoop(
            place,
            work.config,
            trainer,
            session,
            Meter(ground.clock(), ground.clock),
            partial(
                feed,
                Stream(work.corpus, place.member.shard),
                work.config.data.batch,
                getattr(work.model, "vocab", None),
            ),
            restored=known,
            saver=self.shelf,
        )
        training.report()
        await settle(bus, place.member, restored)
        async with TaskGroup() as group:
            transfer = group.create_task(network.run())
            trained = group.create_task(self._train(training, signal))
            await network.finished()
            network.link.mailbox.stop()
            await trained
            transfer.cancel()
        training.enter(LearnerPhase.FINISHED)
        await network.pulse()

    def _restored(self, place: LearnerPlace) -> RestoredState:
        if self.shelf is None:
            return fresh(place.learner.incarnation, place.start.step, "nothing is kept")
        aged = self.ground.work.config.train.inner_max_age_steps
        return self.shelf.restore(place.learner.incarnation, place.start.step, aged)

    async def _train(self, training: TrainingLoop, signal: Signal) -> None:
        """Run the trainer's life, each step as long as this island's hardware takes."""
        key = f"{self.ground.seed}/{self.hardware.name}/{training.place.learner.incarnation}"
        draw = random.Random(key).gauss  # noqa: S311 - a schedule, no secret
        mean_s, jitter = self.hardware.step_s, self.hardware.jitter

        async def step() -> None:
            step_s = mean_s * max(FASTEST, 1.0 + jitter * draw(0.0, 1.0))
            await asyncio.sleep(step_s)
            self.tally.steps += 1
            self.tally.busy_s += step_s

        await drive(training.life(), signal, step)
