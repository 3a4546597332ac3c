"""Undo every fault that lasts in a cluster, known or not: also what a killed drill has left.

``undo`` needs the run's folder only, for the broker itself may be stopped. A kill does not last:
the cluster's supervisor starts again what was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
from dataclasses import dataclass, field
from pathlib import Path

from skerry.cli.cluster import clock, processes
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import BROKER, ProcessEntry
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import CONTROL, ControlError, ask
from skerry_tools.chaos.drilled import DrilledRun, holds

BACK_S = 60.0
"""How long healing waits for processes that are being started again."""


@dataclass(slots=True)
class Healing:
    """What healing has found: sentences on what was undone, and on what could not be."""

    undone: list[str] = field(default_factory=list[str])
    wrong: list[str] = field(default_factory=list[str])


def run_heal(run: str, *, as_json: bool) -> None:
    """Undo every fault there is and print each; SkerryError with what could not be undone.

    Raises RunInUse while a drill is at work: it would believe that its faults are still there.
    ConfigError for a run that allows no faults.
    """
    with RunFolder(run).drilled():
        healed = asyncio.run(undo_first(run))
    if healed is None:
        msg = (
            f"Run {run!r} does not allow faults, or has only just begun, and nothing was touched: "
            "there is nothing to heal."
        )
        raise ConfigError(msg, path="chaos.allow")
    if as_json:
        print(json.dumps({"run": run, "healed": healed.undone, "wrong": healed.wrong}, indent=2))
    else:
        print("\n".join(healed.undone) or f"There is nothing to heal in run {run}.")
    if healed.wrong:
        raise SkerryError(" ".join(healed.wrong))


async def undo_first(run: str) -> Healing | None:
    """Undo what an earlier drill left; None where no cluster takes orders.

    Only the cluster of a run that allows faults does. The log is not asked for that, since its
    broker may be stopped: the cluster has read it there. Raises ControlError for a cluster that is
    only too slow to answer.
    """
    folder = RunFolder(run).path
    try:
        await ask(folder / CONTROL, {"op": "show"})
    except ControlError as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return None
        raise
    return await undo(folder)


async def undo(folder: Path) -> Healing:
    """Undo what there is in the cluster of this folder. Each step is tried, even if others fail."""
    healed = Healing()
    try:
        if (folder / CONTROL).exists():
            opened = (await ask(folder / CONTROL, {"op": "open"}))["opened"]
            way = "The way of {} to the broker was cut or slow, and is open."
            healed.undone += map(way.format, sorted(opened))
    except (SkerryError, OSError) as error:
        healed.wrong.append(f"The routes to the broker are not open: {error}")
    for name in clock.names(folder):
        try:
            if clock.is_off(folder, name):
                clock.move(folder, name, 0.0)
                healed.undone.append(f"The clock of {name} was off, and is right.")
        except OSError as error:
            healed.wrong.append(f"The clock of {name} is not right again: {error}.")
    for entry in processes.read(folder).values():
        if entry.alive:
            _resume(entry, healed)
    return healed


async def heal(drilled: DrilledRun, names: set[str]) -> None:
    """Undo every fault there is, known or not, and wait until every process runs again.

    Raises SkerryError with what went wrong, naming the processes that do not come back.
    """
    wrong = await drilled.undo()
    await drilled.settle()

    def missing() -> set[str]:
        return names - {name for name, entry in drilled.entries().items() if entry.alive}

    if not await holds(lambda: not missing(), BACK_S):
        late = ", ".join(sorted(missing()))
        wrong.append(f"{late} did not come back within {BACK_S:.0f} s of healing: {drilled.logs}.")
    if wrong:
        raise SkerryError(" ".join(wrong))


def _resume(entry: ProcessEntry, healed: Healing) -> None:
    paused = entry.paused
    try:
        os.kill(entry.pid, signal.SIGCONT)
        if paused:
            healed.undone.append(f"{entry.name} was stopped, and goes on.")
        if entry.kind == BROKER and is_limited(entry.pid):
            limit_files(entry.pid, None)
            healed.undone.append(f"No file of the {entry.name} could grow, and now they can.")
    except ProcessLookupError:
        return
    except PermissionError:
        healed.wrong.append(
            f"{entry.name} (pid {entry.pid}) is another user's: run this command as that user."
        )
    except OSError as error:
        healed.wrong.append(f"{entry.name} (pid {entry.pid}) could not be resumed: {error}.")


def resume(entry: ProcessEntry) -> None:
    """Let a process that was stopped go on, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        if entry.alive:
            os.kill(entry.pid, signal.SIGCONT)


def is_limited(pid: int) -> bool:
    """Return True if no file of a process may grow; always False where that cannot be done."""
    if not hasattr(resource, "prlimit"):
        return False
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0


def limit_files(pid: int, size: int | None) -> None:
    """Limit the size of a process's files; None: as far as it was ever allowed."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        soft = hard if size is None else size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
