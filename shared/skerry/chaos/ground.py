"""What chaos knows of a local cluster: its log, its processes, and who obeys in its run folder."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.chaos import clock, wires
from skerry.chaos.plan import BROKER_KINDS, SIMULATED, FaultPlan, Kind, candidates, check
from skerry.errors import ConfigError, SkerryError
from skerry.runtime import processes
from skerry.runtime.control import CONTROL, PROXY, ask
from skerry.runtime.processes import BROKER, Entry

if TYPE_CHECKING:
    from skerry.bus.base import Bus
    from skerry.chaos.wires import Wire

NETWORK = frozenset({Kind.PARTITION, Kind.SLOW})


class NotFired(SkerryError):
    """A fault had no effect; the message says why, and it is counted so."""


class Absent(NotFired):
    """There was nothing to strike: the target was down, or suffers the like already."""


@dataclass(frozen=True, slots=True)
class Ground:
    """One run's cluster on this machine; ``bus`` reaches its broker without a proxy."""

    run: str
    folder: Path
    bus: Bus

    def entries(self) -> dict[str, Entry]:
        """Return the processes that run now, by name."""
        return processes.read(self.folder)

    def entry(self, name: str) -> Entry:
        """Return one process; Absent if it is down."""
        held = self.entries().get(name)
        if held is None or not held.alive:
            msg = f"{name} is down already"
            raise Absent(msg)
        return held

    def kinds(self) -> dict[str, str]:
        """Return what can be struck: the kind of every process by its name."""
        return {name: entry.kind for name, entry in self.entries().items()}

    async def kill(self, name: str, back_after_s: float) -> int:
        """SIGKILL a process and return its pid; it is started again after ``back_after_s``."""
        order = {"op": "kill", "name": name, "back_after_s": back_after_s}
        return int((await ask(self.folder / CONTROL, order))["pid"])

    async def shape(self, name: str, **shape: object) -> dict[str, Any]:
        """Give a service's route to the broker another shape, and return its counters."""
        return await ask(self.folder / PROXY, {"op": "set", "route": name, **shape})

    async def route(self, name: str) -> dict[str, Any]:
        """Return the counters of a service's route."""
        return dict((await self.routes())[name])

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every route by its service; none where there is no proxy."""
        if not (self.folder / PROXY).exists():
            return {}
        return dict((await ask(self.folder / PROXY, {"op": "show"}))["routes"])

    def wires(self) -> dict[str, Wire]:
        """Return the cables of services in namespaces of their own, by service."""
        return wires.read(self.folder)

    async def open_route(self, name: str) -> None:
        """Let a service's route pass everything again."""
        wire = self.wires().get(name)
        try:
            if wire is not None:
                await wires.mend(wire)
        finally:
            await self.shape(name)


def unable(ground: Ground) -> dict[Kind, str]:
    """Return the kinds of faults that cannot be done here: why not, and what to do."""
    kinds = set(ground.kinds().values())
    reasons = dict.fromkeys(SIMULATED, "it exists in the simulation only: leave it out")
    if not (ground.folder / PROXY).exists():
        why = (
            "the services reach their broker without a proxy: let `skerry up` start the broker, "
            "or give it one nats:// address"
        )
        reasons |= dict.fromkeys(NETWORK, why)
    if BROKER not in kinds:
        why = "the broker was not started by this cluster: start `skerry up` without --nats"
        reasons |= dict.fromkeys(BROKER_KINDS - SIMULATED, why)
    if not hasattr(resource, "prlimit"):
        reasons[Kind.DISK_FULL] = "it needs Linux (prlimit): leave it out"
    if not clock.names(ground.folder):
        reasons[Kind.CLOCK_JUMP] = clock.FIX
    if not all(_ours(entry) for entry in ground.entries().values()):
        why = "its processes are another user's: run this command as that user"
        reasons |= dict.fromkeys(set(Kind) - SIMULATED, why)
    return reasons


def able(ground: Ground) -> tuple[Kind, ...]:
    """Return the kinds of faults that can be done here."""
    reasons = unable(ground)
    return tuple(kind for kind in Kind if kind not in reasons)


def refuse(plan: FaultPlan, ground: Ground) -> None:
    """Raise ConfigError for the first fault that does not exist or cannot be done here."""
    reasons = unable(ground)
    for fault in plan.faults:
        if fault.kind in reasons:
            msg = f"A {fault.kind} cannot be done here: {reasons[fault.kind]}."
            raise ConfigError(msg, path="kind")
    check(plan, ground.kinds())


def refuse_targets(targets: tuple[str, ...], ground: Ground) -> None:
    """Raise ConfigError for the first target that is nothing in this cluster."""
    known = ground.kinds()
    for target in targets:
        if not candidates(target, known):
            names = ", ".join(sorted({*known, *known.values()}))
            msg = f"There is no {target!r} in this cluster: use any of {names}."
            raise ConfigError(msg, path="targets")


def _ours(entry: Entry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True
