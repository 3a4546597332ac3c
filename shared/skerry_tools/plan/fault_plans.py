"""One fault plan for the simulator and for ``skerry chaos``: ``skerry_tools.chaos.plan``.

Only what a fault does to time counts: a killed learner is away and starts again, a paused one
stands still, one that is cut off trains on but takes no part in rounds; without a syncer or broker
no round closes. Faults of messages, disks and clocks cost no time here and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from skerry_tools.chaos.plan import (
    BROKER,
    BROKER_KINDS,
    HOSTILE,
    Fault,
    FaultPlan,
    Kind,
    check,
    choose,
)
from skerry_tools.plan.failures import Absence, TimeUse
from skerry_tools.plan.question import refuse
from skerry_tools.plan.simulation import Faults, SimulatedRun

LEARNER, SYNCER = "learner", "syncer"
NO_TIME = frozenset({
    Kind.SLOW, Kind.LOST_PACKETS, Kind.CLOCK_JUMP, Kind.CORRUPT, Kind.DUPLICATE, Kind.REORDER,
    Kind.LOST_ACK, Kind.REDELIVER, Kind.WINDOW_DROP, *HOSTILE,
})  # fmt: skip
"""Faults that the run is built to take without losing time."""


def services(learners: int) -> dict[str, str]:
    """Return the services of a local cluster with so many learners: kind by name."""
    from skerry.cli.cluster.team import Team

    return Team(learners).kinds()


def faults_of(plan: FaultPlan, services: Mapping[str, str], take_over_s: float = 2.0) -> Faults:
    """Return what a plan does to the learners of ``services``, in their order.

    Each fault hits the service that the chaos tool would hit, by the same draw. ``take_over_s`` is
    how long a dead syncer's work rests until another one has it. ConfigError for a target that does
    not exist.
    """
    known = {**services, BROKER: BROKER}
    check(plan, known)
    order = [name for name, kind in services.items() if kind == LEARNER]
    absences: dict[int, list[Absence]] = defaultdict(list)
    cut: dict[int, list[tuple[float, float]]] = defaultdict(list)
    stalled: list[tuple[float, float]] = []
    for index, fault in enumerate(plan.faults):
        name = BROKER if fault.kind in NO_TIME else choose(plan, index, known)
        lasts, kill = (fault.at_s, fault.end_s), fault.kind is Kind.KILL
        if fault.kind in BROKER_KINDS - NO_TIME:
            stalled.append(lasts)
        elif known[name] == SYNCER:
            stalled.append((fault.at_s, fault.end_s + take_over_s * kill))
        elif known[name] == LEARNER and fault.kind is Kind.PARTITION:
            cut[order.index(name)].append(lasts)
        elif known[name] == LEARNER:
            absences[order.index(name)].append(Absence(*lasts, TimeUse.OUTAGE, restart=kill))
    return Faults(
        {number: tuple(found) for number, found in absences.items()},
        {number: tuple(sorted(found)) for number, found in cut.items()},
        tuple(sorted(stalled)),
    )


def plan_of(found: SimulatedRun) -> FaultPlan:
    """Return what failed in a simulation as a plan that ``skerry chaos`` can carry out.

    It kills whole learners, so ConfigError where a learner has more than one slice.
    """
    faults: list[Fault] = []
    for number, timeline in enumerate(found.timelines):
        if not set(timeline.shares.tolist()) <= {0.0, 1.0}:
            text = "makes learners of several slices, which fail in parts, as no fault plan can: "
            refuse("fleet.slice_chips", f"{text}give the chips of a learner.")
        failed = (
            (timeline.uses == TimeUse.RECOVER) & (timeline.lengths > 0) & (timeline.shares == 0)
        )
        for at_s, lasts_s in zip(timeline.times[failed], timeline.lengths[failed], strict=True):
            name = f"{LEARNER}:{number}"
            faults.append(Fault(round(float(at_s), 3), Kind.KILL, name, round(float(lasts_s), 3)))
    seed = found.setup.question.tables.simulation.seed
    return FaultPlan(seed, tuple(sorted(faults, key=lambda fault: fault.at_s)))
