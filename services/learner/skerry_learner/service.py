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
from skerry.service.priority import yield_to_others
from skerry.service.shell import serve
from skerry.settings.models import LearnerSettings, RunConfig
from skerry_learner.inner import recall
from skerry_learner.inner.keeper import Keeper
from skerry_learner.inner.recall import Recalled
from skerry_learner.island import Island
from skerry_learner.joining import (
    Place,
    Work,
    find_or_create,
    is_over,
    origin_of,
    settle,
    take_place,
)
from skerry_learner.sync.encode import load_kernels
from skerry_learner.sync.mailbox import Mailbox
from skerry_learner.sync.meter import Meter
from skerry_learner.sync.network import Network
from skerry_learner.sync.rules import Policy
from skerry_learner.sync.session import Session
from skerry_learner.sync.telemetry import observe
from skerry_learner.trainer.trainer import Trainer

log = structlog.get_logger()

RECALL_S = 60.0
NICENESS = 5
"""Of training on a CPU. Who joins, merges or commits beside it (not in another container) goes
first: others wait for that, and nobody waits for a step."""


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
        keeper = _keeper(local, record, place, trainer)
        service = _Service(bus, work, place, trainer, keeper, started_s, settled)
        await service.run(shutdown_s)


def _keeper(
    local: LearnerSettings | None, record: RunRecord, place: Place, trainer: Trainer
) -> Keeper | None:
    """Return who keeps the inner optimizer's state, or None where nobody shall."""
    if local is None or not local.save_every_s:
        return None
    learner = place.learner
    origin = origin_of(record, learner.name)
    return Keeper(local, origin, learner.incarnation, trainer.moments_like())


@dataclass(slots=True)
class _Service:
    """The composition of one learner, and its orderly end."""

    bus: Bus
    work: Work
    place: Place
    trainer: Trainer
    keeper: Keeper | None
    started_s: float
    settled: Callable[[], None] | None = None
    over: bool = False
    mailbox: Mailbox = field(init=False)
    island: Island = field(init=False)
    network: Network = field(init=False)
    thread: threading.Thread = field(init=False)
    ended: asyncio.Future[None] = field(init=False)
    recalled: Future[Recalled] = field(init=False)
    kept: asyncio.Event = field(init=False)

    def __post_init__(self) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        config, plan = self.work.config, self.work.plan
        room = Policy.of(config.sync).room
        self.mailbox = Mailbox(room, lambda: _call(loop, wake.set))
        self.network = Network(
            self.bus,
            self.place.learner,
            plan,
            self.mailbox,
            wake,
            chunk_bytes=config.sync.chunk_bytes,
            pulse_s=config.liveness.pulse_s,
        )
        self.recalled, self.kept = Future[Recalled](), asyncio.Event()
        if self.keeper is not None:
            self.keeper.start(
                self.place.start.step,
                config.train.inner_max_age_steps,
                lambda: _call(loop, self.kept.set),
            )
        self.island = self._island()
        self.ended = loop.create_future()
        context = copy_context()  # so that the thread's log lines say whose they are
        self.thread = threading.Thread(
            target=context.run, args=(self._train, loop), name="train", daemon=True
        )

    def _island(self) -> Island:
        config, learner = self.work.config, self.place.learner
        session = Session(
            learner,
            self.work.plan,
            config.sync,
            self.trainer,
            self.mailbox,
            start=self.place.start,
        )
        return Island(
            learner=learner,
            config=config,
            trainer=self.trainer,
            session=session,
            mailbox=self.mailbox,
            meter=Meter(self.started_s),
            stream=Stream(self.work.corpus, self.place.member.shard),
            vocab=getattr(self.work.model, "vocab", None),
            missing=self.place.missing,
            now=self.place.start,
            recalled=self.recalled,
            keeper=self.keeper,
            seen=self.place.seen,
            settled=self.settled,
        )

    async def run(self, shutdown_s: float) -> None:
        """Serve until the run is over; the trainer thread never outlives this call for long."""
        observe(self.place.learner, self.mailbox.newest_pulse)
        self.island.pulse()
        self.thread.start()
        loops = {
            "train": self._watch_trainer,
            "finished": self._finished,
            "dispatch": self.network.dispatch,
            "rounds": self.network.rounds,
            "manifests": self.network.manifests,
            "genesis": self.network.genesis,
            "fetch": self.network.fetch,
            "send": self.network.send,
            "doubts": self.network.doubts,
            "pulses": self.network.pulses,
            "watch_name": self.network.watch_name,
            "settle": self._settle,
            "kernels": self._kernels,
        }
        try:
            await serve(loops, drain=self._drain, shutdown_s=shutdown_s)
        finally:
            self.mailbox.stop()
            await asyncio.to_thread(self.thread.join, shutdown_s)

    def _train(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the island and hand its end, or its error, to the event loop."""
        try:
            self.island.run()
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
        recalled = await self._recall()
        self.recalled.set_result(recalled)
        await settle(self.bus, self.place.member, recalled)
        await asyncio.Event().wait()

    async def _recall(self) -> Recalled:
        """Return the saved inner state, read meanwhile; a disk that hangs holds nobody up."""
        start = self.place.learner.incarnation, self.place.start.step
        if self.keeper is None:
            return recall.without(*start, "nothing is kept on this machine")
        try:
            async with asyncio.timeout(RECALL_S):
                return await asyncio.wrap_future(self.keeper.recalled)
        except TimeoutError:
            return recall.without(*start, f"the disk gave nothing for {RECALL_S:g} s")

    async def _finished(self) -> None:
        await self.network.finished()
        self.over = True
        await self.network.answered()

    async def _drain(self) -> None:
        """Stop at the next step boundary, send what was captured, say goodbye."""
        self.mailbox.stop()
        # Not the thread's join: in a pool thread it would outlive the deadline and delay the exit.
        await asyncio.wait({self.ended})
        self._keep()
        if not self.over:
            await self.network.flush()
        self.island.phase = LearnerPhase.FINISHED if self.over else LearnerPhase.STOPPED
        self.island.pulse()
        await self.network.pulse()
        if self.keeper is not None:
            await self.kept.wait()
        log.info("stopped", phase=self.island.phase.value, step=self.island.now.step)

    def _keep(self) -> None:
        """Have the inner state saved as it is now, unless it is no better than what is saved."""
        if self.keeper is None:
            return
        if self.over or not self.island.now.steps:
            self.keeper.close()
        else:
            self.keeper.close(self.trainer.state.optimizer, self.island.now)


def step_back() -> None:
    """Let others have the CPU first, unless all that is done with it is to keep a GPU busy."""
    if jax.default_backend() == "cpu":
        yield_to_others(NICENESS)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    """Call something in the loop's thread; nothing happens once the loop has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)
