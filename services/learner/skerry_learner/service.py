"""The learner as a service: the trainer in a thread of its own, the network in the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import structlog
from jax.sharding import Mesh

from skerry.client.inner import Found, RestoredState
from skerry.client.inner_file import origin_of
from skerry.client.inner_state import RESTORE_S, InnerStateSaver
from skerry.client.joining import LearnerPlace, offers, take_place
from skerry.client.membership import Membership
from skerry.client.meter import Meter
from skerry.client.network import open_sync
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, LeadProcess, await_own_end, leading
from skerry.client.telemetry import observe
from skerry.client.weights import FolderWeights
from skerry.data.stream import Mixture, Prefetch, Stream, stream_of
from skerry.log.base import Bus
from skerry.models.axes import AUTO
from skerry.models.mesh import machine_of, make_mesh
from skerry.protocol.messages import LearnerPhase, RunState
from skerry.service.shell import serve, yield_to_others
from skerry.settings import loading
from skerry.settings.local import LearnerSettings
from skerry.settings.models import RunConfig
from skerry_learner.trainer.trainer import Programs, Trainer
from skerry_learner.training import TrainingLoop
from skerry_learner.work import Work, find_or_create

log = structlog.get_logger()


async def learner(  # noqa: PLR0913 - all that a learner is made of
    bus: Bus,
    run: str,
    name: str,
    given: RunConfig,
    *,
    shutdown_s: float,
    started_s: float,
    local: LearnerSettings | None = None,
    settled: Callable[[], None] = lambda: None,
    lead: LeadProcess | None = None,
) -> bool:
    """Train in ``run`` until it is finished or a signal comes; ``started_s`` is monotonic.

    Returns False where the signal came first. ``local`` says where the inner optimizer's state is
    kept; without it nothing is. ``settled`` is called before the first step, in the trainer's
    thread. ``lead`` leads the learner's other processes, which end as this one does.
    """
    structlog.contextvars.bind_contextvars(learner=name)
    if lead is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end_early, lead)
    async with leading(lead), bus:
        mesh = make_mesh(local.mesh if local is not None else AUTO)
        record, work = await find_or_create(bus, run, given)
        if record.state is RunState.FINISHED:
            log.info("run_already_finished", run=run)
            return True
        model, folder = work.config.model, given.model.path
        machine = machine_of(mesh, socket.gethostname())
        place = await take_place(
            *(bus, record, work.plan, name, machine),
            data=work.corpus.digest,
            able=offers(model, folder),
        )
        weights = None
        if place.missing and model.weights and not model.lora_rank:
            weights = await asyncio.to_thread(FolderWeights.of, folder, model, work.plan)
        blank = weights is not None or not place.missing  # everything comes from the log
        who, origin = place.learner, replace(origin_of(record, name), processes=jax.process_count())
        if lead is not None:
            about = loading.to_json(work.config), work.corpus.digest, blank, machine.mesh
            assigned = Assignment(origin, who.incarnation, place.member.shard, *about)
            lead.post(Deed.HOLD, *asdict(assigned).values())
        begin = {"blank": blank, "weights": weights, "lead": lead}
        trainer = await asyncio.to_thread(make_trainer, work, mesh, **begin)
        if lead is not None:
            await asyncio.to_thread(lead.meet)
        saver = None
        if local is not None and local.save_every_s:
            kind = trainer.moments_kind()
            saver = InnerStateSaver(local, origin, who.incarnation, kind, process=lead)
        meter = Meter(started_s)
        service = _Service(bus, work, place, trainer, meter, saver, settled, lead)
        return await service.run(shutdown_s)


def _end_early(lead: LeadProcess) -> None:
    """End all of a learner's processes before any of them has something to end in order."""
    lead.abandon()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def make_trainer(work: Work, mesh: Mesh, **begin: Any) -> Trainer:
    log.info("mesh", **mesh.shape)
    programs = Programs.of(work.model, work.config, mesh)
    return Trainer(work.model, work.config, work.plan, programs, **begin)


class _Service:
    """The composition of one learner, and its orderly end."""

    def __init__(
        self,
        bus: Bus,
        work: Work,
        place: LearnerPlace,
        trainer: Trainer,
        meter: Meter,
        saver: InnerStateSaver | None,
        settled: Callable[[], None],
        lead: LeadProcess | None = None,
    ) -> None:
        self._work = work
        self._lead = lead
        self._saver = saver
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._saved = asyncio.Event()
        self._abandoned = False
        self._restored = Future[RestoredState]()
        session, network = open_sync(
            *(bus, place, work.plan, work.config, trainer),
            call=self._call,
            lead=lead,
        )
        if lead is not None:
            lead.on_stop = self._ask_stop
        self._stream = stream_of(work.corpus, place.member.shard)
        self._training = TrainingLoop(
            place,
            work.config,
            session,
            meter,
            trainer=trainer,
            feed=self._feed,
            restored=self._restored,
            saver=saver,
            example=self._stream.read(0, work.config.data.batch),
        )
        self._membership = Membership(network, self._training)

    async def run(self, shutdown_s: float) -> bool:
        """Serve until the run is over, or a signal comes: False.

        The trainer thread never outlives this call for long.
        """
        if self._saver is not None:
            self._saver.start(lambda: self._call(self._saved.set))
        network = self._membership.network
        observe(network.link.identity, lambda: network.last_pulse)
        self._training.report()
        context = copy_context()  # so that the thread's log lines say whose they are
        thread = threading.Thread(
            target=context.run, args=(self._train,), name="train", daemon=True
        )
        thread.start()
        loops = {
            "train": lambda: asyncio.shield(self._ended),
            "finished": self._membership.finished,
            "network": network.run,
            "prepare": lambda: self._membership.settle(self._restore()),
        }
        try:
            await serve(loops, drain=self._drain, shutdown_s=shutdown_s)
        finally:
            network.link.mailbox.stop()
            if not self._abandoned:
                await asyncio.to_thread(thread.join, shutdown_s)
        return self._membership.over

    def _call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function in the loop's thread; nothing happens once the loop has closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    def _train(self) -> None:
        """Run the training loop and hand its end, or its error, to the event loop."""
        try:
            for pause in self._training.life():
                if pause is not None:
                    self._membership.network.link.mailbox.wait(pause)
        except Exception as error:  # noqa: BLE001  handed over, and raised there
            if self._lead is not None:
                await_own_end(error)
            self._call(self._ended.set_exception, error)
        else:
            self._call(self._ended.set_result, None)

    def _feed(self, cursor: int) -> Prefetch:
        self._settled()
        if self._lead is not None:
            self._lead.post(Deed.FEED, cursor)
        return feed(self._work, self._training.trainer, self._stream, cursor)

    def _ask_stop(self) -> None:
        """Stop as after a signal, if this process has had none: another of the learner's has."""
        if not self._membership.network.link.mailbox.stopping:
            os.kill(os.getpid(), signal.SIGTERM)

    async def _restore(self) -> RestoredState:
        """Return the inner state that was saved, unless the disk hangs."""
        place, found = self._training.place, Found(reason="nothing is kept on this machine")
        if self._saver is not None:
            try:
                async with asyncio.timeout(RESTORE_S):
                    found = await asyncio.wrap_future(self._saver.found)
            except TimeoutError:
                found = Found(reason=f"the disk gave nothing for {RESTORE_S:g} s")
        most = self._work.config.train.inner_max_age_steps
        restored = found.begin(place.learner.incarnation, place.start.step, most)
        self._restored.set_result(restored)
        return restored

    async def _drain(self) -> None:
        """Stop at the next step boundary, send what was captured, say goodbye.

        The inner state is saved as it is now, unless it is no better than what is saved.
        """
        training = self._training
        self._membership.network.link.mailbox.stop()
        # One that still compiles owes the log nothing, and cannot be ended.
        self._abandoned = training.meter.phase is LearnerPhase.STARTING
        if self._abandoned and self._lead is not None:
            await asyncio.to_thread(self._lead.abandon)
        if not self._abandoned:
            # Not the thread's join: in a pool thread it would outlive the deadline and delay the
            # exit.
            await asyncio.wait({self._ended})
        if self._saver is not None:
            worthless = self._membership.over or not training.now.steps
            moments = None if worthless else training.trainer.moments
            self._saver.close(moments, None if worthless else training.now)
        await self._membership.leave()
        if self._saver is not None:
            await self._saved.wait()


def feed(
    work: Work, trainer: Trainer, stream: Stream | Mixture, cursor: int, *, whole: bool = True
) -> Prefetch:
    """Return a learner's batches from a cursor on, read ahead and laid on its mesh.

    If not ``whole``, only the rows that this process's devices need are read, and another process
    counts the targets.
    """
    vocab, batch = getattr(work.model, "vocab", None), work.config.data.batch
    own = range(batch) if whole else trainer.own_rows(batch)
    put = partial(trainer.place, first=own.start, count=batch)
    return Prefetch(stream, cursor, batch=batch, own=own, vocab=vocab, put=put)


def step_back(by: int) -> None:
    """Let others have the CPU first, unless this process only keeps a GPU busy with it.

    Learners wait for services that join, merge or commit beside it; none waits for a step.
    """
    if by and jax.default_backend() == "cpu":
        yield_to_others(by)
