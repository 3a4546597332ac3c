"""What a drill runs on: a run's log, who takes part in it, and which faults can strike them.

``local`` is a cluster of this machine with its processes, ``remote`` a run of which no more than
the log is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from skerry.errors import ConfigError, SkerryError
from skerry_tools.chaos.plan import FaultPlan, Kind, candidates, check

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.log.base import Bus
    from skerry_tools.chaos.plan import Fault

NETWORK = frozenset({Kind.PARTITION, Kind.SLOW})


class NotFired(SkerryError):
    """A fault had no effect; the message says why, and it is counted so."""


class Absent(NotFired):
    """There was nothing to strike: the target was down, or suffers the like already."""


class Action(Protocol):
    """One fault on one target. ``end`` undoes it, whatever became of it, and may come twice."""

    async def begin(self) -> None:
        """Strike; Absent if there is nothing to strike, NotFired if it has no effect."""
        ...

    async def proof(self) -> str:
        """Return how one sees that it has fired; empty as long as one does not."""
        ...

    async def end(self) -> None: ...


class Service(Protocol):
    """A service, or the broker, as it is now; ``which`` tells its starts apart, in words."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def which(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def paused(self) -> bool: ...


class Ground(Protocol):
    """One run and those who take part in it; ``logs`` says in words where theirs are."""

    @property
    def run(self) -> str: ...

    @property
    def bus(self) -> Bus:
        """What reaches the run's broker, faults or not."""
        ...

    @property
    def logs(self) -> str: ...

    def entries(self) -> Mapping[str, Service]:
        """Return what is known to be there now, by name."""
        ...

    async def settle(self) -> None:
        """Return once ``entries`` tells of nobody as alive who had ended before this call."""
        ...

    def entry(self, name: str) -> Service:
        """Return one of them; Absent if it is down."""
        ...

    def kinds(self) -> dict[str, str]:
        """Return what can be struck, and has to work again afterwards: kinds by name."""
        ...

    def unable(self) -> dict[Kind, str]:
        """Return the kinds of faults that cannot be done here: why not, and what to do."""
        ...

    def action(self, fault: Fault, target: str, seed: str) -> Action:
        """Return the action of a fault that can be done; whatever it draws comes from ``seed``."""
        ...

    async def undo(self) -> list[str]:
        """Undo every fault there is, known or not; return sentences on what could not be."""
        ...

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every way to the broker that is known, by its service."""
        ...


def able(ground: Ground) -> tuple[Kind, ...]:
    """Return the kinds of faults that can be done here."""
    reasons = ground.unable()
    return tuple(kind for kind in Kind if kind not in reasons)


def refuse(plan: FaultPlan, ground: Ground) -> None:
    """Raise ConfigError for the first fault that does not exist or cannot be done here."""
    refuse_kinds(tuple(fault.kind for fault in plan.faults), ground, "kind")
    check(plan, ground.kinds())


def refuse_kinds(kinds: tuple[Kind, ...], ground: Ground, path: str = "kinds") -> None:
    """Raise ConfigError for the first kind that cannot be done here."""
    reasons = ground.unable()
    for kind in kinds:
        if kind in reasons:
            msg = f"A {kind} cannot be done here: {reasons[kind]}."
            raise ConfigError(msg, path=path)


def refuse_targets(targets: tuple[str, ...], ground: Ground) -> None:
    """Raise ConfigError for the first target that is nothing in this cluster."""
    known = ground.kinds()
    for target in targets:
        if not candidates(target, known):
            names = ", ".join(sorted({*known, *known.values()}))
            msg = f"There is no {target!r} in this cluster: use any of {names}."
            raise ConfigError(msg, path="targets")
