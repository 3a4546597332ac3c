"""The health monitor: follows a run's log, reports who falls silent, and answers over HTTP.

It keeps nothing: started again, it reads what is newest of each kind and answers at once; then it
reads the ledger from its beginning, and knows the same as before.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from skerry.errors import BrokerUnavailable, first_cause
from skerry.log.base import Bus, Room, StreamInfo
from skerry.log.streams import specs
from skerry.service.reporting import BrokerWatch
from skerry.service.shell import outlast, serve
from skerry.settings.local import HealthSettings, LocalSettings
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed
from skerry.status.model import RunModel, RunSnapshot
from skerry.tasks import TaskGroup
from skerry.telemetry.metrics import Figure, flat
from skerry_health_monitor.alert_log import AlertLog
from skerry_health_monitor.metrics.broker import Brokers
from skerry_health_monitor.metrics.exporting import export, metrics_route
from skerry_health_monitor.metrics.figures import figures
from skerry_health_monitor.metrics.outlets import Outlet, Row, write_rows
from skerry_health_monitor.web.faults import Inject, fault_route, inject
from skerry_health_monitor.web.gate import gate_for, read_token
from skerry_health_monitor.web.sections import marks, sections
from skerry_health_monitor.web.server import application, serve_http
from skerry_health_monitor.web.stream import Hub, PageFrame, stream_route

log = structlog.get_logger()

MEASURE_S = 15.0


class Monitor:
    """Follows one run across broker restarts, judges its learners, and keeps its alerts.

    ``brokers`` are asked which learners have lost their connection, and how full their stores are.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        until_finished: bool,
        link: BrokerWatch | None = None,
        brokers: Brokers | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.feed = RunFeed(bus, run, clock_s=clock_s)
        self.until_finished = until_finished
        self.link = link or BrokerWatch()
        self.brokers = brokers or Brokers()
        self.alert_log = AlertLog()
        self.streams: list[StreamInfo] = []
        self.rooms: tuple[Room, ...] = ()
        self.trace_url = ""
        self.may_inject = False
        self._created_ns = 0

    @property
    def allows_chaos(self) -> bool:
        """Whether the run says that faults may be injected into it."""
        return self.feed.model is not None and self.feed.model.config.chaos.allow

    async def follow(self) -> None:
        """Follow the run for ever, or until it is finished where that was asked for."""
        loops = {
            "feed": self._feed(),
            "judge": self._judge(),
            "connections": self._ask_connections(),
            "streams": self._measure(),
        }
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(loop, name=name) for name, loop in loops.items()]
                if self.until_finished:
                    await self.feed.finished.wait()
                    for task in tasks:
                        task.cancel()
        except BaseExceptionGroup as error:
            raise first_cause(error) from error

    async def _feed(self) -> None:
        while True:
            await outlast(self.feed.session, (BrokerUnavailable,))
            log.warning("run_begins_again", run=self.feed.name)

    async def _model(self) -> RunModel:
        """Return the newest model, once there is one."""
        await self.feed.begun.wait()
        assert self.feed.model is not None
        return self.feed.model

    async def _judge(self) -> None:
        """Judge every learner once per expected pulse: silence sends no message.

        After a pause of this process itself (starved, stopped, its clock set forward), or while
        the broker was away, pulses wait to be read: it judges one interval later, once they are.
        """
        held_up, clock_s = False, self.feed.clock_s
        while True:
            model = await self._model()
            pulse_s = model.config.liveness.pulse_s
            if not held_up:
                self.look()
            due_s, was_away = clock_s() + pulse_s, self.link.away_since_s is not None
            await asyncio.sleep(pulse_s)
            is_back = was_away and self.link.away_since_s is None
            held_up = not held_up and (is_back or clock_s() - due_s > pulse_s / 2)

    async def _ask_connections(self) -> None:
        """Ask the broker about learners that are silent: of a dead process it knows at once."""
        while True:
            model = await self._model()
            await asyncio.sleep(model.config.liveness.pulse_s / 2)
            names = model.unconfirmed()
            if names and (found := await self.brokers.lost(names)):
                model.closed(found)
                self.look()

    def look(self) -> None:
        """Judge every learner, and see what is wrong now."""
        model, now = self.feed.model, self.snapshot()
        if model is None or now is None:
            return
        if self._created_ns not in {0, model.record.created_ns}:
            self.alert_log.update([], now.now_s)  # what held was said of another log
        self._created_ns = model.record.created_ns
        changed = model.judge(now.report)
        if self.alert_log.update(now.alerts, now.now_s) or changed:
            self.feed.changed.set()

    def snapshot(self) -> RunSnapshot | None:
        """Return the run as of now, None before it is in the log."""
        servers = self.brokers.servers()
        stores = [StreamStore(room, server.name) for server in servers for room in server.rooms]
        away_s = self.link.away_s(self.feed.clock_s())
        return self.feed.snapshot([*map(StreamStore, self.rooms), *stores], away_s)

    async def _measure(self) -> None:
        """Look now and then at how much the run's streams hold, and the account altogether."""
        bus = self.feed.bus
        while True:
            record = (await self._model()).record
            names = {spec.name for spec in specs(record.run, shards=record.shards)}
            with suppress(BrokerUnavailable):
                found = await bus.streams()
                self.streams = [s for s in found if s.name in names]
                self.rooms = await bus.rooms()
            await asyncio.sleep(MEASURE_S)

    def figures(self) -> list[Figure]:
        """Return every metric as of now."""
        servers = self.brokers.servers()
        return figures(self.snapshot(), self.feed.counts, self.streams, self.rooms, servers)

    def row(self) -> Row | None:
        """Return what outlets are given now, None before the run is in the log."""
        if self.feed.view is None:
            return None
        view = self.feed.view
        return Row(self.feed.clock_s(), view.step, flat(self.figures()), last=view.finished)

    def frame(self) -> PageFrame:
        """Return what the page shows now."""
        head = {"now_s": round(self.feed.clock_s(), 3), "run": self.feed.name}
        now = self.snapshot()
        if now is None:
            return PageFrame(None, None, lambda _: [], head)
        may_inject = self.may_inject and self.allows_chaos
        more = {"trace_url": self.trace_url, "actions": may_inject}
        shown = sections(now, self.alert_log, self.streams, self.link.away_since_s, more)
        return PageFrame(now.model, shown, lambda after: marks(now.model, after), head)


def page_of(
    monitor: Monitor, health: HealthSettings, faults: Inject | None = None
) -> tuple[Hub, ASGIApp]:
    """Return what feeds the monitor's page, and the application behind its gate.

    Raises ConfigError for a token file that cannot be used, or is missing beyond the loopback.
    """
    feed = monitor.feed
    hub = Hub(monitor.frame, feed.changed)
    monitor.trace_url = health.trace_url
    more: list[BaseRoute] = [stream_route(hub), metrics_route(monitor.figures)]
    if faults is not None and health.token_file is not None:
        token = read_token(health.token_file)
        more.append(fault_route(faults, token, lambda: monitor.allows_chaos))
        monitor.may_inject = True
    return hub, gate_for(application(feed, monitor.snapshot, more), health)


async def health_monitor(
    bus: Bus,
    run: str,
    listening: socket.socket,
    *,
    link: BrokerWatch,
    local: LocalSettings,
    outlets: Sequence[Outlet],
    until_finished: bool,
) -> None:
    """Serve one run's health until stopped, or until the run is finished where asked.

    ``outlets`` get its metrics, beside clients that ask for them. Raises what ``page_of`` does.
    """
    brokers = Brokers(local.metrics.broker_urls)
    monitor = Monitor(bus, run, until_finished=until_finished, link=link, brokers=brokers)
    cluster = local.health.cluster
    faults = None if cluster is None else partial(inject, cluster)
    hub, app = page_of(monitor, local.health, faults)
    loops = {
        "follow": monitor.follow,
        "page": hub.run,
        "http": lambda: serve_http(app, listening, hub.close),
        "broker": brokers.run,
        "metrics": lambda: write_rows(outlets, monitor.row, local.metrics.every_s),
        "otlp": lambda: export(monitor.figures),
    }
    async with bus:
        await serve(loops, shutdown_s=local.shutdown_s)
