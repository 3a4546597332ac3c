"""The health monitor: follows a run's log, tells who falls silent, and answers over HTTP.

It keeps nothing: started again, it reads what is newest of each kind and answers at once; then it
reads the ledger from its beginning, and knows the same as before.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from skerry.errors import BrokerUnavailable, first_cause
from skerry.protocol.subjects import STREAM_KINDS, Subjects
from skerry.service.reporting import BrokerWatch
from skerry.service.shell import outlast, serve
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed
from skerry.status.recent import RECENT_S
from skerry.status.report import report
from skerry.tasks import TaskGroup
from skerry_health_monitor.alert_log import AlertLog
from skerry_health_monitor.metrics.exporting import Exporting
from skerry_health_monitor.metrics.figures import Known
from skerry_health_monitor.metrics.prometheus import metrics_route
from skerry_health_monitor.metrics.telling import Telling
from skerry_health_monitor.web.faults import ClusterFaults, fault_route, read_token
from skerry_health_monitor.web.page import routes
from skerry_health_monitor.web.picture import Drawn, Page, marks, sections
from skerry_health_monitor.web.server import Connections, application, serve_http
from skerry_health_monitor.web.stream import Hub, PageFrame

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from starlette.routing import BaseRoute

    from skerry.log.base import Bus, Room, StreamInfo
    from skerry.settings.models import HealthSettings, LocalSettings
    from skerry.status.model import RunModel
    from skerry_health_monitor.metrics.sinks import Outlet
    from skerry_health_monitor.web.faults import FaultTarget

log = structlog.get_logger()

MEASURE_S = 15.0


class Monitor:
    """Follows one run across broker restarts, judges its learners, and keeps its alerts.

    ``lost`` asks the broker which learners have lost their connection, and how many seconds ago.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        until_finished: bool,
        link: BrokerWatch | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.feed = RunFeed(bus, run, clock_s=clock_s)
        self.until_finished = until_finished
        self.link = link or BrokerWatch()
        self.alert_log = AlertLog()
        self.streams: list[StreamInfo] = []
        self.rooms: tuple[Room, ...] = ()
        self.brokers_stores: Callable[[], Sequence[StreamStore]] = tuple
        self.lost: Callable[[Collection[str]], Awaitable[Mapping[str, float]]] = no_connections
        self.facts: dict[str, object] = {}
        self.may_inject = False
        self._created_ns = 0
        self._drawn: Drawn = {}

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
            log.warning("run_begins_anew", run=self.feed.name)

    async def _model(self) -> RunModel:
        """Return the newest model, once there is one."""
        await self.feed.begun.wait()
        assert self.feed.model is not None
        return self.feed.model

    async def _judge(self) -> None:
        """Judge every learner once per expected pulse: silence sends no message.

        After a pause of this process itself (starved, stopped, its clock set forward) pulses wait
        to be read: it judges one interval later, once they are.
        """
        held_up, clock_s = False, self.feed.clock_s
        while True:
            model = await self._model()
            pulse_s = model.config.liveness.pulse_s
            if not held_up:
                self.look(model)
            due_s = clock_s() + pulse_s
            await asyncio.sleep(pulse_s)
            held_up = not held_up and clock_s() - due_s > pulse_s / 2

    async def _ask_connections(self) -> None:
        """Ask the broker about learners that are silent: of a dead process it knows at once."""
        while True:
            model = await self._model()
            await asyncio.sleep(model.config.liveness.pulse_s / 2)
            names = model.unconfirmed()
            if names and (found := await self.lost(names)):
                model.closed(found)
                self.look(model)

    def look(self, model: RunModel) -> None:
        """Judge every learner, and see what is wrong now."""
        now_s = self.feed.clock_s()
        if self._created_ns not in {0, model.record.created_ns}:
            self.alert_log.update([], now_s)  # what held was said of another log
        self._created_ns = model.record.created_ns
        changed = model.judge()
        stores = [*map(StreamStore, self.rooms), *self.brokers_stores()]
        malformed = self.feed.counts.since(now_s - RECENT_S)
        wrong = model.alerts(model.judged, stores, self.link.away_s(now_s), malformed)
        if self.alert_log.update(wrong, now_s) or changed:
            self.feed.changed.set()

    async def _measure(self) -> None:
        """Look now and then at how much the run's streams hold, and the account altogether."""
        await self._model()
        bus, subjects = self.feed.bus, Subjects(self.feed.name)
        names = {subjects.stream(kind) for kind in STREAM_KINDS}
        while True:
            with suppress(BrokerUnavailable):
                found = await bus.streams()
                self.streams = [s for s in found if s.name in names]
                self.rooms = await bus.rooms()
            await asyncio.sleep(MEASURE_S)

    def known(self) -> Known | None:
        """Return what metrics are made from, None before the run is in the log."""
        model, counts = self.feed.model, self.feed.counts
        return None if model is None else Known(model, counts, self.streams, self.rooms)

    def frame(self) -> PageFrame:
        """Return what the page shows now."""
        now_s, model = self.feed.clock_s(), self.feed.model
        head = {"now_s": round(now_s, 3), "run": self.feed.name}
        if model is None:
            return PageFrame(None, None, lambda _: [], head)
        page = Page(
            model,
            report(model.view, now_s),
            self.alert_log,
            self.streams,
            self.link.away_since_s,
            {**self.facts, "actions": self.may_inject and self.allows_chaos},
            now_s,
        )
        return PageFrame(model, sections(page, self._drawn), lambda after: marks(page, after), head)


async def no_connections(names: Collection[str]) -> Mapping[str, float]:  # noqa: ARG001 - asked for all
    """Return what a broker without a monitoring port knows of lost connections: nothing."""
    return {}


def page_of(
    monitor: Monitor,
    connections: Connections,
    health: HealthSettings,
    target: FaultTarget | None = None,
) -> tuple[Hub, list[BaseRoute]]:
    """Return what feeds the monitor's page, and its routes; ConfigError for an unfit token file."""
    feed = monitor.feed
    hub = Hub(monitor.frame, feed.changed)
    made = routes(hub, lambda: feed.model, feed.bus, connections.cut)
    monitor.facts["trace_url"] = health.trace_url
    if target is not None and health.token_file is not None:
        token = read_token(health.token_file)
        made.append(fault_route(target, token, lambda: monitor.allows_chaos))
        monitor.may_inject = True
    return hub, made


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

    ``outlets`` are given its metrics besides those who ask for them. Raises ConfigError for a
    token file that cannot be used.
    """
    monitor = Monitor(bus, run, until_finished=until_finished, link=link)
    connections = Connections()
    cluster = local.health.cluster
    target = None if cluster is None else ClusterFaults(cluster)
    hub, page = page_of(monitor, connections, local.health, target)
    telling = Telling(monitor.known, local.metrics.broker_urls)
    monitor.brokers_stores = telling.stores
    monitor.lost = telling.lost
    app = application(lambda: monitor.feed.view, run, [*page, metrics_route(telling.figures)])
    loops = {
        "follow": monitor.follow,
        "page": hub.run,
        "http": lambda: serve_http(app, listening, connections, hub.close),
        "broker": telling.poll,
        "metrics": lambda: telling.write(outlets, local.metrics.every_s),
        "otlp": Exporting(telling.figures).run,
    }
    async with bus:
        await serve(loops, shutdown_s=local.shutdown_s)
