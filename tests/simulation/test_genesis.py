"""One learner offers a run's initial parameters, and another one does where that dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from skerry.protocol.messages import Commit
from skerry.protocol.records import decode
from skerry.protocol.subjects import contributor
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.simulation.cluster import RUN, Cluster
from tests.support.simulation.oracle import judge
from tests.support.simulation.schedule import lived

SEEDS = (1, *(pytest.param(seed, marks=pytest.mark.drill) for seed in (2, 8)))


def first_commits(cluster: Cluster) -> Iterator[Commit]:
    """Yield the commit of version 1 of each fragment."""
    for stored in cluster.network.broker.streams[f"SKERRY_{RUN}_LEDGER"].records.values():
        if ".commit." in stored.subject:
            commit = decode(Commit, stored.payload, run=RUN)
            if commit.version == 1:
                yield commit


def live(plan: FaultPlan) -> tuple[list[Commit], float]:
    """Live through a plan; return the first commits, and when something was offered first."""
    with lived(plan) as (cluster, wrong, healed_at):
        judging = cluster.loop.create_task(judge(cluster, healed_at))
        cluster.loop.run_until(judging, cluster.loop.time() + 1000.0)
        assert (*wrong, *judging.result()) == ()
        sent = [s for s in cluster.network.broker.log if ".contrib." in s.subject]
        offers = [s.at_s for s in sent if contributor(s.subject)[1].startswith("learner")]
        return list(first_commits(cluster)), min(offers)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_learner_alone_offers_unless_it_dies(seed: int) -> None:
    commits, offered_s = live(FaultPlan(seed, ()))
    assert [c.fragment for c in commits if c.refused] == []
    (first,) = {item.learner for commit in commits for item in commit.consumed}
    kill = Fault(at_s=offered_s, kind=Kind.KILL, target=first, duration_s=20.0)
    commits, _ = live(FaultPlan(seed, (kill,)))
    assert {c.fragment for c in commits} == {0, 1}
    assert {item.learner for commit in commits for item in commit.consumed} - {first}
