"""A cluster on this machine: its broker, the commands of its services, and one stop for all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skerry import code
from skerry.cli.cluster import clock, devices
from skerry.cli.cluster.broker import FOREVER, LocalBroker, find_server
from skerry.cli.cluster.folder import last_sentence, size_of
from skerry.cli.cluster.processes import BROKER, ProcessTable
from skerry.cli.cluster.proxy import HOST
from skerry.cli.cluster.supervisor import (
    Change,
    Command,
    Need,
    ProcessEvent,
    Supervisor,
    send_signal,
    spawn,
)
from skerry.cli.programs import SERVICES, argv, computing, require
from skerry.errors import SkerryError
from skerry.folders import from_here
from skerry.protocol.roles import Grant, Role
from skerry.service import interrupts
from skerry.service.clusters import reached
from skerry.service.private import write_private
from skerry.settings.checks import refuse_secret
from skerry.settings.loading import child_environment, to_toml
from skerry.status.format import size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from skerry.cli.cluster.folder import RunFolder
    from skerry.cli.cluster.proxy import Proxy
    from skerry.settings.local import HealthSettings, NatsSettings, Settings

LONG_BYTES = 10**9
"""A log that is longer may take its broker seconds to read."""
INSTALLED = ("learner", "syncer", "checkpointer", "health-monitor")
"""Services without which no cluster is started."""
NEEDS = {"evaluator": Need.NEVER, "health-monitor": Need.NEVER, "checkpointer": Need.SETTINGS}
"""Services that a run goes on without."""
STOPPED_TOGETHER = ("learner", "evaluator"), ("syncer",), ("checkpointer", "health-monitor")
"""Services in the order in which they are stopped: each hands on to those after it."""
ROLES = {"learner": Role.FOUNDER}
"""Roles of services whose role has another name: the first learner creates the run."""


@dataclass(frozen=True, slots=True)
class Team:
    """How many of each service a cluster has; ``learners`` 0: as many as its run's config says.

    ``chaos``: faults may be injected into it. ``clocks``: its services' clocks can be moved.
    ``shards`` are those of its run, to whose streams its keys give access.
    """

    learners: int = 0
    syncers: int = 1
    checkpointers: int = 1
    evaluators: int = 1
    chaos: bool = False
    clocks: bool = False
    shards: int = 1

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of each service's processes, in the order in which they are stopped."""
        counts = (self.learners, self.syncers, self.checkpointers, self.evaluators, 1)
        return {
            service: tuple(f"{service}-{n}" for n in range(1, count + 1))
            if count > 1 or service == "learner"
            else (service,)
            for service, count in zip(SERVICES, counts, strict=True)
            if count
        }

    def kinds(self) -> dict[str, str]:
        """Return the service of every process, by name."""
        return {name: service for service, names in self.names().items() for name in names}


class CallFailed(SkerryError):
    """A program that was called once, and not kept running, ended with an error."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.exit_code = code if code > 0 else 1


@dataclass(slots=True)
class StopSignal:
    """What Ctrl-C does: the first one stops in order, the second one at once."""

    say: Callable[[str], None]
    supervisor: Supervisor | None = None
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    number: int = signal.SIGINT

    def on_signal(self, number: int = signal.SIGINT) -> None:
        again = self.asked.is_set()
        if not again:
            self.number = number
        self.asked.set()
        if self.supervisor is None:
            if self.task is not None:
                self.task.cancel()
        elif again:
            self.supervisor.force()
        else:
            self.say("Stopping: each service finishes what it has begun. Ctrl-C again ends it all.")
            self.supervisor.ask_stop(self.say)


@dataclass(frozen=True, slots=True)
class ServedBroker:
    """A running broker and how to reach it; ``kept`` and ``local`` are None if it is not ours."""

    nats: NatsSettings
    table: ProcessTable
    kept: Supervisor | None = None
    monitor_url: str = ""
    local: LocalBroker | None = None

    async def keys(self, run: str, kinds: Mapping[str, str], shards: int = 1) -> dict[str, Path]:
        """Return the key of each service, by name; none where the broker is not ours."""
        if self.local is None:
            return {}
        roles = {name: ROLES.get(kind) or Role(kind) for name, kind in kinds.items()}
        await self.local.admit(Grant(role, name, run, shards) for name, role in roles.items())
        return {name: self.local.keyring.seed(name).absolute() for name in kinds}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything a view or a script needs to know about a cluster that runs.

    ``proxy`` is how the services of a run that allows faults reach their broker.
    """

    folder: RunFolder
    settings: Settings
    broker: ServedBroker
    stop: StopSignal
    proxy: Proxy | None = None

    @property
    def nats(self) -> NatsSettings:
        return self.settings.local.nats


def run_stoppable(
    main: Callable[[StopSignal], Awaitable[None]], say: Callable[[str], None] = print
) -> None:
    """Run ``main`` with SIGINT and SIGTERM routed to its StopSignal; Interrupted if one came."""

    async def stoppable() -> None:
        stop = StopSignal(say, task=asyncio.current_task())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.on_signal, number)
        try:
            await main(stop)
        except asyncio.CancelledError:
            if not stop.asked.is_set():
                raise
        if stop.asked.is_set():
            for number in (signal.SIGINT, signal.SIGTERM):  # one more is too late to matter
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)
            raise interrupts.Interrupted(stop.number)

    asyncio.run(stoppable())


@contextlib.asynccontextmanager
async def served(
    folder: RunFolder,
    settings: Settings,
    external: str | None,
    say: Callable[[str], None] = lambda _sentence: None,
) -> AsyncGenerator[ServedBroker]:
    """Yield the broker: the one named, or our own for as long as the context lasts."""
    local, table = settings.local, ProcessTable(folder.processes)
    if external:
        refuse_secret(external, otherwise="")
        yield ServedBroker(local.nats.model_copy(update={"url": external}), table)
        return
    ours = LocalBroker(folder.broker, find_server())
    if (stored := ours.stored_bytes()) > LONG_BYTES:
        say(f"The broker reads its log of {size(stored)}, which may take a while.")

    def on_event(event: ProcessEvent) -> None:
        note(table, BROKER, event)
        if event.summary:
            say(event.summary)

    kept = Supervisor([[ours.command()]], on_event, FOREVER, local.shutdown_s)
    async with kept.running():
        nats = reached(local.nats, ours.url, {"credentials": str(ours.credentials)})
        yield ServedBroker(nats, table, kept, ours.monitor_url, ours)


def note(table: ProcessTable, kind: str, event: ProcessEvent) -> None:
    """Keep the table of processes up to date."""
    if event.change is Change.STARTED:
        table.started(event.name, kind, event.pid)
    else:
        table.ended(event.name, event.pid)


def prepared(settings: Settings, broker: ServedBroker, folder: RunFolder) -> Settings:
    """Write the settings that the services start with, the broker's and the page's addresses too.

    The run's record names its text by absolute paths, so checkpoints can be evaluated anywhere.
    """
    for service in INSTALLED:
        require(service)
    local = settings.local
    rows = (local.telemetry.jsonl or folder.metrics).absolute()
    monitoring = local.metrics.broker or broker.monitor_url
    changed = {
        "nats": broker.nats,
        "store": local.store.model_copy(update={"path": local.store.path.absolute()}),
        "telemetry": local.telemetry.model_copy(update={"jsonl": rows}),
        "metrics": local.metrics.model_copy(update={"broker": monitoring}),
        "health": local.health.model_copy(update={"port": _page_port(local.health)}),
    }
    text = settings.run.data
    found = {
        "paths": tuple(map(from_here, text.paths)),
        "tokenizer_folder": from_here(text.tokenizer_folder),
    }
    run = settings.run.model_copy(update={"data": text.model_copy(update=found)})
    full = settings.model_copy(update={"run": run, "local": local.model_copy(update=changed)})
    write_private(folder.settings, to_toml(full))
    return full


def _page_port(health: HealthSettings) -> int:
    """Return a port that is free: the page stays there when its monitor is started again."""
    for port in (health.port, 0):
        family = socket.AF_INET6 if ":" in health.host else socket.AF_INET
        with (
            contextlib.suppress(OSError),
            socket.create_server((health.host, port), family=family) as free,
        ):
            return int(free.getsockname()[1])
    return health.port  # the monitor says what is wrong with this host


async def call(folder: RunFolder, argv: Sequence[str], log_name: str) -> str:
    """Run a program to its end and return its stdout; CallFailed has its last words.

    It is bound to this process like a service, and killed when the call is cancelled.
    """
    log, env = folder.logs / f"{log_name}.log", environment(folder.cache)
    offset = size_of(log)
    if allowed := ",".join(code.allowed()):
        env["SKERRY_ALLOW_CODE"] = allowed
    command = Command(log_name, log_name, tuple(argv), log, env)
    process = await spawn(command, stdout=asyncio.subprocess.PIPE)
    try:
        out, _ = await process.communicate()
    finally:
        send_signal(process, signal.SIGKILL)
        await process.wait()
    if process.returncode:
        words = last_sentence(log, offset) or f"It exited with {process.returncode}."
        msg = f"{log_name} failed: {words} (its log: {log})"
        raise CallFailed(msg, code=process.returncode)
    return out.decode("utf-8", "replace")


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a service; what the user has set in ours wins."""
    plain = {"PYTHONUNBUFFERED": "1", "PYTHON_COLORS": "0"}
    return child_environment({**computing(cache), **plain})


def stages(
    folder: RunFolder,
    team: Team,
    ports: Mapping[str, int],
    keys: Mapping[str, Path],
    accelerators: Sequence[str] = (),
) -> list[list[Command]]:
    """Return the cluster's processes in the order in which they are stopped.

    Each learner sees accelerators of its own, or its share of one. ``ports`` are where a proxy
    listens for services, ``keys`` what they log in with. The monitor gets the settings by which its
    page injects faults, where they are allowed.
    """
    page: tuple[str, ...] = ()
    if team.chaos:
        where = {"cluster": folder.path, "token_file": folder.token}
        faults = (f"health.{key}={json.dumps(str(path.resolve()))}" for key, path in where.items())
        page = tuple(faults)

    own = devices.shares(team.names().get("learner", ()), accelerators)
    clock.forget(folder.path)

    def command(service: str, name: str) -> Command:
        given = ["--run", folder.run, "--name", name, "--config", str(folder.settings)]
        if service == "health-monitor":
            given += ["--until-finished", *(word for text in page for word in ("--set", text))]
        env = environment(folder.cache)
        if team.clocks:
            env |= clock.environment(folder.path, name)
        env |= own.get(name, {})
        if name in ports:
            env["SKERRY_NATS__URL"] = f"nats://{HOST}:{ports[name]}"
        if name in keys:
            env["SKERRY_NATS__CREDENTIALS"] = str(keys[name])
        return Command(
            name=name,
            kind=service,
            argv=argv(service, *given),
            log=folder.logs / f"{name}.log",
            env=env,
            need=NEEDS.get(service, Need.ALWAYS),
        )

    names = team.names()
    return [
        [command(service, name) for service in together for name in names.get(service, ())]
        for together in STOPPED_TOGETHER
    ]
