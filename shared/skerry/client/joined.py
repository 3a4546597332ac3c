"""A learner in a training loop of one's own: that loop trains, a thread of ours meets the log.

Nothing here knows of JAX or torch: what parameters are is a ``Fragments`` of the caller's.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client.asked import model_of_leaves
from skerry.client.inner import Found, RestoredState, fresh
from skerry.client.inner_file import origin_of
from skerry.client.inner_state import RESTORE_S, InnerStateSaver, StateKind
from skerry.client.island import Island
from skerry.client.joining import find_or_create, offers, take_place
from skerry.client.loop_thread import LoopThread
from skerry.client.membership import Membership
from skerry.client.meter import Meter
from skerry.client.network import open_sync
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, LeadProcess
from skerry.client.session import Fragments
from skerry.client.telemetry import observe
from skerry.errors import ConfigError, RunFinished, SkerryError, first_cause
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.protocol.messages import InnerState, LearnerPhase, RunState
from skerry.protocol.subjects import checked_token
from skerry.service.entry import bus_from
from skerry.service.reporting import broker_event, configure, telemetry
from skerry.service.shell import run_loops
from skerry.settings import loading
from skerry.settings.models import RunConfig, Settings

log = structlog.get_logger()

MOST_PENDING = 64
"""Losses that are not known yet, at most; then the device is waited for."""
LOOK_PAUSE_S = 0.05


class Cut:
    """What a run's config makes of a learner's tensors: their plan."""

    def __init__(self, leaves: tuple[LeafSpec, ...], config: RunConfig) -> None:
        self.plan = plan(leaves, config.sync.fragments, config.sync.shards)


def not_joined() -> ConfigError:
    """Return the error of a learner that is used outside its block."""
    msg = "This learner has not joined yet: use it in a block, `with join(...) as island`."
    return ConfigError(msg)


class JoinedIsland:
    """One learner of a run, for as long as a ``with`` block lasts, or its first process.

    ``leaves`` are its tensors, perhaps of the model that a config.json has ``described``;
    ``fragments`` makes what holds them, once the run's plan and config
    are known; ``lead`` speaks to its other processes.
    Errors of the network's thread are raised at the next step boundary.
    """

    def __init__(
        self,
        settings: Settings,
        run: str,
        name: str | None,
        leaves: tuple[LeafSpec, ...],
        fragments: Callable[[Plan, RunConfig], Fragments],
        described: str = "",
        lead: LeadProcess | None = None,
    ) -> None:
        self._settings = settings
        self._lead = lead
        self._run = checked_token(run, "run")
        host = socket.gethostname().partition(".")[0]
        self._name = checked_token(host if name is None else name, "learner")
        self._leaves = leaves
        self._model = model_of_leaves(settings.run.model, leaves, described)
        self._make = fragments
        self._around = ExitStack()
        self._joined: Island | None = None
        self._losses = deque[Any]()
        self._restored = Future[RestoredState]()
        self._saver: InnerStateSaver | None = None
        self.read_to: int | None = None
        self._stepped_s = 0.0
        self.fell_back = False
        """True if the last step put the global state in the place of values that were not finite:
        the optimizer's state is to begin afresh."""

    # joining

    def __enter__(self) -> Self:
        if not structlog.is_configured():
            configure(self._settings.local.log_level, service="learner")
        with ExitStack() as around:
            around.enter_context(structlog.contextvars.bound_contextvars(learner=self._name))
            around.enter_context(telemetry(self._settings.local, "learner", self._run, self._name))
            bus = bus_from(self._settings.local.nats, self._name, on_event=broker_event)
            self._thread = LoopThread("skerry")
            around.callback(self._thread.close)
            self._thread.result(bus.__aenter__())
            around.callback(lambda: self._thread.result(bus.__aexit__(None, None, None)))
            self._join(bus)
            around.push(self._leave)
            self._wait(self._island.offer())
            self._wait(self._island.catch_up())
            self._island.enter(LearnerPhase.TRAINING)
            self._stepped_s = self._island.meter.clock()
            self._around = around.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._around.__exit__(kind, error, trace)

    def _join(self, bus: Bus) -> None:
        thread, given, started_s = self._thread, self._settings.run, time.monotonic()
        record, config, cut = thread.result(
            find_or_create(bus, self._run, given, partial(Cut, self._leaves), self._model)
        )
        if record.state is RunState.FINISHED:
            msg = (
                f"Run {self._run!r} is finished: give a new one another id, or read its state from"
                " a checkpoint."
            )
            raise RunFinished(msg)
        lead, self._origin = self._lead, origin_of(record, self._name)
        able, host = offers(config.model, given.model.path), socket.gethostname()
        place = thread.result(take_place(bus, record, cut.plan, self._name, host, able=able))
        if lead is not None:
            self._origin = replace(self._origin, processes=lead.processes)
            about = place.learner.incarnation, place.member.shard, loading.to_json(config)
            lead.post(Deed.HOLD, *asdict(Assignment(self._origin, *about)).values())
        self._fragments = self._make(cut.plan, config)
        if lead is not None:
            lead.meet()
        session, network = open_sync(
            *(bus, place, cut.plan, config, self._fragments),
            call=thread.call,
            lead=lead,
        )
        self._joined = Island(place, config, session, Meter(started_s))
        self._membership = Membership(network, self._island)
        observe(place.learner, lambda: network.last_pulse)
        self._island.report()
        self._stop, self._still = asyncio.Event(), asyncio.Event()
        self._serving: Future[None] = thread.begin(self._serve())

    # in the network's thread

    async def _serve(self) -> None:
        """Serve until the run or this learner is over, and leave once its loop stands still."""
        network = self._membership.network
        loops = {
            "network": network.run,
            "finished": self._finished,
            "prepare": lambda: self._membership.settle(asyncio.wrap_future(self._restored)),
        }
        try:
            await run_loops(loops, self._stop)
            network.link.mailbox.stop()
            await self._still.wait()
            async with asyncio.timeout(self._settings.local.shutdown_s):
                await self._membership.leave()
        finally:
            network.link.mailbox.stop()

    async def _finished(self) -> None:
        """Return once the run is finished and its last state is adopted, if that comes in time."""
        network, session = self._membership.network, self._island.session
        await self._membership.finished()
        commits = await ledger.last_commits(network.link.bus, self._run)
        ends_s = time.monotonic() + self._settings.local.shutdown_s
        while time.monotonic() < ends_s and any(  # noqa: ASYNC110 - another thread adopts
            session.versions[fragment] < commit.version for fragment, commit in commits.items()
        ):
            await asyncio.sleep(LOOK_PAUSE_S)

    # in the training loop's thread

    @property
    def _island(self) -> Island:
        if self._joined is None:
            raise not_joined()
        return self._joined

    @property
    def config(self) -> RunConfig:
        """The run's config, as the ledger holds it."""
        return self._island.config

    @property
    def shard(self) -> int:
        """The number of this learner's part of the data: no other learner of the run has it."""
        return self._island.place.member.shard

    @property
    def start(self) -> int:
        """The cursor, in sequences, at which this learner's data goes on.

        All before it is in the global state.
        """
        return self._island.place.start.cursor

    @property
    def cursor(self) -> int:
        """How far this learner has used its data, in sequences."""
        return self._island.now.cursor

    @property
    def progress(self) -> float:
        """How much of the run is done, in [0, 1]: for schedules."""
        return self._island.progress()

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""
        return self._island.session.versions

    @property
    def done(self) -> bool:
        """True once the run is over: there is no step left to take."""
        return self._island.stopping or self._island.done()

    def resume(self, kind: StateKind) -> Mapping[str, NDArray[Any]]:
        """Return the optimizer's state that an earlier start of this learner saved; empty: none.

        It waits for the disk. From now on boundaries save the state that they are given.
        """
        island, local = self._island, self._settings.local.learner
        start = island.place.learner.incarnation, island.now.step
        if not local.save_every_s or self._restored.done():
            return {}
        self._saver = InnerStateSaver(local, self._origin, start[0], kind, process=self._lead)
        self._saver.start()
        try:
            found = self._saver.found.result(RESTORE_S)
        except TimeoutError:
            found = Found(reason=f"the disk gave nothing for {RESTORE_S:g} s")
        restored = found.begin(*start, self.config.train.inner_max_age_steps)
        self._restored.set_result(restored)
        if self._lead is not None and restored.inner is InnerState.WARM:
            self._lead.post(Deed.RESTORE, *restored.point)
        return restored.tensors

    def boundary(
        self,
        *,
        tokens: int,
        loss: Any,
        cursor: int | None = None,
        routed: Mapping[str, Any] | None = None,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Count a step that was handed to the device; answer, and adopt what is due.

        Nothing here waits, but in a blocking mode. ``tokens`` are those that the step trained on,
        ``loss`` its mean loss, a number or a scalar that may still be computed; ``cursor`` is how
        far the data is used, in sequences; by default each step takes ``data.batch`` of them.
        ``routed`` counts the tokens that reached each unit of a stack so far. ``state`` gives the
        optimizer's state, to be saved when a save is due.

        Raises ConfigError for more tokens than a step of the run may have, or a cursor that goes
        back.
        """
        island, began_s = self._island, self._stepped_s
        self._check()
        self.fell_back, resets = False, island.session.resets
        if self.done:
            island.session.boundary(island.now, island.meter.loss, idle=True)
            return
        self._check_tokens(tokens)
        if not self._restored.done():
            start = island.place.learner.incarnation, island.place.start.step
            self._restored.set_result(fresh(*start, "the training loop keeps its own optimizer"))
        replayed = island.now.cursor < island.place.seen
        island.advance(tokens, self._cursor_after(cursor), routed)
        self._losses.append(loss)
        self._read_losses(known=island.diverged > 0 or island.session.must_wait(island.now))
        island.meter.trained(island.meter.clock() - began_s, replayed=replayed)
        self._wait(island.boundary())
        self.fell_back = island.session.resets > resets
        if self._saver is not None and state is not None and self._saver.due():
            self._saver.save(state(), island.now)
        self._stepped_s = island.meter.clock()
        island.stepped(self._stepped_s - began_s)

    def is_known(self, loss: Any) -> bool:
        """Return True if a loss can be read without waiting for the device."""
        ready = getattr(loss, "is_ready", None)
        return ready is None or bool(ready())

    def _check_tokens(self, tokens: int) -> None:
        data = self.config.data
        if not 0 <= tokens <= data.batch * data.seq_len:
            msg = (
                f"A step trained on {tokens} tokens, and the run allows {data.batch * data.seq_len}"
                " (data.batch times data.seq_len): create the run with larger ones."
            )
            raise ConfigError(msg, path="data.batch")

    def _cursor_after(self, cursor: int | None) -> int:
        now = self._island.now.cursor
        if cursor is None:
            cursor, self.read_to = self.read_to, None
        after = now + self.config.data.batch if cursor is None else int(cursor)
        if after < now:
            msg = f"The cursor went back from {now} to {after}: it counts what was used so far."
            raise ConfigError(msg)
        return after

    def _read_losses(self, *, known: bool) -> None:
        """Read the losses that are there; ``known``: wait for all of them."""
        losses = self._losses
        while losses and (known or len(losses) > MOST_PENDING or self.is_known(losses[0])):
            loss = float(losses.popleft())
            self._island.read(loss, finite=math.isfinite(loss))

    def _wait(self, pauses: Iterable[float]) -> None:
        """Wait at each pause until the network has news."""
        for pause in pauses:
            self._check()
            self._membership.network.link.mailbox.wait(pause)
        self._check()

    def _check(self) -> None:
        """Raise what has ended the network's thread, if anything has."""
        if self._serving.done() and (error := self._serving.exception()) is not None:
            cause = first_cause(error)
            raise cause if isinstance(cause, SkerryError) else error

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Answer the last rounds of a run that is over, then say goodbye; an earlier error wins."""
        try:
            if kind is None and self._island.done():
                self._wait(self._island.outlast())
        finally:
            if self._saver is not None:
                self._saver.close()
            for event in (self._still, self._stop):
                self._thread.call(event.set)
            try:
                self._serving.result()
            except BaseException as late:
                cause = first_cause(late)
                if kind is None and isinstance(cause, SkerryError):
                    raise cause from None
                if kind is None:
                    raise
                if cause is not error:
                    log.warning("goodbye_unsent", error=str(cause))
