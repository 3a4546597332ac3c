"""What must be true after a schedule: of the log, of who read it, and of who was told of a commit.

The log's own promises are those of ``skerry_tools.audit``; added here is what only a witness can
say: no commit that a syncer was told of is missing, none was made behind an overtaken fence,
no reader saw half a version, and everybody counts again once the faults are over.
"""

from __future__ import annotations

from skerry.errors import SkerryError
from skerry.log import ledger
from skerry.protocol.messages import Commit, Manifest, RunState
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry_tools.audit.accounts import Violation, What
from skerry_tools.audit.verify import verify
from tests.support.simulation.cluster import RUN, Cluster


async def judge(cluster: Cluster, healed_at: int) -> tuple[str, ...]:
    """Return everything that is wrong; ``healed_at`` is the ledger's end when the faults ended."""
    bus = cluster.network.broker.connect()
    wrong = [*cluster.crashes, *cluster.observations.wrong]
    try:
        report = await verify(bus, RUN, replay=True)
    except SkerryError as error:
        return (*wrong, f"the log cannot be read: {error}")
    wrong += [v.sentence for v in report.violations if not _out_of_window(v, cluster)]
    wrong += report.notes
    wrong += _told(cluster)
    wrong += _fenced(cluster)
    if (await ledger.read_run(bus, RUN)).state is not RunState.FINISHED:
        wrong.append("the run is not finished")
    wrong += _merged_again(cluster, healed_at)
    return tuple(wrong)


def _out_of_window(violation: Violation, cluster: Cluster) -> bool:
    """Tell whether what was never resolved had left the window before anybody could."""
    unresolved = violation.what is What.UNRESOLVED
    return unresolved and (violation.fragment, violation.learner) in cluster.network.dropped


def _told(cluster: Cluster) -> list[str]:
    """Check that every manifest that was stored or acknowledged has its commit in the ledger."""
    held = {(c.fragment, c.version): c for c in _commits(cluster)}
    stored = [s.payload for s in cluster.network.broker.log if s.subject.endswith(".manifest")]
    wrong: list[str] = []
    for payload in dict.fromkeys([*stored, *cluster.network.acknowledged]):
        commit = decode(Manifest, payload, run=RUN, plan_digest=cluster.plan.digest).commit
        if repr(held.get((commit.fragment, commit.version))) != repr(commit):
            wrong.append(
                f"fragment {commit.fragment}: version {commit.version} by {commit.syncer} was"
                " committed and is not in the ledger"
            )
    return wrong


def _fenced(cluster: Cluster) -> list[str]:
    """Check that nothing was committed behind a fence that had been overtaken by then."""
    wrong: list[str] = []
    subjects = Subjects(RUN)
    for stored in cluster.network.broker.log:
        if not stored.subject.endswith(".manifest"):
            continue
        commit = decode(Manifest, stored.payload, run=RUN, plan_digest=cluster.plan.digest).commit
        shard = commit.fragment % cluster.scenario.shards
        newest = stored.fences.get(subjects.shard(shard).fence(), 0)
        if commit.fence != newest:
            wrong.append(
                f"fragment {commit.fragment}: version {commit.version} was committed by"
                f" {commit.syncer} at {stored.at_s:.3f} s behind fence {commit.fence}, when"
                f" {newest} had been taken"
            )
    return wrong


def _merged_again(cluster: Cluster, healed_at: int) -> list[str]:
    """Check that every learner was merged after the faults were over."""
    merged = {c.learner for commit in _commits(cluster, healed_at) for c in commit.consumed}
    names = [p.name for p in cluster.processes.values() if p.kind == "learner"]
    return [f"{name} was not merged again after the faults" for name in names if name not in merged]


def _commits(cluster: Cluster, after: int = 0) -> list[Commit]:
    """Return the commits that the ledger took behind a sequence, as they were stored."""
    return [
        decode(Commit, stored.payload, run=RUN)
        for stored in cluster.network.broker.log
        if ".ledger.commit." in stored.subject and stored.sequence > after
    ]
