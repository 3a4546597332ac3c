"""One tape of faults for the simulator and for ``skerry chaos``: ``skerry_tools.chaos.plan``.

What a fault does to time, and no more: a killed learner is away and starts again, a paused one
stands still, one that is cut off trains on but takes no part in rounds; without a syncer or broker
no round closes. Faults of messages, disks and clocks that cost no time are left out, and named.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from skerry.errors import ConfigError
from skerry_tools.chaos.plan import BROKER, BROKER_KINDS, Fault, FaultPlan, Kind, check, choose
from skerry_tools.plan.process import Absence, Use
from skerry_tools.plan.simulate import Struck

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry_tools.plan.simulate import Outcome

LEARNER, SYNCER = "learner", "syncer"
NO_TIME = frozenset({
    Kind.SLOW, Kind.CLOCK_JUMP, Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER, Kind.LOST_ACK,
    Kind.REDELIVER, Kind.WINDOW_DROP,
})  # fmt: skip
"""Faults that the run is built to take without losing time."""
MILLI = 1000.0


def read(plan: FaultPlan, services: Mapping[str, str], *, take_over_s: float = 2.0) -> Struck:
    """Return what a plan does to the learners of ``services`` (name to kind), in their order.

    Each fault strikes whom the chaos harness would strike, by the same draw. ``take_over_s`` is how
    long a dead syncer's work lies still until another one has it. ConfigError for a target that
    does not exist here.
    """
    known = {**services, BROKER: BROKER}
    check(plan, known)
    order = [name for name, kind in services.items() if kind == LEARNER]
    absences: dict[int, list[Absence]] = defaultdict(list)
    cut: dict[int, list[tuple[float, float]]] = defaultdict(list)
    stalled: list[tuple[float, float]] = []
    for index, fault in enumerate(plan.faults):
        if fault.kind in NO_TIME:
            continue
        name = choose(plan, index, known)
        lasts = (fault.at_s, fault.end_s)
        if fault.kind in BROKER_KINDS:
            stalled.append(lasts)
        elif known[name] == SYNCER:
            stalled.append((fault.at_s, fault.end_s + take_over_s * (fault.kind is Kind.KILL)))
        elif known[name] == LEARNER and fault.kind is Kind.PARTITION:
            cut[order.index(name)].append(lasts)
        elif known[name] == LEARNER:
            away = Absence(*lasts, Use.OUTAGE, restart=fault.kind is Kind.KILL)
            absences[order.index(name)].append(away)
    return Struck(
        {number: tuple(found) for number, found in absences.items()},
        {number: tuple(sorted(found)) for number, found in cut.items()},
        tuple(sorted(stalled)),
    )


def without_time(plan: FaultPlan) -> dict[str, int]:
    """Return how many faults of each kind a simulation leaves out."""
    kinds = [fault.kind.value for fault in plan.faults if fault.kind in NO_TIME]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def of(found: Outcome, seed: int = 0) -> FaultPlan:
    """Return what failed in a simulation as a plan that the chaos harness can carry out.

    Whole learners are killed there, so ConfigError where a learner has more than one slice.
    """
    faults: list[Fault] = []
    for number, timeline in enumerate(found.timelines):
        if not set(timeline.shares.tolist()) <= {0.0, 1.0}:
            msg = (
                "A learner of several slices fails in parts, which no fault plan can say: make "
                "fleet.slice_chips the chips of a learner."
            )
            raise ConfigError(msg, path="fleet.slice_chips")
        struck = (timeline.uses == Use.RECOVER) & (timeline.lengths > 0) & (timeline.shares == 0)
        for index in struck.nonzero()[0].tolist():
            at_s, lasts_s = float(timeline.times[index]), float(timeline.lengths[index])
            name = f"{LEARNER}:{number}"
            faults.append(Fault(_milli(at_s), Kind.KILL, name, _milli(lasts_s)))
    return FaultPlan(seed, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _milli(seconds: float) -> float:
    return round(seconds * MILLI) / MILLI
