"""A cluster on this machine: a broker, the services, one stop for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.cli.cluster import child
from skerry.cli.cluster.broker import LocalBroker, find_server
from skerry.cli.cluster.keeper import Keeper
from skerry.cli.cluster.place import log_file, writing
from skerry.cli.cluster.processes import Processes
from skerry.cli.cluster.services import Reach, Team, environment, require, stages
from skerry.cli.cluster.supervise import Supervisor
from skerry.errors import ConfigError, SkerryError
from skerry.settings.loading import control_variable, to_toml
from skerry.settings.models import NatsSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from skerry.cli.cluster.place import Place
    from skerry.cli.cluster.supervise import Event
    from skerry.settings.models import Settings

NEEDED = ("learner", "syncer", "checkpointer", "health-monitor")


class Interrupted(KeyboardInterrupt):
    """Somebody asked this process to stop, and everything has been stopped."""


class CallFailed(SkerryError):
    """A program that was called once, and not kept running, ended with an error."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code > 0 else 1


@dataclass(slots=True)
class Stop:
    """What a signal does: the first one stops in order, the second one at once."""

    supervisor: Supervisor | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        again = self.asked.is_set()
        self.asked.set()
        if self.supervisor is None:
            if self.task is not None:
                self.task.cancel()
        elif again:
            self.supervisor.force()
        else:
            self.supervisor.ask_stop()


@dataclass(frozen=True, slots=True)
class Served:
    """A broker that runs; ``keeper`` is None for one that is not ours.

    ``monitor_url`` is where it tells of itself, empty where that is not known.
    """

    url: str
    table: Processes
    keeper: Keeper | None = None
    monitor_url: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything a view or a script needs to know about a cluster that runs.

    ``reach`` says, by name, which services reach the broker in a way of their own.
    """

    place: Place
    settings: Settings
    broker: Served
    stop: Stop
    reach: Mapping[str, Reach] = field(default_factory=dict[str, Reach])

    @property
    def url(self) -> str:
        return self.broker.url

    @property
    def nats(self) -> NatsSettings:
        return self.settings.local.nats


def run_stoppable(main: Callable[[Stop], Awaitable[None]]) -> None:
    """Run ``main`` with SIGINT and SIGTERM routed to its Stop; KeyboardInterrupt if one came."""

    async def stoppable() -> None:
        stop = Stop(task=asyncio.current_task())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.on_signal)
        try:
            await main(stop)
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise
        if stop.asked.is_set():
            raise Interrupted

    asyncio.run(stoppable())


@contextlib.asynccontextmanager
async def broker(
    place: Place,
    settings: Settings,
    external: str | None,
    say: Callable[[str], None] = lambda _sentence: None,
) -> AsyncGenerator[Served]:
    """Yield the broker: the one named, or our own for as long as this lasts."""
    table = Processes(place.processes)
    if external:
        yield Served(external, table)
        return
    binary = find_server(control_variable("SKERRY_NATS_SERVER"))
    ours = LocalBroker(place.broker, binary=binary, monitored=True)
    keeper = Keeper(ours, table, say)
    with writing(place.broker):
        keeper.start()
    keeping = asyncio.create_task(keeper.run(), name="broker")
    try:
        yield Served(ours.url, table, keeper, ours.monitor_url)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        ours.stop(settings.local.shutdown_s)


def prepared(settings: Settings, url: str, place: Place, monitor_url: str = "") -> Settings:
    """Write the settings that the services start with, the broker's addresses among them."""
    for service in NEEDED:
        require(service)
    nats = settings.local.nats.model_copy(update={"url": url})
    local = settings.local.model_copy(
        update={
            "nats": nats,
            "store": settings.local.store.model_copy(
                update={"path": settings.local.store.path.absolute()}
            ),
            "telemetry": settings.local.telemetry.model_copy(
                update={"jsonl": (settings.local.telemetry.jsonl or place.metrics).absolute()}
            ),
            "metrics": settings.local.metrics.model_copy(
                update={"broker": settings.local.metrics.broker or monitor_url}
            ),
        }
    )
    full = settings.model_copy(update={"local": local})
    draft = place.settings.with_suffix(".draft")
    with writing(place.settings):
        place.folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(to_toml(full), encoding="utf-8")
        draft.replace(place.settings)
    return full


def supervisor(cluster: Cluster, team: Team, on_event: Callable[[Event], None]) -> Supervisor:
    """Return the supervisor of the cluster's services, bound to its stop."""
    with writing(cluster.place.folder):  # the services' clocks
        commands = stages(cluster.place, team, cluster.url, cluster.reach)
    kept = Supervisor(
        commands,
        on_event,
        grace_s=cluster.settings.local.shutdown_s + 2.0,
    )
    cluster.stop.supervisor = kept
    return kept


async def call(place: Place, argv: Sequence[str], log_name: str) -> str:
    """Run a program to its end and return its stdout; CallFailed tells its last words.

    It is bound to this process like a service, and killed when the call is cancelled.
    """
    log = place.logs / f"{log_name}.log"
    with log_file(log, "wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", child.__file__, str(os.getpid())),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment(place),
            start_new_session=True,
        )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        from skerry.cli.cluster.tail import last_sentence

        words = last_sentence(log, 0) or f"It exited with {process.returncode}."
        msg = f"{log_name} failed: {words} (its log: {log})"
        raise CallFailed(msg, code=process.returncode)
    return out.decode("utf-8", "replace")


def refuse_state(place: Place) -> None:
    """Raise ConfigError if a run's log already lies here: a restore needs an empty broker."""
    if place.has_state:
        msg = (
            f"{place.broker} already holds a log of run {place.run!r}: add --fresh to discard it, "
            "or take another name with --run."
        )
        raise ConfigError(msg, path="run")
