"""One schedule: a cluster lives through the faults of a plan, heals, and is judged."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from skerry_tools.chaos.plan import FaultPlan, Kind, check
from skerry_tools.virtual import Stuck
from tests.support.simulation.cluster import RUN, Cluster
from tests.support.simulation.faults import schedule
from tests.support.simulation.oracle import judge
from tests.support.simulation.scenario import scenario_of

CONVERGED_S = 90.0
"""Virtual time after the last fault within which the run must be over."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a schedule; ``trace`` tells two runs of it apart, ``fired`` counts by kind."""

    violations: tuple[str, ...]
    trace: str
    commits: int
    virtual_s: float
    fired: Counter[Kind] = field(default_factory=Counter[Kind])


def simulate(plan: FaultPlan) -> Outcome:
    """Run one schedule to its end and judge it; the same plan gives the same outcome.

    Raises ConfigError for a plan whose targets this cluster does not have.
    """
    with lived(plan) as (cluster, wrong, healed_at):
        loop, network = cluster.loop, cluster.network
        judging = loop.create_task(judge(cluster, healed_at))
        loop.run_until(judging, loop.time() + 1000.0)
        log = network.broker.log
        text = "\n".join(f"{s.at_s:.6f} {s.client} {s.subject} {s.sequence}" for s in log)
        return Outcome(
            (*wrong, *judging.result()),
            hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            sum(".ledger.commit." in s.subject for s in log),
            loop.time(),
            network.fired,
        )


@contextmanager
def lived(plan: FaultPlan) -> Generator[tuple[Cluster, tuple[str, ...], int]]:
    """Yield the cluster of a schedule at its end, what was wrong, and the ledger's end at healing.

    Raises ConfigError for a plan whose targets this cluster does not have.
    """
    cluster = Cluster(scenario_of(plan), plan.seed)
    check(plan, cluster.services)
    loop, network, healed = cluster.loop, cluster.network, [0]

    def note_end() -> None:
        stream = network.broker.streams.get(f"SKERRY_{RUN}_LEDGER")
        healed.append(stream.last_seq if stream else 0)

    try:
        for name in cluster.processes:
            cluster.start(name)
        schedule(cluster, plan)
        network.later(plan.end_s, note_end)
        wrong: tuple[str, ...] = ()
        try:
            over = loop.run_until(cluster.finished, plan.end_s + CONVERGED_S)
            if not over:
                wrong = (f"the run is not over {CONVERGED_S} s after the faults",)
        except Stuck as error:
            wrong = (str(error),)
        yield cluster, wrong, healed[-1]
    finally:
        cluster.close()
