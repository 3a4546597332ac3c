"""Real services as real processes against a broker, for tests that kill and restart them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from skerry.cli.programs import argv, argv_of
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit, Pulse

if TYPE_CHECKING:
    from tests.support.nats_server import NatsServer


@dataclass(slots=True)
class Service:
    """One process of a cluster; its output is in ``log``."""

    process: asyncio.subprocess.Process
    log: Path

    def kill9(self) -> None:
        """End the process at once."""
        self.process.kill()

    def pause(self) -> None:
        """Stop the process without ending it (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self.process.terminate()

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Return the exit code once the process has ended."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    @property
    def said(self) -> str:
        return self.log.read_text()


@dataclass(slots=True)
class Cluster:
    """Services of one run; leaving the ``async with`` kills what still runs."""

    url: str
    run: str
    folder: Path
    config: Path
    cache: Path
    services: list[Service] = field(default_factory=list[Service])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for service in self.services:
            if service.process.returncode is None:
                service.kill9()
        for service in self.services:
            await service.process.wait()

    async def start(self, kind: str, name: str, *arguments: str) -> Service:
        """Start a service under a name; restarting it is starting it again."""
        common = ("--nats", self.url, "--run", self.run, "--name", name)
        config = ("--config", str(self.config))
        return await self._spawn(name, *argv(kind, *common, *config, *arguments))

    async def start_script(self, name: str, script: Path | str, *arguments: str) -> Service:
        """Start a program of the test's own, such as a service that fails at a chosen point."""
        return await self._spawn(name, sys.executable, str(script), *arguments)

    async def restore(self, checkpoint: Path, *sets: str) -> Service:
        """Restore a checkpoint into the broker as this cluster's run."""
        changes = [argument for change in sets for argument in ("--set", change)]
        target = ("--nats", self.url, "--run", self.run)
        command = argv_of("checkpoints", "restore", str(checkpoint), *target, *changes)
        return await self._spawn("restore", *command)

    async def _spawn(self, name: str, *arguments: str) -> Service:
        log = self.folder / f"{name}-{len(self.services)}.log"
        environment = os.environ | {
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "SKERRY_STORE__PATH": str(self.folder / "checkpoints"),
            "SKERRY_LEARNER__PATH": str(self.folder / "learners"),
            "SKERRY_TELEMETRY__JSONL": str(self.folder / "metrics.jsonl"),
        }
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdout=out, stderr=out, env=environment
            )
        service = Service(process, log)
        self.services.append(service)
        return service


async def until_commit(
    bus: Bus, run: str, wanted: Callable[[Commit], bool], *, timeout_s: float = 90.0
) -> list[Commit]:
    """Return all commits from the first up to the one that is wanted."""
    seen: list[Commit] = []
    commits = ledger.follow_commits(bus, run)
    async with asyncio.timeout(timeout_s), aclosing(commits):
        async for _, commit in commits:
            seen.append(commit)
            if wanted(commit):
                return seen
    return seen


async def until_pulse(
    bus: Bus, run: str, wanted: Callable[[Pulse], bool], *, timeout_s: float = 90.0
) -> Pulse:
    """Return the first pulse, from the newest of each learner on, that is wanted."""
    pulses = run_records.follow(bus, run, Pulse)
    async with asyncio.timeout(timeout_s), aclosing(pulses):
        async for pulse in pulses:
            if wanted(pulse):
                return pulse
    msg = "The log ended while waiting for a pulse."
    raise AssertionError(msg)


@dataclass(frozen=True, slots=True)
class Site:
    """Where clusters keep their logs, checkpoints and compiled programs."""

    folder: Path
    cache: Path

    @asynccontextmanager
    async def run(
        self, server: NatsServer, run: str, config: Path
    ) -> AsyncGenerator[tuple[Cluster, NatsBus]]:
        """Start a cluster, and a client of its log."""
        async with (
            Cluster(server.url, run, self.folder, config, self.cache) as cluster,
            NatsBus(server.url, name="test") as bus,
        ):
            yield cluster, bus
