"""Reads a run's whole log and checks what must be true of it, whatever was killed on the way.

Thin on top of ``skerry_tools.audit``: the checks are those of ``skerry ledger verify --replay``.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass

from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.reading import newest_sequence, read_now
from skerry.log.state_writer import StateWriter
from skerry.protocol.contribution import (
    Contribution,
    ContributionAssembler,
)
from skerry.protocol.messages import Commit
from skerry.protocol.records import plan_of
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.verify import verify

Key = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class History:
    """What the log holds: commits in ledger order and whole contributions by key."""

    commits: tuple[Commit, ...]
    contributions: dict[Key, Contribution]
    violations: tuple[str, ...]


async def settle(bus: Bus, run: str) -> History:
    """Read the history of a run whose syncer is dead, after doing what the next one would first.

    Takes every shard's fence, so that nothing can be committed meanwhile, and mends the ledger.
    """
    record = await ledger.read_run(bus, run)
    plan = plan_of(record)
    for shard in range(plan.shards):
        writer = await StateWriter.acquire(
            bus, run, plan, holder="settle", now_ns=time.time_ns(), shard=shard
        )
        await writer.recover()
    return await read_history(bus, run)


async def read_history(bus: Bus, run: str) -> History:
    """Return the run's history with every violation found in it."""
    log = RunLog.of(bus, await ledger.read_run(bus, run))
    report = await verify(bus, run, replay=True)
    entries = log.ledger(await newest_sequence(bus, log.subjects.commit()))
    async with aclosing(entries):
        values = [entry.value async for entry in entries]
    commits = tuple(value for value in values if isinstance(value, Commit))
    whole = await _contributions(log)
    stopped = (f.stopped for f in report.replayed.fragments if f.stopped) if report.replayed else ()
    said = (*(v.sentence for v in report.violations), *stopped)
    return History(commits, whole, said)


async def _contributions(log: RunLog) -> dict[Key, Contribution]:
    found: list[Contribution] = []
    for shard in log.shards:
        pattern, assembler = shard.contribution(), ContributionAssembler(log.run, log.plan)
        records = read_now(log.bus, pattern)
        async with aclosing(records):
            fed = [assembler.feed(record) async for record in records]
        found += [got for got in fed if isinstance(got, Contribution)]
    return {
        (c.header.fragment, c.header.learner, c.header.incarnation, c.header.identity): c
        for c in found
    }
