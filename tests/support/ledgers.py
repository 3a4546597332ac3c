"""Ledgers of runs that went through faults, ledgers made by hand, and what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from skerry.protocol.commit import progress_after
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.messages import Commit, CommitOrigin, LearnerProgress, MemberRecord
from skerry.protocol.records import decode
from skerry.protocol.shard import WeightRule
from skerry.protocol.subjects import Subjects
from skerry.settings.loading import run_config_from_json
from skerry_tools.audit.accounts import Violation
from skerry_tools.audit.checks import Checks, Rules
from tests.support.simulation.cluster import RUN
from tests.support.simulation.scenario import draw_plan
from tests.support.simulation.schedule import lived

TOKENS = 16
"""Of one sequence of data, in a ledger made by hand."""
RULES = Rules(2, ContributionRules(TOKENS), WeightRule(4, 0.5))

Record = MemberRecord | Commit


@cache
def ledger_of(seed: int) -> tuple[list[Record], Rules]:
    """Return what real learners and syncers left in their ledger under a seed's faults."""
    names = Subjects(RUN)
    with lived(draw_plan(seed)) as (cluster, _, _):
        streams = cluster.network.broker.streams
        stored = sorted(
            (
                record
                for kind in ("MEMBERS", "LEDGER")
                for record in streams[names.stream(kind)].records.values()
            ),
            key=lambda record: record.time_ns,
        )
        config = run_config_from_json(cluster.scenario.config_json)
        found: list[Record] = []
        for record in stored:
            if record.subject.startswith(names.member().removesuffix("*")):
                found.append(decode(MemberRecord, record.payload, run=RUN))
            elif record.subject.startswith(names.commit().removesuffix("*")):
                found.append(decode(Commit, record.payload, run=RUN))
        return found, Rules.of(config)


def tabled(records: Sequence[Record]) -> list[Record]:
    """Return the records with the progress tables that fit what their commits consumed."""
    rows: dict[int, dict[str, LearnerProgress]] = {}
    found: list[Record] = []
    for record in records:
        if isinstance(record, Commit):
            genesis = record.origin is CommitOrigin.GENESIS
            held = rows.get(record.fragment, {})
            rows[record.fragment] = after = progress_after(held, record.consumed, genesis=genesis)
            found.append(replace(record, progress=tuple(after.values())))
        else:
            found.append(record)
    return found


def violations(
    records: Sequence[Record], rules: Rules = RULES, *, offers: Sequence[Contribution] = ()
) -> list[Violation]:
    """Return everything that is wrong with a ledger; record n was stored at nanosecond n."""
    checks = Checks(rules)
    for offer in offers:
        checks.offer(offer)
    for record in records:
        if isinstance(record, MemberRecord):
            checks.joined(record)
    found: list[Violation] = []
    for sequence, record in enumerate(records, 1):
        if isinstance(record, Commit):
            found += checks.commit(record, sequence, sequence)
        else:
            found += checks.member(record, sequence)
    return found + checks.finish()
