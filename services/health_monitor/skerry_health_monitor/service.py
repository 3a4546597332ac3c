"""The health monitor: follows a run's log, tells who falls silent, and answers over HTTP.

It keeps nothing: started again, it reads what is newest of each kind and answers at once; then it
reads the ledger from its beginning, and knows the same as before.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.errors import BrokerUnavailable, BusError
from skerry.log import ledger
from skerry.protocol.subjects import STREAM_KINDS, Subjects
from skerry.service.shell import outlast, serve
from skerry.service.watch import BrokerWatch
from skerry.settings.loading import run_config_from_json
from skerry.status.alerts import Situation, Store, alerts
from skerry.status.recent import RECENT_S
from skerry.status.report import report
from skerry.tasks import TaskGroup
from skerry_health_monitor.metrics.exporting import Exporting
from skerry_health_monitor.metrics.figures import Known
from skerry_health_monitor.metrics.prometheus import metrics_route
from skerry_health_monitor.metrics.telling import Telling
from skerry_health_monitor.watching.book import Book
from skerry_health_monitor.watching.sources import Sources, Tally
from skerry_health_monitor.watching.timeline import interval_s
from skerry_health_monitor.watching.watch import Watch
from skerry_health_monitor.web.faults import ClusterFaults, fault_route, read_token
from skerry_health_monitor.web.page import routes
from skerry_health_monitor.web.picture import Drawn, Scene, marks, picture
from skerry_health_monitor.web.server import Connections, application, serve_http
from skerry_health_monitor.web.stream import Frame, Hub

if TYPE_CHECKING:
    import socket
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Collection,
        Coroutine,
        Mapping,
        Sequence,
    )

    from starlette.routing import BaseRoute

    from skerry.log.base import Bus, Record, Room, StreamInfo
    from skerry.protocol.messages import Commit, MemberRecord
    from skerry.settings.models import HealthSettings, LocalSettings
    from skerry.status.view import RunView
    from skerry_health_monitor.metrics.sinks import Outlet
    from skerry_health_monitor.web.faults import FaultTarget

log = structlog.get_logger()

T = TypeVar("T")

MEASURE_S = 15.0


class Monitor:
    """Follows one run across broker restarts; ``tally`` counts what it has read."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        until_finished: bool,
        link: BrokerWatch | None = None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.clock_s = clock_s
        self.bus = bus
        self.run = run
        self.until_finished = until_finished
        self.link = link or BrokerWatch()
        self.tally = Tally()
        self.watch: Watch | None = None
        self.book = Book()
        self.streams: list[StreamInfo] = []
        self.rooms: tuple[Room, ...] = ()
        self.brokers_stores: Callable[[], Sequence[Store]] = tuple
        self.lost: Callable[[Collection[str]], Awaitable[Mapping[str, float]]] = nobody
        self.facts: dict[str, object] = {}
        self.may_inject = False
        self._drawn: Drawn = {}
        self.changed = asyncio.Event()

    def view(self) -> RunView | None:
        """Return what is known of the run, None before it is in the log."""
        return self.watch.view if self.watch is not None else None

    @property
    def allows_chaos(self) -> bool:
        """Whether the run says that faults may be injected into it."""
        return self.watch is not None and self.watch.config.chaos.allow

    async def follow(self) -> None:
        """Follow the run for ever, or until it is finished where that was asked for."""
        while not await outlast(self._session, (BrokerUnavailable,)):
            log.warning("run_begins_anew", run=self.run)
            self.book.update([], self.clock_s())  # what held was said of another log

    async def _session(self) -> bool:
        """Follow one log of the run; True once it is over, False where another log took its place.

        All that is known of a log ends with it: another one counts versions and starts from 1
        again, and would look as if it had been read already.
        """
        record = await ledger.wait_run(self.bus, self.run)
        config = run_config_from_json(record.config_json, record.skerry_version)
        watch = Watch(record, config, self.clock_s)
        sources = Sources(self.bus, self.run, self.tally, record.fragments, self.clock_s)
        members, pulses, commits, checkpoint, evaluation = await asyncio.gather(
            sources.newest_members(),
            sources.newest_pulses(),
            sources.newest_commits(),
            sources.newest_checkpoint(),
            sources.newest_evaluation(),
        )
        watch.know_starts(max((stored.sequence for stored, _ in members), default=0))
        for stored, member in members:
            watch.joined(member, stored.sequence, stored.time_ns)
        for pulse in pulses:
            watch.take(pulse)
        if checkpoint is not None:
            watch.take(checkpoint)
        for stored, newest in commits:
            watch.know(newest, stored.sequence, stored.time_ns)
        if evaluation is not None:
            watch.know_evaluation(evaluation)
        self.watch = watch
        async with TaskGroup() as group:
            followers = [
                group.create_task(loop, name=name)
                for name, loop in self._loops(sources, watch).items()
            ]
            over = await self._until_over(sources, watch)
            for task in followers:
                task.cancel()
        return over

    async def _until_over(self, sources: Sources, watch: Watch) -> bool:
        """Follow the run's own record; see ``_session`` for what is returned, and when."""
        runs = sources.runs()
        async with aclosing(runs):
            async for _, record in runs:
                if record.created_ns != watch.record.created_ns:
                    return False
                watch.take(record)
                self.changed.set()
                if self.until_finished and watch.view.finished:
                    return True
        msg = "The log ended while it was followed."
        raise BusError(msg)

    def _loops(self, sources: Sources, watch: Watch) -> dict[str, Coroutine[None, None, None]]:
        return {
            "members": self._members(sources.members(), watch),
            "commits": self._commits(sources.commits(), watch),
            "checkpoints": self._fold(sources.checkpoints(), watch.take),
            "evaluations": self._fold(sources.evaluations(), watch.take),
            "pulses": self._fold(sources.pulses(), watch.take),
            "rounds": self._fold(sources.rounds(), watch.opened),
            "judge": self._judge(watch),
            "doubts": self._doubts(watch),
            "streams": self._measure(),
        }

    async def _fold(
        self, messages: AsyncGenerator[tuple[Record, T]], take: Callable[[T], None]
    ) -> None:
        async with aclosing(messages):
            async for _, message in messages:
                take(message)
                self.changed.set()

    async def _members(
        self, members: AsyncGenerator[tuple[Record, MemberRecord]], watch: Watch
    ) -> None:
        async with aclosing(members):
            async for record, member in members:
                watch.joined(member, record.sequence, record.time_ns)
                self.changed.set()

    async def _commits(self, commits: AsyncGenerator[tuple[Record, Commit]], watch: Watch) -> None:
        async with aclosing(commits):
            async for record, commit in commits:
                watch.committed(commit, record.sequence, record.time_ns)
                self.changed.set()

    async def _judge(self, watch: Watch) -> None:
        """Judge every learner once per expected pulse: silence sends no message.

        After a pause of this process itself (starved, stopped, its clock set forward) pulses wait
        to be read: it judges one interval later, once they are.
        """
        pulse_s, held_up = watch.config.liveness.pulse_s, False
        while True:
            if not held_up:
                self._look(watch)
            due_s = self.clock_s() + pulse_s
            await asyncio.sleep(pulse_s)
            held_up = not held_up and self.clock_s() - due_s > pulse_s / 2

    async def _doubts(self, watch: Watch) -> None:
        """Ask the broker about whoever is silent: of a dead process it knows at once."""
        while True:
            await asyncio.sleep(watch.config.liveness.pulse_s / 2)
            names = watch.doubted()
            if names and (found := await self.lost(names)):
                watch.closed(found)
                self._look(watch)

    def _look(self, watch: Watch) -> None:
        """Judge everybody, and see what is wrong now."""
        changed = watch.judge()
        now_s = self.clock_s()
        seen = Situation(
            now_s,
            watch.told,
            watch.history.lately,
            None if watch.view.counting else interval_s(watch.history.timeline.rounds),
            watch.config.checkpoint.every_s,
            watch.config.sync.quorum,
            watch.config.sync.h_steps,
            watch.config.sync.round_timeout_s,
            [*map(Store, self.rooms), *self.brokers_stores()],
            self.link.away_s(now_s),
            self.tally.since(now_s - RECENT_S),
            judging=watch.view.judging,
        )
        if self.book.update(alerts(seen), now_s) or changed:
            self.changed.set()

    async def _measure(self) -> None:
        """Look now and then at how much the run's streams hold, and the account altogether."""
        names = {Subjects(self.run).stream(kind) for kind in STREAM_KINDS}
        while True:
            with suppress(BrokerUnavailable):
                found = await self.bus.streams()
                self.streams = [s for s in found if s.name in names]
                self.rooms = await self.bus.rooms()
            await asyncio.sleep(MEASURE_S)

    def known(self) -> Known | None:
        """Return what metrics are made from, None before the run is in the log."""
        watch = self.watch
        if watch is None:
            return None
        return Known(
            view=watch.view,
            config=watch.config,
            release=watch.record.skerry_version,
            sums=watch.sums,
            read=self.tally.read,
            malformed=self.tally.malformed,
            streams=self.streams,
            rooms=self.rooms,
        )

    def frame(self) -> Frame:
        """Return what the page shows now."""
        now_s = self.clock_s()
        head = {"now_s": round(now_s, 3), "run": self.run}
        watch = self.watch
        if watch is None:
            return Frame(None, None, lambda _: [], head)
        scene = Scene(
            watch,
            report(watch.view, now_s),
            self.book,
            self.streams,
            self.link.away_since_s,
            {**self.facts, "actions": self.may_inject and self.allows_chaos},
            now_s,
        )
        return Frame(watch, picture(scene, self._drawn), lambda after: marks(scene, after), head)


async def nobody(names: Collection[str]) -> Mapping[str, float]:  # noqa: ARG001 - asked for all
    """Return what a broker without a monitoring port tells of lost connections: nothing."""
    return {}


def page_of(
    monitor: Monitor,
    connections: Connections,
    health: HealthSettings,
    target: FaultTarget | None = None,
) -> tuple[Hub, list[BaseRoute]]:
    """Return what feeds the monitor's page, and its routes; ConfigError for an unfit token file."""
    hub = Hub(monitor.frame, monitor.changed)
    made = routes(hub, lambda: monitor.watch, monitor.bus, connections.cut)
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
    app = application(monitor.view, run, [*page, metrics_route(telling.figures)])
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
