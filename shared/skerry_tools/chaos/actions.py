"""What each kind of fault does to a real process, and how one knows that it did."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock, namespaces
from skerry.cli.cluster.processes import BROKER
from skerry_tools.chaos.ground import Absent
from skerry_tools.chaos.messages import Messages
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.cli.cluster.processes import ProcessEntry
    from skerry_tools.chaos.ground import Action
    from skerry_tools.chaos.local import LocalGround
    from skerry_tools.chaos.plan import Fault

SLOW_BYTES_S = 4e6
"""Rate of a slow link, beside its delay."""
RESET_SHARE = 0.3
"""Share of the partitions that end connections; the others pass nothing."""
PENDING_XFSZ = 1 << (signal.SIGXFSZ - 1)


@dataclass(slots=True)
class Kill:
    """SIGKILL; whoever keeps the cluster starts it again once the fault is over."""

    ground: LocalGround
    target: str
    away_s: float
    _was: ProcessEntry | None = None

    async def begin(self) -> None:
        self._was = self.ground.entry(self.target)
        await self.ground.kill(self.target, self.away_s)

    async def proof(self) -> str:
        return f"pid {self._was.pid} is gone" if self._was and not self._was.alive else ""

    async def end(self) -> None:
        """The supervisor brings it back."""


@dataclass(slots=True)
class Pause:
    """SIGSTOP, later SIGCONT."""

    ground: LocalGround
    target: str
    _was: ProcessEntry | None = None

    async def begin(self) -> None:
        self._was = self.ground.entry(self.target)
        if self._was.paused:
            msg = f"{self.target} is paused already"
            raise Absent(msg)
        os.kill(self._was.pid, signal.SIGSTOP)

    async def proof(self) -> str:
        paused = self._was is not None and self._was.paused
        return f"/proc says pid {self._was.pid} is stopped (T)" if self._was and paused else ""

    async def end(self) -> None:
        if self._was is not None and self._was.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._was.pid, signal.SIGCONT)


@dataclass(slots=True)
class Cable:
    """A cut or slow way to the broker."""

    ground: LocalGround
    target: str
    shape: dict[str, object]
    _before: dict[str, int] = field(default_factory=dict[str, int])

    async def begin(self) -> None:
        self.ground.entry(self.target)
        self._before = await self.ground.route(self.target)
        await self.ground.shape(self.target, **self.shape)

    async def proof(self) -> str:
        now = await self.ground.route(self.target)
        told = {
            "stalled_bytes": "bytes stalled",
            "shaped_bytes": "bytes held up",
            "aborted": "connections reset",
            "refused": "connections kept out",
        }
        more = {name: now[name] - self._before[name] for name in told}
        return ", ".join(f"{more[name]} {words}" for name, words in told.items() if more[name] > 0)

    async def end(self) -> None:
        if self._before:
            await self.ground.shape(self.target)


@dataclass(slots=True)
class Unplug:
    """Every packet of a service in a namespace of its own is lost, both ways; nobody is told."""

    ground: LocalGround
    target: str
    wire: namespaces.Wire

    async def begin(self) -> None:
        self.ground.entry(self.target)
        await namespaces.cut(self.wire)

    async def proof(self) -> str:
        lost = await namespaces.lost(self.wire)
        return f"{lost} packets lost" if lost else ""

    async def end(self) -> None:
        await namespaces.reconnect(self.wire)


@dataclass(slots=True)
class DiskFull:
    """No file of the broker's may grow: every write fails as on a full disk."""

    ground: LocalGround
    _was: ProcessEntry | None = None

    async def begin(self) -> None:
        self._was = self.ground.entry(BROKER)
        _limit(self._was.pid, 0)

    async def proof(self) -> str:
        """The server has the signal of a refused write pending, which it blocks."""
        tasks = Path(f"/proc/{self._was.pid}/task") if self._was else Path()
        for status in tasks.glob("*/status"):
            with contextlib.suppress(OSError):
                if _pending(status.read_text("utf-8")) & PENDING_XFSZ:
                    return "the broker was refused a write (SIGXFSZ is pending)"
        return ""

    async def end(self) -> None:
        if self._was is not None and self._was.alive:
            _limit(self._was.pid, None)


@dataclass(slots=True)
class ClockJump:
    """The wall clock of a service is off by some seconds, and right again afterwards."""

    ground: LocalGround
    target: str
    seconds: float

    async def begin(self) -> None:
        self.ground.entry(self.target)
        clock.move(self.ground.folder, self.target, self.seconds)

    async def proof(self) -> str:
        read = clock.was_read(self.ground.folder, self.target)
        return f"{self.target} has read a clock that is off by {self.seconds:+.0f} s" * read

    async def end(self) -> None:
        clock.move(self.ground.folder, self.target, 0.0)


def silence(ground: LocalGround, target: str) -> Action:
    """Return the partition of which neither end is told."""
    wire = ground.wires().get(target)
    if wire is not None:
        return Unplug(ground, target, wire)
    return Cable(ground, target, {"cut": "blackhole"})


def action_of(fault: Fault, target: str, ground: LocalGround, seed: str) -> Action:
    """Return the action of a fault; whatever it draws comes from ``seed``."""
    chance = random.Random(seed)  # noqa: S311 - faults, no secrets
    told = chance.random() < RESET_SHARE
    slow: dict[str, object] = {"delay_s": fault.amount, "rate_bytes_s": SLOW_BYTES_S}
    made: dict[Kind, Callable[[], Action]] = {
        Kind.KILL: lambda: Kill(ground, target, fault.duration_s),
        Kind.BROKER_KILL: lambda: Kill(ground, target, fault.duration_s),
        Kind.PAUSE: lambda: Pause(ground, target),
        Kind.BROKER_PAUSE: lambda: Pause(ground, target),
        Kind.PARTITION: lambda: (
            Cable(ground, target, {"cut": "reset"}) if told else silence(ground, target)
        ),
        Kind.SLOW: lambda: Cable(ground, target, slow),
        Kind.DISK_FULL: lambda: DiskFull(ground),
        Kind.CLOCK_JUMP: lambda: ClockJump(ground, target, fault.amount),
    }
    if fault.kind in made:
        return made[fault.kind]()
    return Messages(ground, target, fault.kind, fault.amount, chance)


def limited(pid: int) -> bool:
    """Say whether no file of a process may grow; always False where that cannot be done."""
    if not hasattr(resource, "prlimit"):
        return False
    return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == 0


def lift(pid: int) -> None:
    """Let a process's files grow again."""
    _limit(pid, None)


def _limit(pid: int, size: int | None) -> None:
    """Limit the size of a process's files; None: as far as it was ever allowed."""
    with contextlib.suppress(ProcessLookupError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        soft = hard if size is None else size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def _pending(status: str) -> int:
    line = next((line for line in status.splitlines() if line.startswith("SigPnd:")), "SigPnd: 0")
    return int(line.split()[1], 16)
