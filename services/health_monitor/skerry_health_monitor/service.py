"""The health monitor: follows a run's log, tells who falls silent, and answers over HTTP.

It keeps nothing: started again, it reads the newest commits, members and pulses and answers at
once; then it reads the ledger from its beginning, and knows the same as before.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.bus import ledger, presence
from skerry.errors import BrokerUnavailable, WireError, first_cause
from skerry.runtime.service import serve
from skerry.settings import RunConfig
from skerry.tasks import TaskGroup
from skerry_health_monitor.link import Link
from skerry_health_monitor.sources import Sources, Tally
from skerry_health_monitor.watch import Watch
from skerry_health_monitor.web import application, serve_http

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from skerry.bus.base import Bus, Record
    from skerry.bus.view import RunView
    from skerry.wire.messages import Commit

log = structlog.get_logger()

T = TypeVar("T")

RETRY_S = 1.0


class Monitor:
    """Follows one run across broker restarts; ``tally`` counts what it has read."""

    def __init__(
        self, bus: Bus, run: str, *, until_finished: bool, link: Link | None = None
    ) -> None:
        self.bus = bus
        self.run = run
        self.until_finished = until_finished
        self.link = link or Link()
        self.tally = Tally()
        self.watch: Watch | None = None
        self.changed = asyncio.Event()

    def view(self) -> RunView | None:
        """Return what is known of the run, None before it is in the log."""
        return self.watch.view if self.watch is not None else None

    async def follow(self) -> None:
        """Follow the run for ever, or until it is finished where that was asked for."""
        while True:
            try:
                await self._session()
            except (BrokerUnavailable, BaseExceptionGroup) as error:
                cause = first_cause(error)
                if not isinstance(cause, BrokerUnavailable):
                    raise cause from error
            else:
                return
            log.warning("session_restarts", cause=str(cause))
            await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        record = await ledger.wait_run(self.bus, self.run)
        config = RunConfig.model_validate_json(record.config_json)
        watch = Watch(record, config)
        for known in (await ledger.members(self.bus, self.run)).values():
            watch.take(known)
        for pulse in (await presence.last_pulses(self.bus, self.run)).values():
            watch.take(pulse)
        with suppress(WireError):  # what cannot be read is left out below; this only saves time
            for newest in (await ledger.last_commits(self.bus, self.run)).values():
                watch.know(newest)
        self.watch = watch
        async with TaskGroup() as group:
            followers = [
                group.create_task(loop, name=name) for name, loop in self._loops(watch).items()
            ]
            judging = group.create_task(_judge(watch, config.liveness.pulse_s), name="judge")
            if self.until_finished:
                await ledger.wait_finished(self.bus, self.run)
                for task in (*followers, judging):
                    task.cancel()

    def _loops(self, watch: Watch) -> dict[str, Coroutine[None, None, None]]:
        sources = Sources(self.bus, self.run, self.tally)
        return {
            "run": self._fold(sources.runs(), watch.take),
            "members": self._fold(sources.members(), watch.take),
            "commits": self._commits(sources.commits(), watch),
            "checkpoints": self._fold(sources.checkpoints(), watch.take),
            "evaluations": self._fold(sources.evaluations(), watch.take),
            "pulses": self._fold(sources.pulses(), watch.take),
            "rounds": self._fold(sources.rounds(), watch.opened),
        }

    async def _fold(
        self, messages: AsyncGenerator[tuple[Record, T]], take: Callable[[T], None]
    ) -> None:
        async with aclosing(messages):
            async for _, message in messages:
                take(message)
                self.changed.set()

    async def _commits(self, commits: AsyncGenerator[tuple[Record, Commit]], watch: Watch) -> None:
        async with aclosing(commits):
            async for record, commit in commits:
                watch.committed(commit, record.sequence, record.time_ns / 1e9)
                self.changed.set()


async def _judge(watch: Watch, every_s: float) -> None:
    """Look at every learner once per expected pulse: silence sends no message."""
    while True:
        watch.judge()
        await asyncio.sleep(every_s)


async def health_monitor(
    bus: Bus,
    run: str,
    listening: socket.socket,
    *,
    link: Link,
    until_finished: bool,
    shutdown_s: float,
) -> None:
    """Serve one run's health until stopped, or until the run is finished where asked."""
    monitor = Monitor(bus, run, until_finished=until_finished, link=link)
    app = application(monitor.view, run)
    async with bus:
        await serve(
            {"follow": monitor.follow, "http": lambda: serve_http(app, listening)},
            shutdown_s=shutdown_s,
        )
