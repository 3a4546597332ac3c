"""Undo every fault that lasts in a cluster, known or not: also what a killed drill has left.

``undo`` needs the run's folder only, for the broker itself may be stopped. A kill does not last:
the cluster's supervisor starts again what was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock, processes
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import BROKER
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import CONTROL, ControlError, ask
from skerry_tools.chaos.faults import is_limited, limit_files

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.cli.cluster.processes import ProcessEntry
    from skerry_tools.chaos.drilled import DrilledRun

LOOK_S = 0.05
BACK_S = 60.0
"""How long healing waits for processes that are being started again."""
SENTENCES = {
    "pause": "{} was stopped, and goes on.",
    "network": "The way of {} to the broker was cut or slow, and is open.",
    "clock_jump": "The clock of {} was off, and is right.",
    "disk_full": "No file of the {} could grow, and now they can.",
}


@dataclass(frozen=True, slots=True)
class Undone:
    """One fault that was still there; ``network`` stands for all that can be wrong with a route."""

    fault: str
    target: str

    @property
    def sentence(self) -> str:
        return SENTENCES[self.fault].format(self.target)


@dataclass(slots=True)
class Healing:
    """What healing has found: what was undone, and sentences on what could not be."""

    undone: list[Undone] = field(default_factory=list[Undone])
    wrong: list[str] = field(default_factory=list[str])


def run_heal(run: str, *, as_json: bool) -> None:
    """Undo every fault there is and print each; SkerryError with what could not be undone.

    Raises RunInUse while a drill is at work: it would take what it has done for still there.
    """
    with RunFolder(run).drilled():
        healed = asyncio.run(undo_by_command(run))
    if as_json:
        undone = [asdict(one) for one in healed.undone]
        print(json.dumps({"run": run, "healed": undone, "wrong": healed.wrong}, indent=2))
    else:
        for one in healed.undone:
            print(one.sentence)
        if not healed.undone and not healed.wrong:
            print(f"There is nothing to heal in run {run}.")
    if healed.wrong:
        raise SkerryError(" ".join(healed.wrong))


async def undo_by_command(run: str) -> Healing:
    """Undo every fault of a cluster; ConfigError for one whose run allows none."""
    if not await _obeys(run):
        msg = (
            f"Run {run!r} does not allow faults, or has only just begun, and nothing was touched: "
            "there is nothing to heal."
        )
        raise ConfigError(msg, path="chaos.allow")
    return await undo(RunFolder(run).path)


async def heal_first(run: str) -> list[str]:
    """Undo what an earlier drill left, and return a sentence for each.

    The broker may be among it, so its log is not asked whether the run allows faults: a cluster
    that obeys has read it there. Raises SkerryError with what could not be undone.
    """
    healed = await undo(RunFolder(run).path) if await _obeys(run) else Healing()
    if healed.wrong:
        raise SkerryError(" ".join(healed.wrong))
    return [f"Left by an earlier drill: {one.sentence}" for one in healed.undone]


async def _obeys(run: str) -> bool:
    """Return True if a cluster takes orders: only that of a run that allows faults does.

    Raises ControlError where one that does is only too slow to say so.
    """
    try:
        await ask(RunFolder(run).path / CONTROL, {"op": "show"})
    except ControlError as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return False
        raise
    return True


async def undo(folder: Path) -> Healing:
    """Undo what there is in the cluster of this folder. Each step is tried, even if others fail."""
    healed = Healing()
    await _open_routes(folder, healed)
    for name in clock.names(folder):
        _set_right(folder, name, healed)
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
    try:
        async with asyncio.timeout(BACK_S):
            while _missing(drilled, names):  # noqa: ASYNC110 - others' processes send no event
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        late = ", ".join(sorted(_missing(drilled, names)))
        wrong.append(f"{late} did not come back within {BACK_S:.0f} s of healing: {drilled.logs}.")
    if wrong:
        raise SkerryError(" ".join(wrong))


def _missing(drilled: DrilledRun, names: set[str]) -> set[str]:
    return names - {name for name, entry in drilled.entries().items() if entry.alive}


async def _open_routes(folder: Path, healed: Healing) -> None:
    """Let every route pass everything again."""
    if not (folder / CONTROL).exists():
        return
    try:
        opened = (await ask(folder / CONTROL, {"op": "open"}))["opened"]
        healed.undone += [Undone("network", name) for name in sorted(opened)]
    except (SkerryError, OSError) as error:
        healed.wrong.append(f"The routes to the broker are not open: {error}")


def _set_right(folder: Path, name: str, healed: Healing) -> None:
    try:
        if clock.is_off(folder, name):
            clock.move(folder, name, 0.0)
            healed.undone.append(Undone("clock_jump", name))
    except OSError as error:
        healed.wrong.append(f"The clock of {name} is not right again: {error}.")


def _resume(entry: ProcessEntry, healed: Healing) -> None:
    paused = entry.paused
    try:
        os.kill(entry.pid, signal.SIGCONT)
        if paused:
            healed.undone.append(Undone("pause", entry.name))
        if entry.kind == BROKER and is_limited(entry.pid):
            limit_files(entry.pid, None)
            healed.undone.append(Undone("disk_full", entry.name))
    except ProcessLookupError:
        return
    except PermissionError:
        healed.wrong.append(
            f"{entry.name} (pid {entry.pid}) is another user's: run this command as that user."
        )
    except OSError as error:
        healed.wrong.append(f"{entry.name} (pid {entry.pid}) could not be resumed: {error}.")
