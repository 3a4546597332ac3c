"""One island of the lab: it joins, fails, comes back, and leaves.

Each incarnation of its learner is the real session, network and trainer, without a thread.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skerry.algorithm.goodput import Share, allocated_s
from skerry.client.inner import Found, RestoredState, fresh
from skerry.client.joining import settle, take_place
from skerry.client.meter import Meter
from skerry.client.network import open_sync
from skerry.data.corpus import targets_in
from skerry.data.stream import Mixture, Prefetched, Stream, check_tokens, stream_of
from skerry.log.base import Bus
from skerry.models.base import path_name
from skerry.models.machine import Machine
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import LearnerPhase, RunRecord
from skerry.tasks import TaskGroup, happens
from skerry_learner.trainer.trainer import Programs, Trainer
from skerry_learner.training import Pause, TrainingLoop
from skerry_learner.work import Work
from skerry_tools.lab.hostile import HostileSender
from skerry_tools.lab.progress import RunProgress
from skerry_tools.lab.scenario import Failures, IslandSettings

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


async def drive(
    life: Generator[Pause], news: asyncio.Event, step: Callable[[], Awaitable[None]]
) -> None:
    """Run a training loop to its end, where ``step`` lasts as long as a step does.

    ``news`` is set when something was posted for it.
    """
    try:
        for pause in life:
            if pause is None:
                await step()
                continue
            await happens(news, pause)
            news.clear()
    finally:
        life.close()


class SavedOptimizer:
    """One island's inner optimizer state that outlives a kill: in memory, not on a disk."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._due_s = every_s
        self._saved: tuple[Any, int] | None = None

    def due(self) -> bool:
        return self._clock() >= self._due_s

    def save(self, state: Any, now: TrainingProgress) -> None:
        """Copy the state; the next save is due in a while."""
        self._due_s = self._clock() + self._every_s
        self._saved = jax.tree.map(jnp.copy, state), now.step

    def restore(self, incarnation: int, step: int, max_age_steps: int) -> RestoredState:
        """Return how the next incarnation begins, at ``step`` of the global clock."""
        if self._saved is None:
            return fresh(incarnation, step, "nothing is saved")
        moments, saved = self._saved
        named = jax.tree_util.tree_flatten_with_path(moments)[0]
        tensors = {path_name(path): np.asarray(leaf) for path, leaf in named}
        found = Found({(incarnation - 1, saved): tensors})
        return found.begin(incarnation, step, max_age_steps)


@contextmanager
def feed(
    stream: Stream | Mixture, batch: int, vocab: int | None, cursor: int
) -> Generator[Iterator[Prefetched]]:
    """Read batches when they are asked for: what a prefetching thread would have given."""

    def batches(at: int) -> Iterator[Prefetched]:
        while True:
            rows = stream.read(at, AHEAD * batch)
            check_tokens(rows["tokens"], vocab)
            for first in range(0, AHEAD * batch, batch):
                at += batch
                part = {name: array[first : first + batch] for name, array in rows.items()}
                yield Prefetched(jax.device_put(part), at, targets_in(part))

    yield batches(cursor)


async def live(
    ground: Ground, island: IslandSettings, shelf: SavedOptimizer | None, tally: TrainedTime
) -> None:
    """Be one incarnation on an island: join, train, and leave when the run is finished."""
    bus, work, config = ground.connect(), ground.work, ground.work.config
    place = await take_place(
        bus, ground.record, work.plan, island.name, Machine("lab"), ground.wall_ns
    )
    incarnation, now = place.learner.incarnation, place.start
    trainer, news = Trainer(work.model, config, work.plan, ground.programs), asyncio.Event()
    session, network = open_sync(
        bus,
        place,
        work.plan,
        config,
        trainer,
        wake=news.set,
        wall_ns=ground.wall_ns,
        clock=ground.clock,
    )
    if island.hostile is not None:
        seed = f"{ground.seed}/{island.name}/hostile"
        network.sender = HostileSender(network.link, config.data, island.hostile, seed)
    if shelf is None:
        restored = fresh(incarnation, now.step, "nothing is kept")
    else:
        restored = shelf.restore(incarnation, now.step, config.train.inner_max_age_steps)
    known = Future[RestoredState]()
    known.set_result(restored)
    stream, vocab = stream_of(work.corpus, place.member.shard), getattr(work.model, "vocab", None)
    training = TrainingLoop(
        place,
        config,
        session,
        Meter(ground.clock(), ground.clock),
        trainer=trainer,
        feed=partial(feed, stream, config.data.batch, vocab),
        restored=known,
        saver=shelf,
    )
    draw = random.Random(f"{ground.seed}/{island.name}/{incarnation}").gauss  # noqa: S311 - a schedule, no secret

    async def step() -> None:
        step_s = island.step_s * max(FASTEST, 1.0 + island.jitter * draw(0.0, 1.0))
        await asyncio.sleep(step_s)
        tally.steps += 1
        tally.busy_s += step_s

    training.report()
    async with TaskGroup() as group:
        group.create_task(settle(bus, place.member, restored))
        transfer = group.create_task(network.run())
        trained = group.create_task(drive(training.life(), news, step))
        await network.finished()
        network.link.mailbox.stop()
        await trained
        transfer.cancel()
    training.enter(LearnerPhase.FINISHED)
    await network.pulse()


@dataclass(slots=True)
class IslandLifecycle:
    """One island over all incarnations of its learner.

    When it fails depends on the seed and its name alone, so that runs which differ in anything
    else meet the same failures.
    """

    ground: Ground
    island: IslandSettings
    failures: Failures
    progress: RunProgress
    tally: TrainedTime = field(default_factory=TrainedTime)
    kills: int = 0
    joined_s: float | None = None
    ended_s: float | None = None
    left: bool = False

    async def run(self) -> None:
        """Live until the run is finished or the island leaves."""
        ground, island, failures = self.ground, self.island, self.failures
        draw = random.Random(f"{ground.seed}/failures/{island.name}")  # noqa: S311 - a schedule, no secret
        fails = island.name in failures.islands
        saved = SavedOptimizer(failures.save_every_s, ground.clock)
        await self._at(island.joins)
        self.joined_s = ground.clock()
        leaving = asyncio.create_task(self._leaving(), name=f"{island.name} leaves")
        try:
            while not leaving.done():
                left_s = draw.expovariate(1.0) * failures.every_s if fails else None
                shelf = saved if fails and failures.warm else None
                life = asyncio.create_task(
                    live(ground, island, shelf, self.tally), name=island.name
                )
                try:
                    await asyncio.wait(
                        {life, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    if life.done():
                        life.result()
                        return
                finally:
                    await _ended(life)
                if not leaving.done():
                    self.kills += 1
                    down_s = draw.expovariate(1.0) * failures.down_s
                    await asyncio.wait({leaving}, timeout=down_s)
            self.left = True
        finally:
            self.ended_s = ground.clock()
            await _ended(leaving)

    def share(self, now_s: float) -> Share:
        """Return the island's time by now: in training steps, and since it joined."""
        joined_s = now_s if self.joined_s is None else self.joined_s
        return Share(self.tally.busy_s, allocated_s(joined_s, now_s, self.ended_s))

    async def _leaving(self) -> None:
        if self.island.leaves is None:
            await asyncio.Event().wait()
        else:
            await self._at(self.island.leaves)

    async def _at(self, share: float) -> None:
        """Wait until so much of the run is done by the global clock."""
        await self.progress.reached(round(share * self.progress.steps))


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; an error that it ends with comes too late."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
