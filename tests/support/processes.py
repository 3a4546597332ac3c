"""Real processes that do next to nothing, under a real supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skerry.cli.cluster.supervisor import (
    Change,
    Command,
    Need,
    ProcessEvent,
    RestartPolicy,
    Supervisor,
)
from tests.support.builders import until

FAST = RestartPolicy(first_s=0.01, most_s=0.02, attempts=3, hopeless_s=0.05)
SKERRY = (sys.executable, "-m", "skerry.cli.main")
DEADLINE_S = 30.0
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: signal.pause()"
)


def command(
    folder: Path, name: str, program: str = FOREVER, *, kind: str = "", need: Need = Need.ALWAYS
) -> Command:
    """Return a command that runs a Python program."""
    argv = (sys.executable, "-I", "-S", "-c", program)
    return Command(name, kind or name, argv, folder / f"{name}.log", dict(os.environ), need)


def call(
    *command: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is."""
    return subprocess.run(
        command, cwd=cwd, env=env, input=given, capture_output=True, text=True, check=False
    )


def skerry(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a ``skerry`` command in a folder to its end."""
    return call(*SKERRY, *arguments, cwd=folder)


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Watched:
    """A supervisor whose events are kept."""

    events: list[ProcessEvent] = field(default_factory=list[ProcessEvent])

    def supervise(
        self, *stages: list[Command], policy: RestartPolicy = FAST, grace_s: float = 10.0
    ) -> Supervisor:
        self.supervisor = Supervisor(stages, self.events.append, policy, grace_s)
        return self.supervisor

    def changes(self, name: str) -> list[Change]:
        return [event.change for event in self.events if event.name == name]

    def count(self, change: Change) -> int:
        return [event.change for event in self.events].count(change)

    @contextlib.asynccontextmanager
    async def running(self, *stages: list[Command], grace_s: float = 10.0) -> AsyncGenerator[None]:
        """Run commands; yields once each has printed something, and stops them at the end."""
        supervisor = self.supervise(*stages, grace_s=grace_s)
        task = asyncio.create_task(supervisor.run())
        try:
            for one in (one for stage in stages for one in stage):
                await until(lambda log=one.log: log.exists() and log.stat().st_size > 0)
            yield
        finally:
            supervisor.ask_stop()
            async with asyncio.timeout(DEADLINE_S):
                await task


@contextlib.contextmanager
def full_disk() -> Generator[None]:
    """No file of this process may grow: Python leaves the signal of it to the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
