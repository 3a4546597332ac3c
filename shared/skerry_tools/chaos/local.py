"""A cluster on this machine: its log, its processes, and its supervisor in its run folder."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.cli.cluster import clock, processes
from skerry.cli.cluster.processes import BROKER, ProcessEntry
from skerry.service.control import CONTROL, ask
from skerry_tools.chaos import healing
from skerry_tools.chaos.faults import FAULTS, Requirement
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    from skerry.log.base import Bus
    from skerry_tools.chaos.drilled import Injected, Injection


@dataclass(frozen=True, slots=True)
class LocalRun:
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
        """Return at once: the table of processes is always up to date."""

    def kinds(self) -> dict[str, str]:
        """Return what can be struck: the kind of every process by its name."""
        return {name: entry.kind for name, entry in self.entries().items()}

    async def control(self, **order: object) -> dict[str, Any]:
        """Send an order to the cluster's supervisor, and return its answer."""
        return await ask(self.folder / CONTROL, order)

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every route by its service; none where there is no proxy."""
        return dict((await self.control(op="show"))["routes"]) if self.proxied else {}

    def inject(self, injection: Injection) -> Injected:
        return FAULTS[injection.fault.kind].inject(self, injection)

    async def undo(self) -> list[str]:
        return (await healing.undo(self.folder)).wrong

    def unable(self) -> dict[Kind, str]:
        reasons = dict.fromkeys(Kind, "it exists in the simulation only: leave it out")
        missing = self._missing()
        for kind, spec in FAULTS.items():
            reasons[kind] = next((missing[need] for need in spec.needs if need in missing), "")
        return {kind: why for kind, why in reasons.items() if why}

    def _missing(self) -> dict[Requirement, str]:
        """Return what this cluster lacks: why, and what to do."""
        if not all(_ours(entry) for entry in self.entries().values()):
            why = "its processes are another user's: run this command as that user"
            return dict.fromkeys(Requirement, why)
        missing: dict[Requirement, str] = {}
        if not self.proxied:
            missing[Requirement.PROXY] = (
                "the services reach their broker without a proxy: let `skerry up` start the "
                "broker, or give it one nats:// address"
            )
        if BROKER not in self.kinds().values():
            why = "the broker was not started by this cluster: start `skerry up` without --nats"
            missing[Requirement.BROKER] = why
        if not hasattr(resource, "prlimit"):
            missing[Requirement.LIMITS] = "it needs Linux (prlimit): leave it out"
        if not clock.names(self.folder):
            missing[Requirement.CLOCKS] = clock.FIX
        return missing


def _ours(entry: ProcessEntry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True
