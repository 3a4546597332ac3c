"""``skerry fork``, ``skerry rewind``: a run as it was at a moment, as a checkpoint to start from.

A fork may leave a learner out: what the others contributed is merged again without it, by the
syncer's own arithmetic and the run's own rules. What they would have learnt from another global
state is not known; they go on from this one.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from dataclasses import replace

from skerry.algorithm import closed_loop
from skerry.algorithm.backend import decoder
from skerry.cli.local_log import RunChoice
from skerry.errors import ConfigError
from skerry.log import ledger
from skerry.log.replay import FragmentFold
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit
from skerry.protocol.parts import MASTER, OUTER
from skerry.protocol.subjects import checked_token
from skerry.settings.checks import permissions
from skerry.settings.local import StoreSettings
from skerry.store.base import Store
from skerry.store.checkpoint import SavedLearner
from skerry.store.finding import root_of, store_of, summaries
from skerry.store.writer import CheckpointWriter, Snapshot, Written
from skerry_tools.audit.command import progress
from skerry_tools.audit.log import OnProgress, RunLog
from skerry_tools.audit.replay import Bases, bases_of, from_genesis, replay
from skerry_tools.audit.survey import ReplayMoment, parse, survey
from skerry_tools.audit.whatif import WhatIfPolicy


async def fork(
    log: RunLog,
    moment: ReplayMoment,
    run: str,
    store: Store,
    *,
    without: str | None = None,
    bases: Bases = from_genesis,
    on_progress: OnProgress = lambda _what, _done, _of: None,
) -> Written:
    """Write a checkpoint of run ``run``: the log's run as it was at a moment, without a learner.

    Raises ConfigError for a learner that the run never had, StateLost where the window lacks what a
    replay needs, HistoryBroken where what was committed does not replay.
    """
    members = await ledger.members(log.bus, log.run)
    if without is not None and without not in members:
        few = ", ".join(sorted(members)[:8])
        msg = f"Run {log.run!r} never had a learner {without!r}: there were {few}."
        raise ConfigError(msg, path="without")
    found = await survey(log, moment)
    record = replace(log.record, run=checked_token(run, "as"))
    writer = CheckpointWriter(store, record, log.plan, found.step)  # in no thread: Ctrl-C lost it

    def keep(fold: FragmentFold, last: Commit) -> None:
        scheme, leaves = log.config.sync.global_scheme, fold.outer.leaves(fold.state)
        shared = decoder(scheme).dequantise(scheme, closed_loop.begin(scheme, fold.master))
        commit = replace(
            last,
            run=run,
            params_digest=vector_digest(shared),
            master_digest=vector_digest(fold.master),
            progress=tuple(row for row in last.progress if row.learner != without),
        )
        parts = {MASTER: fold.master} | {OUTER + name: leaf for name, leaf in leaves.items()}
        writer.add(commit, shared, Snapshot(commit, parts))

    policy = WhatIfPolicy(without=without) if without is not None else None
    try:
        done = await replay(
            log, bases=bases, known=found, policy=policy, sink=keep, on_progress=on_progress
        )
        done.require_whole()
        return await asyncio.to_thread(
            writer.finish,
            index=0,
            learners=sorted(
                (SavedLearner(m.learner, m.shard) for m in members.values()), key=lambda m: m.shard
            ),
            ledger_sequence=found.sequence,
            now_ns=time.time_ns(),
        )
    finally:
        await asyncio.to_thread(writer.discard)


def _is_another(run: str, log: RunLog, settings: StoreSettings) -> bool:
    """Return True if there is a checkpoint of ``run`` that was not written from this log's run."""
    found = (one.checkpoint for one in summaries(f"{root_of(settings)}/{run}", settings))
    return any(one is not None and one.run_created_ns != log.record.created_ns for one in found)


def run_fork(
    choice: RunChoice, at: str, *, name: str | None, without: str | None, origin: str | None
) -> None:
    """Write the checkpoint below the store's folder of the new run, and say how it starts."""
    given, moment = choice.load(), parse(at, "--at")

    async def write() -> str:
        async with choice.reached(given, "fork") as (bus, run):
            log = RunLog.of(bus, await ledger.read_run(bus, run))
            left = "" if without is None else f"-without-{without}"
            new = name or f"{run}-{re.sub('[^A-Za-z0-9_-]', '-', at)}{left}"
            store = store_of(given.local.store, new)
            if new == run or await asyncio.to_thread(_is_another, new, log, given.local.store):
                msg = f"There is a run {new!r} already: give it another id with --as."
                raise ConfigError(msg, path="as")
            bases = await asyncio.to_thread(bases_of, origin, log, given.local.store)
            with progress() as on_progress:
                written = await fork(
                    log, moment, new, store, without=without, bases=bases, on_progress=on_progress
                )
            where = shlex.quote(store.where(written.name))
            return f"skerry up --from {where} --run {new}{permissions(log.config)}"

    print(f"Start it with: {asyncio.run(write())}")
