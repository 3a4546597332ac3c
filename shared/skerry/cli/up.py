"""``skerry up``: a whole cluster on this machine, until its run is finished."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skerry.cli import ready
from skerry.cli.cluster import clock, devices
from skerry.cli.cluster.broker import KEYS
from skerry.cli.cluster.cluster import (
    Cluster,
    StopSignal,
    Team,
    call,
    note,
    prepared,
    run_stoppable,
    served,
    stages,
)
from skerry.cli.cluster.faults import FaultControl
from skerry.cli.cluster.folder import RunFolder, last_event, size_of
from skerry.cli.cluster.proxy import Proxy
from skerry.cli.cluster.supervisor import Change, ProcessEvent, Supervisor
from skerry.cli.programs import argv_of
from skerry.cli.viewer import Screen, keep_showing
from skerry.errors import ConfigError, RunNotFound
from skerry.log import ledger
from skerry.protocol.messages import RunState
from skerry.service import interrupts
from skerry.service.control import CONTROL, listening
from skerry.service.entry import bus_from
from skerry.service.private import private_file, writing
from skerry.settings import loading
from skerry.settings.checks import masked_url, refuse_code, remark_on_rate
from skerry.settings.models import ENDS, RunConfig
from skerry.status.feed import RunFeed
from skerry.status.format import clip, printable
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from skerry.protocol.messages import RunRecord
    from skerry.settings.local import NatsSettings
    from skerry.status.sources import RunMessage

MONITOR = "health-monitor"
TRAINING = {"learner", "syncer"}
"""Services that end with the last step."""
LOOK_S = 0.2


def run_up(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str,
    checkpoint: str | None,
    fresh: bool,
    team: Team,
    nats: str | None,
) -> None:
    """Start a cluster and show it until the run is finished; KeyboardInterrupt if stopped."""
    counted = [f"sync.learners={team.learners}"] if team.learners else []
    wanted = loading.load(config, [*sets, *counted])
    further = [text for text in sets if text.startswith(ENDS)]
    if fresh and nats is not None:
        msg = (
            "--fresh discards the log of a broker in this folder, and nothing at --nats: take"
            " another name with --run."
        )
        raise ConfigError(msg, path="fresh")
    ready.check(wanted, nats, checkpoint, further)
    folder = RunFolder(run)
    interrupts.raise_again()  # from here on there is something to stop
    with folder.held(), Screen(began_s=time.time()) as on:
        if fresh:
            folder.start_afresh()
        if checkpoint is not None and nats is None and folder.has_log:
            msg = (
                f"{folder.broker} already holds a log of run {run!r}: add --fresh to discard it, "
                "or take another name with --run."
            )
            raise ConfigError(msg, path="run")
        incomplete = checkpoint is not None and nats is None

        async def main(stop: StopSignal) -> None:
            nonlocal incomplete
            async with served(folder, wanted, nats, on.say) as broker:
                cluster = Cluster(folder, prepared(wanted, broker, folder), broker, stop)
                if sentence := unused_address(wanted.local.nats, nats):
                    on.say(sentence)
                if checkpoint is not None:
                    on.say(printable(await restore(cluster, checkpoint, further)))
                    incomplete = False
                await _up(cluster, on, team, fresh=fresh)

        try:
            run_stoppable(main, on.say)
        finally:
            if incomplete:
                folder.clear()  # half a restored log is of no use


def unused_address(given: NatsSettings, nats: str | None) -> str:
    """Return what to say of a broker that is set and not used; empty where none is."""
    if nats is not None or "url" not in given.model_fields_set:
        return ""
    url = masked_url(given.url)
    return f"nats.url ({url}) is not used: `skerry up` starts a broker of its own without --nats."


async def restore(cluster: Cluster, checkpoint: str, extends: Sequence[str] = ()) -> str:
    """Write a checkpoint into the empty log and return what the checkpointer says about it.

    ``extends`` are settings that move the run's end beyond the checkpoint's.
    """
    given = ["--config", str(cluster.folder.settings), "--run", cluster.folder.run]
    for text in extends:
        given += ["--set", text]
    command = argv_of("checkpoints", "restore", checkpoint, *given)
    return (await call(cluster.folder, command, "restore")).strip()


async def _up(cluster: Cluster, on: Screen, team: Team, *, fresh: bool) -> None:
    folder, url = cluster.folder, masked_url(cluster.nats.url)
    login = "" if cluster.broker.kept is None else f" (keys in {folder.broker / KEYS})"
    on.say(f"Run {folder.run}: broker {url}{login}, logs in {folder.logs}")
    record = None
    async with bus_from(cluster.nats, "up") as bus:
        with contextlib.suppress(RunNotFound):
            record = await ledger.read_run(bus, folder.run)
    config = cluster.settings.run
    if record is not None:
        if record.state is RunState.FINISHED:
            fresh_too = ", --fresh discards this one and starts it again"
            more = "" if cluster.broker.kept is None else fresh_too
            on.say(f"Run {folder.run} is finished already: --run NAME starts another one{more}.")
            return
        config = loading.run_config_from_json(record.config_json)
        for sentence in ignored(record, config, cluster.settings.run):
            on.say(sentence)
    else:
        before = await asyncio.to_thread(
            ready.left_behind, cluster.settings.local.store, folder.run, fresh=fresh
        )
        for sentence in filter(None, (before, remark_on_rate(config))):
            on.say(printable(sentence))
    refuse_code(config)
    chaos = config.chaos.allow
    learners, clocks = team.learners or config.sync.learners, chaos and config.chaos.clocks
    shards = config.sync.shards
    team = replace(team, learners=learners, chaos=chaos, clocks=clocks, shards=shards)
    async with _open_to_faults(cluster, team, on) as open_cluster:
        with folder.announced(cluster.nats, proxied=open_cluster.proxy is not None):
            feed = await conduct(open_cluster, on, team=team)
    conclude(on, feed)


@contextlib.asynccontextmanager
async def _open_to_faults(cluster: Cluster, team: Team, on: Screen) -> AsyncGenerator[Cluster]:
    """Yield the cluster with a proxy before its own broker, if its run allows faults."""
    if not team.chaos:
        yield cluster
        return
    folder = cluster.folder
    on.say(f"This run allows faults: `skerry chaos --run {folder.run}` injects them.")
    with private_file(folder.token, secrets.token_urlsafe(24) + "\n"):
        if cluster.broker.kept is None:
            yield cluster
            return
        proxy = Proxy(urlsplit(cluster.nats.url).port or 0)
        async with proxy.serving(team.kinds()):
            yield replace(cluster, proxy=proxy)


async def conduct(
    cluster: Cluster,
    on: Screen,
    *,
    team: Team,
    script: Callable[[Supervisor, RunFeed], Coroutine[object, object, None]] | None = None,
    on_message: Callable[[RunMessage, float], None] | None = None,
    on_event: Callable[[ProcessEvent], None] | None = None,
) -> RunFeed:
    """Run the services until all have finished, showing the run meanwhile.

    ``script`` runs beside them and may interfere; it is cancelled at the end.
    """
    table, kinds, folder = cluster.broker.table, team.kinds(), cluster.folder
    local, ports = cluster.settings.local, {} if cluster.proxy is None else cluster.proxy.ports

    at_work = dict(kinds)

    def heard(event: ProcessEvent) -> None:
        note(table, kinds[event.name], event)
        clock.sweep(event.pid)
        if event.summary:
            on.say(event.summary)
        if event.change is Change.FINISHED and ends_training(at_work, event.name):
            left = ", ".join(sorted(at_work))
            on.say(f"Training is over. Its end is evaluated and saved; still at work: {left}.")
        if on_event is not None:
            on_event(event)

    with writing(folder.path):  # the services' clocks
        seen = devices.visible()
        keys = await cluster.broker.keys(folder.run, kinds, team.shards)
        commands = stages(folder, team, ports, keys, seen)
    if said := devices.shared(len(team.names().get("learner", ())), len(seen)):
        on.say(said)
    kept = Supervisor(commands, heard, grace_s=local.shutdown_s + 2.0)
    cluster.stop.supervisor = kept
    watch = broker_watch(on, cluster.nats.url)
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(bus_from(cluster.nats, "view", on_event=watch))
        stack.enter_context(table.kept())
        if team.chaos:
            control = FaultControl(kept, cluster.broker.kept, cluster.proxy, on.say)
            with writing(folder.path / CONTROL):
                obeying = listening(folder.path / CONTROL, control.answer)
                await stack.enter_async_context(obeying)
        feed = RunFeed(bus, folder.run, on_message=on_message)
        beside = [
            say_page(folder, on.say, chaos=team.chaos),
            feed.run(),
            keep_showing(feed, on),
            *([] if script is None else [script(kept, feed)]),
        ]
        try:
            async with TaskGroup() as group:
                tasks = [group.create_task(work) for work in beside]
                await kept.run()
                for task in tasks:
                    task.cancel()
        finally:
            cluster.stop.supervisor = None
            if (now := feed.snapshot()) is not None:
                on.show(now)
    return feed


def ends_training(at_work: dict[str, str], name: str) -> bool:
    """Take a service off those at work; return True if it was the last that trains or merges.

    ``at_work`` maps names to kinds. Returns False, too, if nothing is left at work.
    """
    trained = TRAINING & {*at_work.values()}
    at_work.pop(name, None)
    return bool(trained and at_work) and not TRAINING & {*at_work.values()}


async def say_page(folder: RunFolder, say: Callable[[str], None], *, chaos: bool) -> None:
    """Say the page's address once the monitor listens; with the token, where faults are allowed.

    The token comes after a ``#``, which browsers keep to themselves.
    """
    log = folder.logs / f"{MONITOR}.log"
    offset = size_of(log)
    while not (fields := last_event(log, offset, "health_listening")):  # noqa: ASYNC110 - files send no event
        await asyncio.sleep(LOOK_S)
    token = ""
    if chaos:
        with contextlib.suppress(OSError):
            token = f"#token={folder.token.read_text(encoding='utf-8').strip()}"
    say(f"Watch the run on {fields['url']}{token}")


def ignored(record: RunRecord, config: RunConfig, wanted: RunConfig) -> list[str]:
    """Return sentences on a run that the log holds already, whose own config counts.

    Raises ConfigError if it names text that this machine does not offer and ``wanted`` names none.
    """
    config = loading.with_own_data(config, wanted)
    given = loading.differences(wanted, RunConfig())
    paths = [path for path in loading.differences(config, wanted) if path in given]
    sentences = [f"Going on with run {record.run} as the log has it."]
    if paths:
        sentences.append(f"The run keeps its own {', '.join(paths)}: what was given is not used.")
    return sentences


def broker_watch(on: Screen, url: str) -> Callable[[str, Mapping[str, str]], None]:
    """Return a handler that says once each time that the broker is away, and that it is back."""
    last = "reconnected"
    sentences = {
        "disconnected": f"The broker at {masked_url(url)} is away: learners go on training, this "
        "view stands still, and everything catches up once it is back.",
        "reconnected": "The broker is back.",
    }

    def heard(event: str, _fields: Mapping[str, str]) -> None:
        nonlocal last
        if event in sentences and event != last:
            last = event
            on.say(sentences[event])

    return heard


def conclude(on: Screen, feed: RunFeed) -> None:
    """Say how it ended and what to do next."""
    now = feed.report()
    if now is None:
        return
    if now.run.finished:
        on.say(f"Run {now.run.run} is finished after {now.run.step} steps.")
    else:
        on.say(f"Run {now.run.run} stopped at step {now.run.step}: the same command goes on.")
    lacks = now.run.checkpoint_lacks
    without = f" without the last {lacks} merges: see the checkpointer's log" if lacks else ""
    if now.run.checkpoint:
        on.say(f"Checkpoint: {clip(now.run.checkpoint, 4096)}{without}")
    elif lacks:
        on.say("There is no checkpoint of it: see the checkpointer's log.")
