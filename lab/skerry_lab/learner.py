"""One learner of the lab: the real session, network and trainer, without a thread."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Self

import jax

from skerry.bus.base import Bus
from skerry.tasks import TaskGroup
from skerry.wire.messages import LearnerPhase, RunRecord
from skerry_lab.moments import Shelf
from skerry_lab.scenario import Island as Hardware
from skerry_learner.data.corpus import Batch
from skerry_learner.data.prefetch import Prefetched
from skerry_learner.data.stream import Stream
from skerry_learner.inner import recall
from skerry_learner.inner.recall import Recalled
from skerry_learner.island import Island
from skerry_learner.joining import Work, settle, take_place
from skerry_learner.sync.mailbox import Mailbox
from skerry_learner.sync.meter import Meter
from skerry_learner.sync.network import Network
from skerry_learner.sync.rules import Policy
from skerry_learner.sync.session import Session
from skerry_learner.trainer.trainer import Programs, Trainer


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
        msg = f"Nobody can wait {timeout} s for another thread here: await changed()."
        raise RuntimeError(msg)

    async def changed(self, timeout_s: float) -> None:
        """Wait until something was notified since the last time, ``timeout_s`` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        self._event.clear()


class Feed:
    """Batches read when they are asked for: what a prefetching thread would have given."""

    def __init__(self, stream: Stream, *, cursor: int, batch: int, vocab: int | None) -> None:
        self._stream = stream
        self._cursor = cursor
        self._batch = batch
        del vocab  # the corpus is bytes or was trained on before

    def __enter__(self) -> Iterator[Prefetched]:
        return self._all()

    def __exit__(self, *_: object) -> None:
        return None

    def _all(self) -> Iterator[Prefetched]:
        while True:
            rows: Batch = self._stream.read(self._cursor, self._batch)
            self._cursor += self._batch
            yield Prefetched(jax.device_put(rows), self._cursor)


class Learner:
    """One incarnation on one island; ``live`` is its whole life."""

    def __init__(
        self,
        bus: Bus,
        record: RunRecord,
        work: Work,
        programs: Programs,
        hardware: Hardware,
        shelf: Shelf | None,
        seed: int,
        wall_ns: Callable[[], int],
    ) -> None:
        self._bus = bus
        self._record = record
        self._work = work
        self._programs = programs
        self._hardware = hardware
        self._shelf = shelf
        self._seed = seed
        self._wall_ns = wall_ns
        self.steps = 0

    async def live(self) -> None:
        """Join, train, and leave when the run is finished."""
        work, wall_ns = self._work, self._wall_ns
        clock = asyncio.get_running_loop().time
        name, config = self._hardware.name, work.config
        place = await take_place(self._bus, self._record, work, name, "lab", wall_ns)
        signal, wake = Signal(), asyncio.Event()
        mailbox = Mailbox(Policy.of(config.sync).room, wake.set, signal)
        network = Network(
            self._bus,
            place.learner,
            work.plan,
            mailbox,
            wake,
            chunk_bytes=config.sync.chunk_bytes,
            pulse_s=config.liveness.pulse_s,
            wall_ns=wall_ns,
        )
        trainer = Trainer(work.model, config, work.plan, self._programs)
        incarnation, start = place.learner.incarnation, place.start
        aged = config.train.inner_max_age_steps
        how = recall.without(incarnation, "nothing is kept")
        if self._shelf is not None:
            how = self._shelf.recall(incarnation, start.step, aged)
        recalled = Future[Recalled]()
        recalled.set_result(how)
        session = Session(
            place.learner,
            work.plan,
            config.sync,
            trainer,
            mailbox,
            start=start,
            wall_ns=wall_ns,
        )
        island = Island(
            learner=place.learner,
            config=config,
            trainer=trainer,
            session=session,
            mailbox=mailbox,
            meter=Meter(clock(), clock),
            stream=Stream(work.corpus, place.member.shard),
            vocab=None,
            missing=place.missing,
            now=start,
            wall_ns=wall_ns,
            recalled=recalled,
            keeper=self._shelf,
            feed=Feed,
        )
        island.pulse()
        await settle(self._bus, place.member, how)
        async with TaskGroup() as group:
            loops = [
                group.create_task(loop())
                for loop in (
                    network.dispatch,
                    network.rounds,
                    network.manifests,
                    network.genesis,
                    network.fetch,
                    network.send,
                    network.doubts,
                    network.pulses,
                )
            ]
            training = group.create_task(self._train(island, signal, incarnation))
            await network.finished()
            mailbox.stop()
            await training
            for task in loops:
                task.cancel()
        island.phase = LearnerPhase.FINISHED
        island.pulse()
        await network.pulse()

    async def _train(self, island: Island, signal: Signal, incarnation: int) -> None:
        """Run the trainer's life, each step as long as this island's hardware takes."""
        draw = random.Random(f"{self._seed}/{self._hardware.name}/{incarnation}").gauss  # noqa: S311 - a schedule, no secret
        mean_s, jitter = self._hardware.step_s, self._hardware.jitter
        life = island.life()
        try:
            for pause in life:
                if pause.wait_s is not None:
                    await signal.changed(pause.wait_s)
                    continue
                self.steps += 1
                await asyncio.sleep(mean_s * max(0.2, 1.0 + jitter * draw(0.0, 1.0)))
        finally:
            life.close()
