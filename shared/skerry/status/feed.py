"""Follow a run's log into its model, or read it once: what every viewer begins with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from skerry.errors import BrokerUnavailable, BusError, RunNotFound, first_cause
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    Pulse,
    Quarantine,
    Round,
    RunRecord,
    RunState,
)
from skerry.protocol.subjects import Subjects
from skerry.settings.loading import run_config_from_json
from skerry.status.alerts import StreamStore
from skerry.status.model import RunModel, RunSnapshot
from skerry.status.recent import RECENT_S
from skerry.status.report import RunReport, report
from skerry.status.sources import MessageCounts, RunMessage, Seen, Sources
from skerry.status.view import RunView
from skerry.tasks import TaskGroup

OnMessage = Callable[[RunMessage, float], None]

AHEAD_S = 60.0
RETRY_S = 1.0
AHEAD: tuple[type[RunMessage], ...] = (MemberRecord, Pulse, Commit, CheckpointRecord, Evaluation)
FOLLOWED: tuple[type[RunMessage], ...] = (*AHEAD, Round, Quarantine)
STORED: tuple[type[RunMessage], ...] = (MemberRecord, Evaluation, Commit)
NEWEST: tuple[type[RunMessage], ...] = (Pulse, CheckpointRecord, Quarantine)
"""A single look reads all of the STORED kinds, and only the newest of the NEWEST kinds."""


class RunFeed:
    """The model of one run; ``run`` keeps it as new as the log until it is cancelled.

    ``begun`` is set once there is a model, ``finished`` once the run is and all of its rounds are
    in the model, ``changed`` with each message. ``counts`` is what has been read.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        on_message: OnMessage | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.bus = bus
        self.name = run
        self.clock_s = clock_s
        self.model: RunModel | None = None
        self.counts = MessageCounts()
        self.begun, self.changed, self.finished = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._on_message = on_message

    @property
    def view(self) -> RunView | None:
        """What is known of the run, None before it is in the log."""
        return None if self.model is None else self.model.view

    def report(self) -> RunReport | None:
        """Return the rows as of now, or None before there is a run."""
        return None if self.view is None else report(self.view, self.clock_s())

    def snapshot(
        self, stores: Sequence[StreamStore] = (), away_s: float | None = None
    ) -> RunSnapshot | None:
        """Return the run as of now, or None before there is one; see ``RunModel.snapshot``."""
        malformed = self.counts.since(self.clock_s() - RECENT_S)
        return None if self.model is None else self.model.snapshot(stores, away_s, malformed)

    async def run(self) -> None:
        """Wait for the run, then fold in all that is said about it, for ever.

        Where another log takes the place of this one, the model starts again, as versions do.
        Raises ConfigError for the settings of another release.
        """
        while True:
            try:
                await self.session()
            except (BrokerUnavailable, BaseExceptionGroup) as error:
                cause = first_cause(error)
                if not isinstance(cause, BrokerUnavailable):
                    raise cause from error
                await asyncio.sleep(RETRY_S)

    async def session(self) -> None:
        """Follow one log of the run until another one takes its place."""
        record = await ledger.wait_run(self.bus, self.name)
        config = run_config_from_json(record.config_json, record.skerry_version)
        model = RunModel(record, config, self.clock_s)
        sources = Sources(self.bus, self.name, self.counts, record.fragments, self.clock_s)
        await _look_ahead(model, sources, AHEAD)
        self.model = model
        self.begun.set()
        self._pass_on(record, self.clock_s())
        async with TaskGroup() as group:
            following = [
                group.create_task(self._follow(kind, sources, model), name=kind.__name__)
                for kind in FOLLOWED
            ]
            await self._until_replaced(sources, model)
            for task in following:
                task.cancel()

    async def _until_replaced(self, sources: Sources, model: RunModel) -> None:
        """Follow the run's own record until it is that of another run of that name."""
        records = sources.follow(RunRecord)
        async with aclosing(records):
            async for seen in records:
                try:
                    record = await ledger.read_run(self.bus, self.name)  # leaves out a forged one
                except RunNotFound:
                    continue
                if record.created_ns != model.record.created_ns:
                    return
                # Its end may be read before its last commits are.
                if record.state is RunState.FINISHED:
                    await _look_ahead(model, sources, (Commit,))
                self._take(model, replace(seen, message=record))
        msg = "The log ended while it was followed."
        raise BusError(msg)

    async def _follow(self, kind: type[RunMessage], sources: Sources, model: RunModel) -> None:
        messages = sources.follow(kind)
        async with aclosing(messages):
            async for seen in messages:
                self._take(model, seen)

    def _take(self, model: RunModel, seen: Seen[RunMessage]) -> None:
        model.take(seen)
        if model.view.finished and not model.view.counting:
            self.finished.set()
        self._pass_on(seen.message, seen.at_s)

    def _pass_on(self, message: RunMessage, at_s: float) -> None:
        self.changed.set()
        if self._on_message is not None:
            self._on_message(message, at_s)


async def _look_ahead(model: RunModel, sources: Sources, kinds: Sequence[type[RunMessage]]) -> None:
    """Take note of what is newest before the history that leads to it is read.

    That may take minutes, in which the newest commit read so far would look days old. Raises
    BrokerUnavailable for a log that another one replaced meanwhile, and may lack its end.
    """
    try:
        async with asyncio.timeout(AHEAD_S):
            found = await asyncio.gather(*(sources.newest(kind) for kind in kinds))
    except TimeoutError as error:
        msg = "The newest records of the log could not be read in time."
        raise BrokerUnavailable(msg) from error
    for messages in found:
        for seen in messages:
            model.peek(seen)


async def read_model(bus: Bus, run: str, clock_s: Callable[[], float] = time.time) -> RunModel:
    """Return the model of the run as it stands in the log; RunNotFound if there is none."""
    record = await ledger.read_run(bus, run)
    config = run_config_from_json(record.config_json, record.skerry_version)
    model = RunModel(record, config, clock_s)
    behind_ns = int(clock_s() * 1e9) - await bus.now_ns(Subjects(run).ledger("run"))
    sources = Sources(bus, run, MessageCounts(), record.fragments, clock_s, behind_ns)
    for kind in STORED:
        messages = sources.stored(kind)
        async with aclosing(messages):
            async for seen in messages:
                model.take(seen)
    for kind in NEWEST:
        for seen in await sources.newest(kind):
            model.take(seen)
    return model
