"""A learner in a user's training loop: the loop trains, a thread of ours talks to the log.

Nothing here depends on JAX or torch: the caller's ``Fragments`` holds the parameters.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client.asked import model_of_leaves
from skerry.client.inner import Found, fresh
from skerry.client.inner_file import Origin, origin_of
from skerry.client.inner_state import RESTORE_S, InnerStateSaver, StateKind
from skerry.client.island import Island
from skerry.client.joining import find_or_create, offers, take_place
from skerry.client.loop_thread import LoopThread
from skerry.client.meter import Meter
from skerry.client.network import open_sync
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, LeadProcess
from skerry.client.serving import Serving
from skerry.client.session import Fragments
from skerry.client.standing import Standing
from skerry.client.telemetry import StepTimes, observe
from skerry.errors import ConfigError, RunFinished
from skerry.log.base import Bus
from skerry.models.machine import Machine
from skerry.protocol.messages import InnerState, LearnerPhase, RunState
from skerry.protocol.subjects import checked_token
from skerry.service.entry import bus_from
from skerry.service.reporting import broker_event, configure, telemetry
from skerry.settings import loading
from skerry.settings.local import LearnerSettings, Settings
from skerry.settings.models import RunConfig

MOST_PENDING = 64
"""Most losses still being computed; beyond that, a boundary waits for the device."""


class PlannedLeaves:
    """What a run's config makes of a learner's tensors: their plan."""

    def __init__(self, leaves: tuple[LeafSpec, ...], config: RunConfig) -> None:
        self.plan = plan(leaves, config.sync.fragments, config.sync.shards)


def name_or_host(name: str | None) -> str:
    """Return the name of a learner: by default that of its host."""
    return socket.gethostname().partition(".")[0] if name is None else name


@dataclass(frozen=True, slots=True)
class Joining:
    """How a training loop, or its first process, becomes a learner of a run.

    ``leaves`` are its tensors; ``described`` is the text of their model's config.json, or empty.
    ``fragments`` makes the object that holds them, once the run's plan and config are known;
    ``machine`` is the one it computes on; ``lead`` talks to its other processes. Raises ConfigError
    for an invalid run id or name.
    """

    settings: Settings
    run: str
    name: str
    leaves: tuple[LeafSpec, ...]
    fragments: Callable[[Plan, RunConfig], Fragments]
    machine: Machine
    described: str = ""
    lead: LeadProcess | None = None

    def __post_init__(self) -> None:
        checked_token(self.run, "run")
        checked_token(self.name, "learner")

    def join(self, around: ExitStack) -> JoinedIsland:
        """Return the learner once it has the log's parameters; leaving ``around`` ends it."""
        local = self.settings.local
        if not structlog.is_configured():
            configure(local.log_level, service="learner")
        around.enter_context(structlog.contextvars.bound_contextvars(learner=self.name))
        around.enter_context(telemetry(local, "learner", self.run, self.name))
        bus = bus_from(local.nats, self.name, on_event=broker_event)
        thread = LoopThread("skerry")
        around.callback(thread.close)
        thread.result(bus.__aenter__())
        around.callback(lambda: thread.result(bus.__aexit__(None, None, None)))
        learner = self._joined(bus, thread)
        around.push(learner.leave)
        learner.begin()
        return learner

    def _joined(self, bus: Bus, thread: LoopThread) -> JoinedIsland:
        given, started_s = self.settings.run, time.monotonic()
        model = model_of_leaves(given.model, self.leaves, self.described)
        record, config, cut = thread.result(
            find_or_create(bus, self.run, given, partial(PlannedLeaves, self.leaves), model)
        )
        if record.state is RunState.FINISHED:
            msg = (
                f"Run {self.run!r} is finished: give a new one another id, or read its state from"
                " a checkpoint."
            )
            raise RunFinished(msg)
        lead, origin = self.lead, origin_of(record, self.name)
        able = offers(config.model, given.model.path)
        place = thread.result(take_place(bus, record, cut.plan, self.name, self.machine, able=able))
        if lead is not None:
            origin = replace(origin, processes=lead.processes)
            about = place.learner.incarnation, place.member.shard, loading.to_json(config)
            lead.post(Deed.HOLD, *asdict(Assignment(origin, *about)).values())
        fragments = self.fragments(cut.plan, config)
        if lead is not None:
            lead.meet()
        session, network = open_sync(
            *(bus, place, cut.plan, config, fragments),
            call=thread.call,
            lead=lead,
        )
        island = Island(place, config, session, Meter(started_s))
        observe(place.learner, lambda: network.last_pulse)
        island.report()
        serving = Serving(thread, network, island, self.settings.local.shutdown_s)
        return JoinedIsland(self.settings.local.learner, island, serving, origin, lead)


class JoinedIsland:
    """One learner of a run, for as long as a ``with`` block lasts, or its first process.

    Errors of the network's thread are raised at the next step boundary. ``read_to`` is the cursor
    after the loop's last batch; steps use it while the loop ``reads`` batches, or just did.
    """

    def __init__(
        self,
        local: LearnerSettings,
        island: Island,
        serving: Serving,
        origin: Origin,
        lead: LeadProcess | None,
    ) -> None:
        self.read_to, self.reads = 0, False
        self._local = local
        self._island = island
        self._serving = serving
        self._origin = origin
        self._lead = lead
        self._losses = deque[Any]()
        self._saver: InnerStateSaver | None = None
        self._stepped_s = 0.0
        self._fell_back = False

    def begin(self) -> None:
        """Offer the initial parameters if that is up to this learner, and adopt the log's."""
        self._serving.wait(self._island.offer())
        self._serving.wait(self._island.catch_up())
        self._island.enter(LearnerPhase.TRAINING)
        self._stepped_s = self._island.meter.clock()

    @property
    def config(self) -> RunConfig:
        """The run's config, as the ledger holds it."""
        return self._island.config

    @property
    def done(self) -> bool:
        """True once the run is over: there is no step left to take."""
        return self._island.stopping or self._island.done()

    @property
    def standing(self) -> Standing:
        """Where this learner is now."""
        island, place = self._island, self._island.place
        where = place.start.cursor, place.member.shard, island.now.cursor
        return Standing(
            self.done, self._fell_back, *where, island.progress(), island.session.versions
        )

    def resume(self, kind: StateKind) -> Mapping[str, NDArray[Any]]:
        """Return the optimizer's state that an earlier start of this learner saved, or nothing.

        It waits for the disk. From now on boundaries save the state that they are given. Raises
        ConfigError after an earlier call or a step.
        """
        island, local, restoring = self._island, self._local, self._serving.restored
        start = island.place.learner.incarnation, island.now.step
        if not local.save_every_s:
            return {}
        if restoring.done():
            msg = (
                "The optimizer's state is restored once, before the first step: call restored"
                " earlier, with all that is to be saved in one tree."
            )
            raise ConfigError(msg)
        self._saver = InnerStateSaver(local, self._origin, start[0], kind, process=self._lead)
        self._saver.start()
        try:
            found = self._saver.found.result(RESTORE_S)
        except TimeoutError:
            found = Found(reason=f"the disk gave nothing for {RESTORE_S:g} s")
        restored = found.begin(*start, self.config.train.inner_max_age_steps)
        restoring.set_result(restored)
        if self._lead is not None and restored.inner is InnerState.WARM:
            self._lead.post(Deed.RESTORE, *restored.point)
        return restored.tensors

    def boundary(
        self,
        *,
        tokens: Any,
        loss: Any,
        cursor: int | None = None,
        routed: Mapping[str, Any] | None = None,
        state: Callable[[], Any] | None = None,
    ) -> None:
        """Count a step that was handed to the device; answer, and adopt what is due.

        It waits only in a blocking mode. ``tokens`` is the number that the step trained on,
        ``loss`` its mean loss, a number or a scalar that is still being computed; ``cursor`` is how
        many sequences of the data are used: by default as many as ``batches`` has read, or without
        ``batches`` another ``data.batch`` for each step.
        ``routed`` counts the tokens that reached each unit of a stack so far. ``state`` returns the
        optimizer's state, and is called when a save is due.

        Raises ConfigError for tokens that are not a whole number or are more than a step of the run
        may have, for a loss that is not one number, and for a cursor that goes back.
        """
        island, began_s = self._island, self._stepped_s
        self._serving.check()
        self._fell_back, resets = False, island.session.resets
        if self.done:
            island.session.boundary(island.now, island.meter.loss, idle=True)
            return
        tokens = self._counted(tokens)
        if not self._serving.restored.done():
            start = island.place.learner.incarnation, island.place.start.step
            self._serving.restored.set_result(
                fresh(*start, "the training loop keeps its own optimizer")
            )
        replayed = island.now.cursor < island.place.seen
        island.now = island.now.after_step(tokens, self._cursor_after(cursor), routed)
        self._losses.append(loss)
        self._read_losses(known=island.diverged > 0 or island.session.must_wait(island.now))
        train_s = island.meter.clock() - began_s
        island.meter.trained(train_s, replayed=replayed)
        self._serving.wait(island.boundary())
        self._fell_back = island.session.resets > resets
        if self._saver is not None and state is not None and self._saver.due():
            self._saver.save(state(), island.now)
        self._stepped_s = island.meter.clock()
        island.stepped(StepTimes(0.0, train_s, self._stepped_s - began_s - train_s))

    def _counted(self, tokens: Any) -> int:
        """Return a step's tokens as an int, also where an array counts them."""
        most = self.config.data.batch * self.config.data.seq_len
        count = whole_number(tokens)
        if count is None or count < 0:
            msg = f"A step's tokens are how many it trained on, a whole number: not {tokens!r}."
            raise ConfigError(msg)
        if count > most:
            msg = (
                f"A step trained on {count} tokens, and the run allows {most} (data.batch times"
                " data.seq_len), accumulated batches and all processes together: create the run"
                " with larger ones, or train on less in a step."
            )
            raise ConfigError(msg, path="data.batch")
        return count

    def _cursor_after(self, cursor: int | None) -> int:
        now = self._island.now.cursor
        if cursor is None:
            by_batches = self.reads or self.read_to > now
            cursor = max(self.read_to, now) if by_batches else now + self.config.data.batch
        after = whole_number(cursor)
        if after is None or after < now:
            msg = f"The cursor counts the sequences used so far, {now} or more: not {cursor!r}."
            raise ConfigError(msg)
        return after

    def _read_losses(self, *, known: bool) -> None:
        """Read the losses that are computed; ``known``: wait for all of them."""
        losses = self._losses
        while losses and (known or len(losses) > MOST_PENDING or is_known(losses[0])):
            loss = losses.popleft()
            try:
                value = float(loss)
            except (TypeError, ValueError) as error:
                about = getattr(loss, "shape", None)
                found = repr(loss) if about is None else f"an array of shape {tuple(about)}"
                msg = f"A step's loss is one number, the mean over its tokens: not {found}."
                raise ConfigError(msg) from error
            self._island.read(value, finite=math.isfinite(value))

    def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Answer a finished run's last rounds, then say goodbye; an earlier error is raised."""
        try:
            if kind is None and self._island.done():
                self._serving.wait(self._island.outlast())
        finally:
            if self._saver is not None:
                self._saver.close()
            self._serving.end(error)


def whole_number(value: Any) -> int | None:
    """Return a number of any kind as an int, also one in an array; None if it is not whole."""
    try:
        count = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return count if count == value else None


def is_known(loss: Any) -> bool:
    """Return True if a loss can be read without waiting for the device."""
    ready = getattr(loss, "is_ready", None)
    return ready is None or bool(ready())
