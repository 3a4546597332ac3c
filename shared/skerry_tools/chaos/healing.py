"""Undo every fault that lasts in a cluster, known or not: also what a drill that was killed left.

``undo`` needs the run's folder only, for the broker itself may be stopped. A kill is no such
fault: who keeps the cluster starts what was killed again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock, namespaces, processes
from skerry.cli.cluster.processes import BROKER
from skerry.errors import SkerryError
from skerry.service.control import CONTROL, ask
from skerry_tools.chaos.actions import lift, limited

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.cli.cluster.processes import ProcessEntry
    from skerry_tools.chaos.ground import Ground

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


async def undo(folder: Path) -> Healing:
    """Undo what there is in the cluster of this folder. Each step is tried whatever came before."""
    told = Healing()
    await _open(folder, told)
    _set_right(folder, told)
    for entry in processes.read(folder).values():
        if entry.alive:
            _resume(entry, told)
    return told


async def heal(ground: Ground, names: set[str]) -> None:
    """Undo every fault there is, known or not, and wait until every process runs again.

    Raises SkerryError with what went wrong, naming the processes that do not come back.
    """
    wrong = await ground.undo()
    wrong += await _returned(ground, names)
    if wrong:
        raise SkerryError(" ".join(wrong))


async def _open(folder: Path, told: Healing) -> None:
    """Let every route pass everything again, through its cable and through the proxy."""
    opened: set[str] = set()
    wrong: list[str] = []
    for name, wire in namespaces.read(folder).items():
        try:
            if await namespaces.reconnect(wire):
                opened.add(name)
        except SkerryError as error:
            wrong.append(str(error))
    try:
        if (folder / CONTROL).exists():
            opened.update((await ask(folder / CONTROL, {"op": "open"}))["opened"])
    except (SkerryError, OSError) as error:
        wrong.append(str(error))
    told.undone += [Undone("network", name) for name in sorted(opened)]
    if wrong:
        told.wrong.append(f"The routes to the broker are not open: {' '.join(wrong)}")


def _set_right(folder: Path, told: Healing) -> None:
    for name in clock.names(folder):
        try:
            if clock.is_off(folder, name):
                clock.move(folder, name, 0.0)
                told.undone.append(Undone("clock_jump", name))
        except OSError as error:
            told.wrong.append(f"The clock of {name} is not right again: {error}.")


def _resume(entry: ProcessEntry, told: Healing) -> None:
    paused = entry.paused
    try:
        os.kill(entry.pid, signal.SIGCONT)
        if paused:
            told.undone.append(Undone("pause", entry.name))
        if entry.kind == BROKER and limited(entry.pid):
            lift(entry.pid)
            told.undone.append(Undone("disk_full", entry.name))
    except ProcessLookupError:
        return
    except PermissionError:
        told.wrong.append(
            f"{entry.name} (pid {entry.pid}) is another user's: run this command as that user."
        )
    except OSError as error:
        told.wrong.append(f"{entry.name} (pid {entry.pid}) could not be resumed: {error}.")


async def _returned(ground: Ground, names: set[str]) -> list[str]:
    await ground.settle()
    try:
        async with asyncio.timeout(BACK_S):
            while _missing(ground, names):  # noqa: ASYNC110 - others' processes send no event
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        late = ", ".join(sorted(_missing(ground, names)))
        return [f"{late} did not come back within {BACK_S:.0f} s of healing: {ground.logs}."]
    return []


def _missing(ground: Ground, names: set[str]) -> set[str]:
    return names - {name for name, entry in ground.entries().items() if entry.alive}
