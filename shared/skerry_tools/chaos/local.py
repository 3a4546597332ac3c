"""A cluster on this machine: its log, its processes, and who obeys in its run folder."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.cli.cluster import clock, namespaces, processes
from skerry.cli.cluster.processes import BROKER, ProcessEntry
from skerry.service.control import CONTROL, ask
from skerry_tools.chaos import healing
from skerry_tools.chaos.actions import action_of
from skerry_tools.chaos.ground import NETWORK, Absent
from skerry_tools.chaos.plan import BROKER_KINDS, SIMULATED, Kind

if TYPE_CHECKING:
    from skerry.cli.cluster.namespaces import Wire
    from skerry.log.base import Bus
    from skerry_tools.chaos.ground import Action
    from skerry_tools.chaos.plan import Fault


@dataclass(frozen=True, slots=True)
class LocalGround:
    """One run's cluster on this machine; ``bus`` reaches its broker without a proxy.

    ``proxied``: its services reach it through one.
    """

    run: str
    folder: Path
    bus: Bus
    proxied: bool = False

    @property
    def logs(self) -> str:
        return f"see the logs in {self.folder / 'logs'}"

    def entries(self) -> dict[str, ProcessEntry]:
        """Return the processes that run now, by name."""
        return processes.read(self.folder)

    async def settle(self) -> None:
        """The table of processes tells what is so now."""

    def entry(self, name: str) -> ProcessEntry:
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
        return await ask(self.folder / CONTROL, {"op": "set", "route": name, **shape})

    async def route(self, name: str) -> dict[str, Any]:
        """Return the counters of a service's route."""
        return dict((await self.routes())[name])

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every route by its service; none where there is no proxy."""
        if not self.proxied:
            return {}
        return dict((await ask(self.folder / CONTROL, {"op": "show"}))["routes"])

    def wires(self) -> dict[str, Wire]:
        """Return the cables of services in namespaces of their own, by service."""
        return namespaces.read(self.folder)

    def action(self, fault: Fault, target: str, seed: str) -> Action:
        return action_of(fault, target, self, seed)

    async def undo(self) -> list[str]:
        return (await healing.undo(self.folder)).wrong

    def unable(self) -> dict[Kind, str]:
        kinds = set(self.kinds().values())
        reasons = dict.fromkeys(SIMULATED, "it exists in the simulation only: leave it out")
        if not self.proxied:
            why = (
                "the services reach their broker without a proxy: let `skerry up` start the "
                "broker, or give it one nats:// address"
            )
            reasons |= dict.fromkeys(NETWORK, why)
        if BROKER not in kinds:
            why = "the broker was not started by this cluster: start `skerry up` without --nats"
            reasons |= dict.fromkeys(BROKER_KINDS - SIMULATED, why)
        if not hasattr(resource, "prlimit"):
            reasons[Kind.DISK_FULL] = "it needs Linux (prlimit): leave it out"
        if not clock.names(self.folder):
            reasons[Kind.CLOCK_JUMP] = clock.FIX
        if not all(_ours(entry) for entry in self.entries().values()):
            why = "its processes are another user's: run this command as that user"
            reasons |= dict.fromkeys(set(Kind) - SIMULATED, why)
        return reasons


def _ours(entry: ProcessEntry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True
