"""What a drill works on: a run's log, its services, and which faults can be injected there.

``local`` is a cluster of this machine with its processes, ``remote`` a run of which no more than
the log is known.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from skerry.cli.cluster.processes import ProcessEntry
from skerry.errors import ConfigError, SkerryError
from skerry.tasks import TaskGroup
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind, candidates, check

if TYPE_CHECKING:
    from skerry.log.base import Bus


LOOK_S = 0.05
SIMULATION_ONLY = "it exists in the simulation only: leave it out"


class NotFired(SkerryError):
    """A fault had no effect; the message says why, and it is counted so."""


class Absent(NotFired):
    """There was nothing to strike: the target was down, or suffers the like already."""


@dataclass(frozen=True, slots=True)
class HeardService:
    """The newest word of a service, at ``at_s`` of this machine's monotonic clock.

    That is minus infinity for what was said before we listened. A silence longer than ``silent_s``
    means down. A service that was stopped only looks silent from here.
    """

    name: str
    kind: str
    which: str
    at_s: float
    silent_s: float
    paused: bool = False

    @property
    def alive(self) -> bool:
        return time.monotonic() - self.at_s <= self.silent_s


DrilledService: TypeAlias = ProcessEntry | HeardService
"""A service, or the broker, as it is now; ``which`` differs from start to start."""
S = TypeVar("S", bound=DrilledService)


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault of a plan, the service that it strikes, and the source of what it draws."""

    fault: Fault
    target: str
    chance: random.Random

    @classmethod
    def of(cls, fault: Fault, target: str, seed: str) -> Injection:
        return cls(fault, target, random.Random(seed))  # noqa: S311 - faults, no secrets


Proof = Callable[[], Awaitable[str]]
"""Returns the evidence that a fault has fired; empty as long as there is none."""
Injected = AbstractAsyncContextManager[Proof]
"""A fault while it lasts. Entering raises Absent or NotFired; leaving takes the fault back."""


class DrilledRun(Protocol):
    """One run and its services; ``logs`` says in words where theirs are."""

    @property
    def run(self) -> str: ...

    @property
    def bus(self) -> Bus:
        """Reaches the run's broker, faults or not."""
        ...

    @property
    def logs(self) -> str: ...

    def entries(self) -> Mapping[str, DrilledService]:
        """Return what is known to be there now, by name."""
        ...

    async def settle(self) -> None:
        """Return once ``entries`` shows as alive only what lived when this was called."""
        ...

    def kinds(self) -> dict[str, str]:
        """Return what can be struck, and has to work again afterwards: kinds by name."""
        ...

    def unable(self) -> dict[Kind, str]:
        """Return the kinds of faults that cannot be done here: why not, and what to do."""
        ...

    def inject(self, injection: Injection) -> Injected:
        """Return a fault that can be done here."""
        ...

    async def undo(self) -> list[str]:
        """Undo every fault there is, known or not; return sentences on what could not be."""
        ...

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every route to the broker that is known, by its service."""
        ...


def running(entries: Mapping[str, S], name: str) -> S:
    """Return one service; Absent if it is down."""
    held = entries.get(name)
    if held is None or not held.alive:
        msg = f"{name} is down already"
        raise Absent(msg)
    return held


def able(drilled: DrilledRun) -> tuple[Kind, ...]:
    """Return the kinds of faults that can be done here."""
    reasons = drilled.unable()
    return tuple(kind for kind in Kind if kind not in reasons)


def refuse(plan: FaultPlan, drilled: DrilledRun) -> None:
    """Raise ConfigError for the first fault that does not exist or cannot be done here."""
    refuse_kinds((fault.kind for fault in plan.faults), drilled, "kind")
    check(plan, drilled.kinds())


def refuse_kinds(kinds: Iterable[Kind], drilled: DrilledRun, path: str = "kinds") -> None:
    """Raise ConfigError for the first kind that cannot be done here."""
    reasons = drilled.unable()
    for kind in kinds:
        if kind in reasons:
            msg = f"A {kind} cannot be done here: {reasons[kind]}."
            raise ConfigError(msg, path=path)


def refuse_targets(targets: Iterable[str], drilled: DrilledRun) -> None:
    """Raise ConfigError for the first target that is nothing in this cluster."""
    known = drilled.kinds()
    for target in targets:
        if not candidates(target, known):
            names = ", ".join(sorted({*known, *known.values()}))
            msg = f"There is no {target!r} in this cluster: use any of {names}."
            raise ConfigError(msg, path="targets")


async def holds(condition: Callable[[], bool], within_s: float | None = None) -> bool:
    """Look at a condition until it holds, so long at most; return True if it does."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - others' processes send no event
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        return False
    return True


@asynccontextmanager
async def beside(*work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Run these while the context lasts; an error of one of them ends the context."""
    async with TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
