"""What each kind of fault does to a real process, how one sees that it fired, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.cluster import clock
from skerry_tools.chaos.drilled import Absent, running
from skerry_tools.chaos.hostile import MESSAGES
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from skerry_tools.chaos.drilled import Injected, Injection, Proof
    from skerry_tools.chaos.local import LocalRun

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


class Requirement(StrEnum):
    """What a cluster must have for a fault."""

    LOG = "log"
    PROCESS = "process"
    PROXY = "proxy"
    BROKER = "broker"
    LIMITS = "limits"
    CLOCKS = "clocks"


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
        with contextlib.suppress(ProcessLookupError):
            if was.alive:
                os.kill(was.pid, signal.SIGCONT)


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

    limit_files(was.pid, 0)
    try:
        yield proof
    finally:
        if was.alive:
            limit_files(was.pid, None)


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


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """How a fault is injected, and what the cluster must have for it."""

    inject: Callable[[LocalRun, Injection], Injected]
    needs: tuple[Requirement, ...]


FAULTS: Mapping[Kind, FaultSpec] = {
    Kind.KILL: FaultSpec(killed, (Requirement.PROCESS,)),
    Kind.PAUSE: FaultSpec(paused, (Requirement.PROCESS,)),
    Kind.PARTITION: FaultSpec(partitioned, (Requirement.PROXY,)),
    Kind.SLOW: FaultSpec(slowed, (Requirement.PROXY,)),
    Kind.LOST_PACKETS: FaultSpec(lossy, (Requirement.PROXY,)),
    Kind.BROKER_KILL: FaultSpec(killed, (Requirement.BROKER,)),
    Kind.BROKER_PAUSE: FaultSpec(paused, (Requirement.BROKER,)),
    Kind.DISK_FULL: FaultSpec(disk_filled, (Requirement.LIMITS, Requirement.BROKER)),
    Kind.CLOCK_JUMP: FaultSpec(clock_moved, (Requirement.CLOCKS,)),
    **{kind: FaultSpec(inject, (Requirement.LOG,)) for kind, inject in MESSAGES.items()},
}
"""Every fault that exists outside the simulation."""
ROUTE = frozenset({Kind.PARTITION, Kind.SLOW, Kind.LOST_PACKETS})
"""A route suffers one of these at a time."""


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


def _refused(pid: int) -> bool:
    """Return True if a thread of a process has the signal of a refused write pending."""
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):
            pending = re.search(r"^SigPnd:\s*(\w+)", status.read_text("utf-8"), re.MULTILINE)
            if pending and int(pending[1], 16) & PENDING_XFSZ:
                return True
    return False
