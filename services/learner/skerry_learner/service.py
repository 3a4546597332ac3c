"""The learner as a service: the trainer in a thread of its own, the network in the event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field

import jax
import structlog

from skerry.data.stream import Stream
from skerry.log.base import Bus
from skerry.protocol.messages import LearnerPhase, RunRecord
from skerry.service.shell import serve, yield_to_others
from skerry.settings.models import LearnerSettings, RunConfig
from skerry_learner.inner import restore
from skerry_learner.inner.restore import RestoredState
from skerry_learner.inner.saver import InnerStateSaver
from skerry_learner.joining import (
    LearnerPlace,
    Work,
    find_or_create,
    is_over,
    origin_of,
    settle,
    take_place,
)
from skerry_learner.sync.encode import load_kernels
from skerry_learner.sync.meter import Meter
from skerry_learner.sync.network import Network, open_sync
from skerry_learner.sync.session import Session
from skerry_learner.sync.telemetry import observe
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.training import TrainingLoop

log = structlog.get_logger()

RESTORE_S = 60.0
NICENESS = 5
"""Of training on a CPU. Who joins, merges or commits beside it (not in another container) goes
first: others wait for that, and none waits for a step."""


async def learner(
    bus: Bus,
    run: str,
    name: str,
    given: RunConfig,
    *,
    shutdown_s: float,
    started_s: float,
    local: LearnerSettings | None = None,
    settled: Callable[[], None] | None = None,
) -> None:
    """Train in ``run`` until it is finished or a signal comes; ``started_s`` is monotonic.

    ``local`` says where the inner optimizer's state is kept; without it, it is not. ``settled`` is
    called before the first step, in the trainer's thread.
    """
    structlog.contextvars.bind_contextvars(learner=name)
    async with bus:
        record, work = await find_or_create(bus, run, given)
        if is_over(record):
            log.info("run_already_finished", run=run)
            return
        place = await take_place(bus, record, work, name, socket.gethostname())
        blank = not place.missing  # everything comes from the log
        trainer = await asyncio.to_thread(Trainer, work.model, work.config, work.plan, blank=blank)
        saver = _saver(local, record, place, trainer)
        service = _Service(bus, work, place, trainer, saver, started_s, settled)
        await service.run(shutdown_s)


def _saver(
    local: LearnerSettings | None, record: RunRecord, place: LearnerPlace, trainer: Trainer
) -> InnerStateSaver | None:
    """Return the saver of the inner optimizer's state, or None where it is not to be saved."""
    if local is None or not local.save_every_s:
        return None
    learner = place.learner
    origin = origin_of(record, learner.name)
    return InnerStateSaver(local, origin, learner.incarnation, trainer.moments_like())


@dataclass(slots=True)
class _Service:
    """The composition of one learner, and its orderly end."""

    bus: Bus
    work: Work
    place: LearnerPlace
    trainer: Trainer
    saver: InnerStateSaver | None
    started_s: float
    settled: Callable[[], None] | None = None
    over: bool = False
    training: TrainingLoop = field(init=False)
    network: Network = field(init=False)
    thread: threading.Thread = field(init=False)
    ended: asyncio.Future[None] = field(init=False)
    restored: Future[RestoredState] = field(init=False)
    kept: asyncio.Event = field(init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        session, self.network = open_sync(
            self.bus,
            self.place.learner,
            self.work.plan,
            self.work.config,
            self.trainer,
            self.place.start,
            notify=lambda wake: _call(loop, wake.set),
        )
        self.restored, self.kept = Future[RestoredState](), asyncio.Event()
        if self.saver is not None:
            self.saver.start(
                self.place.start.step,
                self.work.config.train.inner_max_age_steps,
                lambda: _call(loop, self.kept.set),
            )
        self.training = self._loop(session)
        self.ended = loop.create_future()
        context = copy_context()  # so that the thread's log lines say whose they are
        self.thread = threading.Thread(
            target=context.run, args=(self._train, loop), name="train", daemon=True
        )

    def _loop(self, session: Session) -> TrainingLoop:
        return TrainingLoop(
            learner=self.place.learner,
            config=self.work.config,
            trainer=self.trainer,
            session=session,
            mailbox=self.network.link.mailbox,
            traffic=self.network.link.traffic,
            meter=Meter(self.started_s),
            stream=Stream(self.work.corpus, self.place.member.shard),
            vocab=getattr(self.work.model, "vocab", None),
            missing=self.place.missing,
            now=self.place.start,
            restored=self.restored,
            saver=self.saver,
            seen=self.place.seen,
            settled=self.settled,
        )

    async def run(self, shutdown_s: float) -> None:
        """Serve until the run is over; the trainer thread never outlives this call for long."""
        observe(self.place.learner, self.network.newest_pulse)
        self.training.pulse()
        self.thread.start()
        loops = {
            "train": self._watch_trainer,
            "finished": self._finished,
            "network": self.network.run,
            "settle": self._settle,
            "kernels": self._kernels,
        }
        try:
            await serve(loops, drain=self._drain, shutdown_s=shutdown_s)
        finally:
            self.network.link.mailbox.stop()
            await asyncio.to_thread(self.thread.join, shutdown_s)

    def _train(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the training loop and hand its end, or its error, to the event loop."""
        try:
            self.training.run()
        except Exception as error:  # noqa: BLE001  handed over, and raised there
            _call(loop, self.ended.set_exception, error)
        else:
            _call(loop, self.ended.set_result, None)

    async def _watch_trainer(self) -> None:
        await asyncio.shield(self.ended)

    async def _kernels(self) -> None:
        """Load what the first contribution needs while the trainer begins, then be idle."""
        await asyncio.to_thread(load_kernels)
        await asyncio.Event().wait()

    async def _settle(self) -> None:
        """Say how this incarnation goes on, then be idle for ever."""
        restored = await self._restored()
        self.restored.set_result(restored)
        await settle(self.bus, self.place.member, restored)
        await asyncio.Event().wait()

    async def _restored(self) -> RestoredState:
        """Return the saved inner state, read meanwhile; a disk that hangs delays nothing."""
        start = self.place.learner.incarnation, self.place.start.step
        if self.saver is None:
            return restore.fresh(*start, "nothing is kept on this machine")
        try:
            async with asyncio.timeout(RESTORE_S):
                return await asyncio.wrap_future(self.saver.restored)
        except TimeoutError:
            return restore.fresh(*start, f"the disk gave nothing for {RESTORE_S:g} s")

    async def _finished(self) -> None:
        await self.network.finished()
        self.over = True
        await self.network.sender.answered()

    async def _drain(self) -> None:
        """Stop at the next step boundary, send what was captured, say goodbye."""
        self.network.link.mailbox.stop()
        # Not the thread's join: in a pool thread it would outlive the deadline and delay the exit.
        await asyncio.wait({self.ended})
        self._save()
        if not self.over:
            await self.network.sender.flush()
        self.training.phase = LearnerPhase.FINISHED if self.over else LearnerPhase.STOPPED
        self.training.pulse()
        await self.network.pulse()
        if self.saver is not None:
            await self.kept.wait()
        log.info("stopped", phase=self.training.phase.value, step=self.training.now.step)

    def _save(self) -> None:
        """Have the inner state saved as it is now, unless it is no better than what is saved."""
        if self.saver is None:
            return
        if self.over or not self.training.now.steps:
            self.saver.close()
        else:
            self.saver.close(self.trainer.state.optimizer, self.training.now)


def step_back() -> None:
    """Let others have the CPU first, unless all that is done with it is to keep a GPU busy."""
    if jax.default_backend() == "cpu":
        yield_to_others(NICENESS)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call something in the loop's thread; nothing happens once the loop has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
