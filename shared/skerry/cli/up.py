"""``skerry up``: a whole cluster on this machine, until its run is finished."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock, wires
from skerry.cli.cluster.nets import namespaces
from skerry.cli.cluster.orders import orders
from skerry.cli.cluster.place import Place, writing
from skerry.cli.cluster.routes import proxied, routes
from skerry.cli.cluster.run import (
    Cluster,
    Stop,
    broker,
    call,
    prepared,
    refuse_state,
    run_stoppable,
    supervisor,
)
from skerry.cli.cluster.services import Team, argv
from skerry.cli.cluster.supervise import Change, Event
from skerry.cli.follow import Feed, is_finished
from skerry.cli.live import keep_showing, screen
from skerry.cli.page import Page, token_kept
from skerry.errors import ConfigError, RunNotFound
from skerry.log import ledger
from skerry.service.connect import bus_from
from skerry.service.control import CONTROL, listening
from skerry.settings import loading
from skerry.settings.checks import masked_url
from skerry.settings.models import RunConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from skerry.cli.cluster.supervise import Supervisor
    from skerry.cli.live import Screen
    from skerry.protocol.messages import RunRecord
    from skerry.settings.models import RunConfig
    from skerry.status.view import Message

EXTENDING = ("train.steps", "train.duration_s")
"""Settings that a run restored from a checkpoint may change."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of each service were asked for; None: as the run's config says."""

    learners: int | None = None
    syncers: int = 1
    checkpointers: int = 1
    evaluators: int = 1


def run_up(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str,
    checkpoint: Path | None,
    fresh: bool,
    counts: Counts,
    nats: str | None,
) -> None:
    """Start a cluster and show it until the run is finished; KeyboardInterrupt if stopped."""
    counted = [] if counts.learners is None else [f"sync.learners={counts.learners}"]
    wanted = loading.load(config, [*sets, *counted])
    place = Place(run)
    with place.held(), screen(began_s=time.time()) as on:
        if fresh:
            place.start_anew()
        if checkpoint is not None and nats is None:
            refuse_state(place)
        restored: list[Path] = []

        async def main(stop: Stop) -> None:
            async with broker(place, wanted, nats, on.say) as served:
                full = prepared(wanted, served.url, place, served.monitor_url)
                cluster = Cluster(place, full, served, stop)
                if checkpoint is not None:
                    extends = [text for text in sets if text.startswith(EXTENDING)]
                    on.say(await restore(cluster, checkpoint, extends))
                    restored.append(checkpoint)
                await _up(cluster, on, counts)

        try:
            run_stoppable(main)
        finally:
            if checkpoint is not None and not restored and nats is None:
                place.clear()  # half a restored log is of no use to anybody


async def _up(cluster: Cluster, on: Screen, counts: Counts) -> None:
    place = cluster.place
    on.say(f"Run {place.run}: broker {cluster.url}, logs in {place.logs}")
    record = await existing(cluster)
    if record is not None and is_finished(record):
        on.say(f"Run {place.run} is finished already: --fresh starts it anew.")
        return
    for sentence in ignored(record, cluster.settings.run):
        on.say(sentence)
    config = cluster.settings.run if record is None else config_of(record)
    team = Team(
        counts.learners or config.sync.learners,
        counts.syncers,
        counts.checkpointers,
        counts.evaluators,
        chaos=config.chaos.allow,
        clocks=config.chaos.allow and config.chaos.clocks,
        netns=config.chaos.allow and config.chaos.netns,
    )
    why = wires.unable() if team.netns and record is not None else ""
    if why:
        on.say(f"The run's services have no network namespaces here: {why}.")
        team = replace(team, netns=False)
    async with _open_to_chaos(cluster, team, on) as shaped:
        with place.announced(cluster.url):
            feed = await conduct(shaped, on, team=team)
    conclude(on, feed)


@contextlib.asynccontextmanager
async def _open_to_chaos(cluster: Cluster, team: Team, on: Screen) -> AsyncGenerator[Cluster]:
    """Yield the cluster with a proxy before its broker, if its run allows faults."""
    if not team.chaos:
        yield cluster
        return
    on.say(f"This run allows faults: `skerry chaos --run {cluster.place.run}` injects them.")
    with token_kept(cluster.place):
        if not proxied(cluster.url):
            if team.netns:
                msg = (
                    "chaos.netns needs a proxy before the broker: let `skerry up` start the broker,"
                    " or give it one nats:// address."
                )
                raise ConfigError(msg, path="chaos.netns")
            yield cluster
            return
        with namespaces(cluster.place, team, cluster.settings.local) as cables:
            async with routes(cluster.place, cluster.url, team.kinds(), cables) as reach:
                yield replace(cluster, reach=reach)


async def conduct(
    cluster: Cluster,
    on: Screen,
    *,
    team: Team,
    script: Callable[[Supervisor, Feed], Coroutine[object, object, None]] | None = None,
    on_message: Callable[[Message, float], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Feed:
    """Run the services until all have finished, showing the run meanwhile.

    ``script`` runs beside them and may interfere; it is cancelled at the end.
    """
    table, kinds = cluster.broker.table, team.kinds()

    def told(event: Event) -> None:
        if event.change is Change.STARTED:
            table.started(event.name, kinds[event.name], event.pid)
        else:
            table.ended(event.name, event.pid)
            clock.sweep(event.pid)
        sentence = tell(event)
        if sentence:
            on.say(sentence)
        if on_event is not None:
            on_event(event)

    kept = supervisor(cluster, team, told)
    heard = broker_watch(on, cluster.url)
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_from(cluster.nats, "view", on_event=heard))
        stack.enter_context(table.kept())
        if team.chaos:
            obeying = listening(cluster.place.folder / CONTROL, orders(kept, cluster.broker.keeper))
            with writing(cluster.place.folder / CONTROL):
                await stack.enter_async_context(obeying)
        feed = Feed(bus, cluster.place.run, on_message=on_message)
        page = Page(cluster.place, chaos=team.chaos)
        beside = [
            asyncio.create_task(page.tell(on.say), name="page"),
            asyncio.create_task(feed.run(), name="feed"),
            asyncio.create_task(keep_showing(feed, on), name="screen"),
        ]
        if script is not None:
            beside.append(asyncio.create_task(_scripted(script, kept, feed), name="script"))
        services = asyncio.create_task(kept.run(), name="services")
        try:
            await _first_failure(services, beside)
        finally:
            kept.ask_stop()
            for task in beside:
                task.cancel()
            await asyncio.gather(services, *beside, return_exceptions=True)
            cluster.stop.supervisor = None
            now = feed.report()
            if now is not None:
                on.show(now)
    return feed


async def restore(cluster: Cluster, checkpoint: Path, extends: Sequence[str] = ()) -> str:
    """Write a checkpoint into the empty log and return what the checkpointer says about it.

    ``extends`` are settings that say how much longer the run goes on than the checkpoint's did.
    """
    settings_file = str(cluster.place.settings)  # how a bucket is reached
    given = [str(checkpoint), "--config", settings_file]
    given += ["--nats", cluster.url, "--run", cluster.place.run]
    for text in extends:
        given += ["--set", text]
    return (
        await call(cluster.place, argv("checkpointer", "checkpoints", "restore", *given), "restore")
    ).strip()


async def existing(cluster: Cluster) -> RunRecord | None:
    """Return the run's record if the log holds one."""
    async with bus_from(cluster.nats, "up") as bus:
        try:
            return await ledger.read_run(bus, cluster.place.run)
        except RunNotFound:
            return None


def config_of(record: RunRecord) -> RunConfig:
    """Return the config that every service of the run takes from the log."""
    return loading.run_config_from_json(record.config_json)


def ignored(record: RunRecord | None, wanted: RunConfig) -> list[str]:
    """Return what to say of a run that the log holds already: its own config counts."""
    if record is None:
        return []
    given = loading.differences(wanted, RunConfig())
    unlike = loading.differences(config_of(record), wanted)
    paths = [path for path in unlike if path in given]
    told = [f"Going on with run {record.run} as the log has it."]
    if paths:
        told.append(f"The run keeps its own {', '.join(paths)}: what was given is not used.")
    return told


def broker_watch(on: Screen, url: str) -> Callable[[str, Mapping[str, str]], None]:
    """Return what says, once each time, that the broker is away and that it is back."""
    away = False

    def heard(event: str, _fields: Mapping[str, str]) -> None:
        nonlocal away
        if event == "disconnected" and not away:
            away = True
            on.say(
                f"The broker at {masked_url(url)} is away: learners go on training, this view "
                "stands still, and everything catches up once it is back."
            )
        elif event == "reconnected" and away:
            away = False
            on.say("The broker is back.")

    return heard


def tell(event: Event) -> str:
    """Return the sentence for a change that a person should know about, or an empty string."""
    match event.change:
        case Change.CRASHED:
            return (
                f"{event.name} (pid {event.pid}) {_ended(event)}; "
                f"it starts again in {event.delay_s:.0f} s."
            )
        case Change.REFUSED:
            return f"{event.name} stopped for good: {event.sentence or event.code}"
        case Change.STARTED | Change.FINISHED | Change.STOPPED:
            return ""


def _ended(event: Event) -> str:
    if event.code < 0:
        return f"was ended by signal {-event.code}"
    why = f" ({event.sentence})" if event.sentence else ""
    return f"ended with {event.code}{why}"


def conclude(on: Screen, feed: Feed) -> None:
    """Say how it ended and what to do next."""
    now = feed.report()
    if now is None:
        return
    if now.run.finished:
        on.say(f"Run {now.run.run} is finished after {now.run.step} steps.")
    else:
        on.say(f"Run {now.run.run} stopped at step {now.run.step}: the same command goes on.")
    if now.run.checkpoint:
        on.say(f"Checkpoint: {now.run.checkpoint}")


async def _scripted(
    script: Callable[[Supervisor, Feed], Coroutine[object, object, None]],
    kept: Supervisor,
    feed: Feed,
) -> None:
    await script(kept, feed)


async def _first_failure(services: asyncio.Task[None], beside: list[asyncio.Task[None]]) -> None:
    """Wait for the services; an error beside them ends the wait."""
    pending = {services, *beside}
    while services in pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
