"""A cluster on this machine: its log, its processes, its supervisor, and the faults it can suffer.

What each kind of fault does to a real process, how one sees that it fired, and its end.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.cli.cluster import clock, processes
from skerry.cli.cluster.processes import BROKER, ProcessEntry
from skerry.log.base import Bus
from skerry.service.control import CONTROL, ask
from skerry_tools.chaos import healing
from skerry_tools.chaos.drilled import SIMULATION_ONLY, Absent, Injected, Injection, Proof, running
from skerry_tools.chaos.messages import MESSAGES
from skerry_tools.chaos.plan import Kind

SLOW_BYTES_S = 4e6
"""Rate of a slow link, beside its delay."""
RESET_SHARE = 0.3
"""Share of the partitions that end connections; the others pass nothing."""
PENDING_XFSZ = 1 << (signal.SIGXFSZ - 1)
COUNTERS = {
    "stalled_bytes": "bytes stalled",
    "shaped_bytes": "bytes held up",
    "lost_segments": "segments lost",
    "aborted": "connections reset",
    "refused": "connections kept out",
}


@asynccontextmanager
async def killed(drilled: LocalRun, injection: Injection) -> AsyncGenerator[Proof]:
    """SIGKILL; the cluster's supervisor starts it again once the fault is over."""
    was = running(drilled.entries(), injection.target)
    back_after_s = injection.fault.duration_s
    await drilled.control(op="kill", name=was.name, back_after_s=back_after_s)

    async def proof() -> str:
        return "" if was.alive else f"pid {was.pid} is gone"

    yield proof


@asynccontextmanager
async def paused(drilled: LocalRun, injection: Injection) -> AsyncGenerator[Proof]:
    """SIGSTOP, later SIGCONT."""
    was = running(drilled.entries(), injection.target)
    if was.paused:
        msg = f"{was.name} is paused already"
        raise Absent(msg)

    async def proof() -> str:
        return f"/proc says pid {was.pid} is stopped (T)" if was.paused else ""

    os.kill(was.pid, signal.SIGSTOP)
    try:
        yield proof
    finally:
        healing.resume(was)


@asynccontextmanager
async def rerouted(drilled: LocalRun, target: str, **shape: object) -> AsyncGenerator[Proof]:
    """Cut or slow the route to the broker through the proxy."""
    running(drilled.entries(), target)
    before = (await drilled.routes())[target]

    async def proof() -> str:
        now = (await drilled.routes())[target]
        more = {words: now[name] - before[name] for name, words in COUNTERS.items()}
        return ", ".join(f"{count} {words}" for words, count in more.items() if count > 0)

    try:
        await drilled.control(op="set", route=target, **shape)
        yield proof
    finally:
        await drilled.control(op="set", route=target)


def partitioned(drilled: LocalRun, injection: Injection) -> Injected:
    """Return a partition: one that resets connections, or one that passes nothing."""
    cut = "reset" if injection.chance.random() < RESET_SHARE else "blackhole"
    return rerouted(drilled, injection.target, cut=cut)


def slowed(drilled: LocalRun, injection: Injection) -> Injected:
    """Return a link that holds every message up."""
    delay_s = injection.fault.amount
    return rerouted(drilled, injection.target, delay_s=delay_s, rate_bytes_s=SLOW_BYTES_S)


def lossy(drilled: LocalRun, injection: Injection) -> Injected:
    """Return a link that loses segments, each held back until TCP would have sent it again."""
    return rerouted(drilled, injection.target, loss=injection.fault.amount)


@asynccontextmanager
async def disk_filled(drilled: LocalRun, injection: Injection) -> AsyncGenerator[Proof]:
    """Let no file of the broker's grow: every write fails as on a full disk."""
    was = running(drilled.entries(), injection.target)

    async def proof() -> str:
        """The server has the signal of a refused write pending, which it blocks."""
        return "the broker was refused a write (SIGXFSZ is pending)" if _refused(was.pid) else ""

    healing.limit_files(was.pid, 0)
    try:
        yield proof
    finally:
        if was.alive:
            healing.limit_files(was.pid, None)


@asynccontextmanager
async def clock_moved(drilled: LocalRun, injection: Injection) -> AsyncGenerator[Proof]:
    """Move the wall clock of a service by some seconds, and set it right again."""
    name, seconds = injection.target, injection.fault.amount
    running(drilled.entries(), name)

    async def proof() -> str:
        read = clock.was_read(drilled.folder, name)
        return f"{name} has read a clock that is off by {seconds:+.0f} s" if read else ""

    try:
        clock.move(drilled.folder, name, seconds)
        yield proof
    finally:
        clock.move(drilled.folder, name, 0.0)


def _refused(pid: int) -> bool:
    """Return True if a thread of a process has the signal of a refused write pending."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            pending = re.search(r"^SigPnd:\s*(\w+)", status.read_text("utf-8"), re.MULTILINE)
            if pending and int(pending[1], 16) & PENDING_XFSZ:
                return True
    return False


PROXY, LIMITS, CLOCKS = "proxy", "limits", "clocks"
"""What a cluster must have for some faults, beside its processes and a broker."""
INJECT: Mapping[Kind, Callable[[LocalRun, Injection], Injected]] = {
    Kind.KILL: killed,
    Kind.PAUSE: paused,
    Kind.PARTITION: partitioned,
    Kind.SLOW: slowed,
    Kind.LOST_PACKETS: lossy,
    Kind.BROKER_KILL: killed,
    Kind.BROKER_PAUSE: paused,
    Kind.DISK_FULL: disk_filled,
    Kind.CLOCK_JUMP: clock_moved,
    **MESSAGES,
}
"""Every fault that exists outside the simulation."""
NEEDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.PARTITION: (PROXY,),
    Kind.SLOW: (PROXY,),
    Kind.LOST_PACKETS: (PROXY,),
    Kind.BROKER_KILL: (BROKER,),
    Kind.BROKER_PAUSE: (BROKER,),
    Kind.DISK_FULL: (LIMITS, BROKER),
    Kind.CLOCK_JUMP: (CLOCKS,),
}


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
        return INJECT[injection.fault.kind](self, injection)

    async def undo(self) -> list[str]:
        return (await healing.undo(self.folder)).wrong

    def unable(self) -> dict[Kind, str]:
        if not all(_is_ours(entry) for entry in self.entries().values()):
            why = "its processes are another user's: run this command as that user"
            return dict.fromkeys(Kind, why)
        missing: dict[str, str] = {}
        if not self.proxied:
            missing[PROXY] = (
                "the services reach their broker without a proxy: let `skerry up` start the "
                "broker, or give it one nats:// address"
            )
        if BROKER not in self.kinds().values():
            why = "the broker was not started by this cluster: start `skerry up` without --nats"
            missing[BROKER] = why
        if not hasattr(resource, "prlimit"):
            missing[LIMITS] = "it needs Linux (prlimit): leave it out"
        if not clock.names(self.folder):
            missing[CLOCKS] = clock.FIX
        reasons = {
            kind: next((missing[need] for need in NEEDS.get(kind, ()) if need in missing), "")
            for kind in INJECT
        }
        reasons |= dict.fromkeys(set(Kind) - INJECT.keys(), SIMULATION_ONLY)
        return {kind: why for kind, why in reasons.items() if why}


def _is_ours(entry: ProcessEntry) -> bool:
    try:
        os.kill(entry.pid, 0)
    except PermissionError:
        return False
    except ProcessLookupError:
        return True
    return True
