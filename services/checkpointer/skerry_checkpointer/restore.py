"""Starting a run from a checkpoint, or putting a run's state back in the log that has it.

A new run gets its state first and its record last: services wait for that record, so none of them
meets a run that is half restored, and a restore that was interrupted is simply started again.

A run whose log was rolled back, or lost a part, keeps its id, its config, its members and their
cursors, which never move back: the data that a learner has used stays used, although a part of what
it contributed may be lost. ``skerry_checkpointer.held`` has the rule.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from skerry.algorithm.fragments import Plan
from skerry.errors import ConfigError, Fenced, RunMismatch, RunNotFound, StoreError, WrongPlan
from skerry.log import ledger, recovery
from skerry.log.base import Bus
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    LearnerProgress,
    MemberRecord,
    RunRecord,
    RunState,
)
from skerry.protocol.parts import KEYFRAME, MASTER, OUTER
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.checks import refuse_code
from skerry.settings.loading import load, run_config_from_json, to_json
from skerry.settings.local import StoreSettings
from skerry.settings.models import ENDS, RunConfig
from skerry.settings.tree import split_assignment
from skerry.store.base import Store
from skerry.store.checkpoint import Checkpoint, fragments, plan_of, verify
from skerry.store.finding import FROM_ENVIRONMENT, locate
from skerry_checkpointer.held import (
    Beginning,
    HeldFragment,
    beginning,
    read_held,
    refuse_if_alive,
    to_replace,
)

HOLDER = "restore"
EXTENDABLE = (*ENDS, "log.replicas")


class Replaced(NamedTuple):
    """A fragment that was written: its versions before and now, and the checkpoint's."""

    fragment: int
    before: int
    version: int
    saved: int


@dataclass(frozen=True, slots=True)
class Restore:
    """A verified checkpoint on its way into a log; ``record`` is None for a run that is new.

    ``beginnings`` say by fragment where it goes on.
    ``is_same_log``: the log is the one in which the checkpoint was written. Learners number their
    starts and contributions by the log that takes them, so those numbers mean nothing in another.
    """

    store: Store
    name: str
    checkpoint: Checkpoint
    plan: Plan
    run: str
    config: RunConfig
    record: RunRecord | None
    beginnings: Mapping[int, Beginning]

    @property
    def where(self) -> str:
        return self.store.where(self.name)

    @property
    def is_same_log(self) -> bool:
        origin = self.checkpoint.run, self.checkpoint.run_created_ns
        return self.record is not None and (self.record.run, self.record.created_ns) == origin


async def restore(
    bus: Bus,
    where: str | Path,
    run: str,
    *,
    sets: Sequence[str] = (),
    put_back: bool = False,
    exact: bool = False,
    access: StoreSettings = FROM_ENVIRONMENT,
) -> list[Replaced]:
    """Verify a checkpoint and write it into the log as run ``run``; versions go on from there.

    Args:
        bus: a connected bus.
        where: a checkpoint, or a run's folder for its newest one.
        run: the id of the run to create, or to put back.
        sets: when a new run ends (settings of ``ENDS``), and on how many brokers it is
            (``log.replicas=…``).
        put_back: if the log holds the run, replace what it lost or has older.
        exact: go back to each fragment's newest snapshot.
        access: how a remote store is reached.

    Raises:
        CheckpointCorrupt: a file is damaged; nothing has been written.
        StoreError: it holds a moving average, or cannot be read.
        RunMismatch: the log already holds this run and it is not to be put back, or this is no
            checkpoint of it, or is older; or something works on the run, which is named. Also if a
            syncer has started meanwhile: the same command goes on.
        ConfigError: ``sets`` changes what a checkpoint fixes.
        CodeRefused: the checkpoint names code that this machine does not allow.
    """
    store, name = await asyncio.to_thread(locate, where, access)
    checkpoint = await asyncio.to_thread(verify, store, name)
    record: RunRecord | None = None
    with suppress(RunNotFound):
        record = await ledger.read_run(bus, run)
    if record is None:
        config = extended(checkpoint, sets)
        refuse_code(config)
    else:
        config = run_config_from_json(record.config_json)
    plan = replace(plan_of(checkpoint, store.where(name)), shards=config.sync.shards)
    beginnings = {
        saved.commit.fragment: beginning(saved, saved.snapshot, exact=exact)
        for saved in checkpoint.state
        if saved.snapshot is not None
    }
    if len(beginnings) < len(plan.fragments):
        msg = (
            f"{store.where(name)} holds a moving average, from which no run goes on: name one of"
            " the run's own checkpoints."
        )
        raise StoreError(msg)
    asked = Restore(store, name, checkpoint, plan, run, config, record, beginnings)
    # Learners whose run lost its log go on for a while, and send pulses into an empty broker at
    # once: at a newer state than the checkpoint's, in a history that this log will not have.
    await refuse_if_alive(bus, run, config)
    if record is not None:
        await _refuse_existing(bus, asked, record, put_back=put_back)
        return await _write_state(bus, asked)
    return await _create(bus, asked)


async def _create(bus: Bus, asked: Restore) -> list[Replaced]:
    """Write the state of a run that the log does not hold, then its record."""
    log, checkpoint, run = asked.config.log, asked.checkpoint, asked.run
    shards = asked.plan.shards
    await bus.declare(specs(run, shards=shards, **log.model_dump()))
    written = await _write_state(bus, asked)
    new = RunRecord(
        run=run,
        config_json=to_json(asked.config),
        leaves=checkpoint.leaves,
        fragments=checkpoint.fragments,
        shards=shards,
        plan_digest=checkpoint.plan_digest,
        created_ns=time.time_ns(),
        skerry_version=version("skerry"),
        state=RunState.OPEN,
        restored_from=asked.where,
    )
    if await ledger.create_run(bus, new) != new:
        raise _exists(run)
    return written


def extended(checkpoint: Checkpoint, sets: Sequence[str]) -> RunConfig:
    """Return the checkpoint's config with its length and its brokers changed by ``sets``."""
    keys = [tuple(split_assignment(assignment)[0]) for assignment in sets]
    for key in keys:
        if (path := ".".join(key)) not in EXTENDABLE:
            msg = (
                f"--set {path} cannot change in a restored run, its checkpoint fixes it: "
                f"only {', '.join(EXTENDABLE)} can."
            )
            raise ConfigError(msg, path=path)
    config = run_config_from_json(json.dumps(checkpoint.config), checkpoint.skerry_version)
    chosen = load(None, sets, {}).run
    for table, name in keys:
        given = getattr(getattr(chosen, table), name)
        changed = getattr(config, table).model_copy(update={name: given})
        config = config.model_copy(update={table: changed})
    return run_config_from_json(to_json(config))


async def _refuse_existing(bus: Bus, asked: Restore, record: RunRecord, *, put_back: bool) -> None:
    """Raise RunMismatch unless the run is to be put back, by a checkpoint of it.

    That is one of its own, or the one that it began from.
    """
    if not put_back:
        commits = await ledger.last_commits(bus, asked.run)
        held = [commits[f].version if f in commits else 0 for f in range(record.fragments)]
        theirs = span(asked.checkpoint.versions)
        raise _exists(asked.run, f" (version {span(held)}, the checkpoint {theirs})")
    is_own = asked.is_same_log or record.restored_from == asked.where
    if record.plan_digest != asked.plan.digest or not is_own:
        msg = (
            f"{asked.where} is not a checkpoint of run {record.run!r} in this log, nor the one"
            " that it began from: restore under another --run."
        )
        raise RunMismatch(msg)


def _exists(run: str, versions: str = "") -> RunMismatch:
    msg = (
        f"Run {run!r} already has state in this log{versions}: restore under another --run, or into"
        " a broker with an empty store; --replace puts back what this log lost or has older."
    )
    return RunMismatch(msg)


async def _write_state(bus: Bus, asked: Restore) -> list[Replaced]:
    """Write the fragments that the log lacks, or that an interrupted restore has not written."""
    await _held(bus, asked)  # refuses before anything is written
    await _keep_members(bus, asked)
    sync = asked.config.sync
    writers = [
        await StateWriter.acquire(
            bus,
            asked.run,
            asked.plan,
            holder=HOLDER,
            now_ns=time.time_ns(),
            shard=shard,
            chunk_bytes=sync.chunk_bytes,
            every=sync.keyframe_every,
        )
        for shard in range(asked.plan.shards)
    ]
    # Read once more: what wrote before our fences can write no more, and is not written over.
    held, wanted = await _held(bus, asked)
    for one in held.values():  # what a writer that died after a commit point left out
        if one.manifest is not None and one.manifest.commit.version == one.newest:
            await recovery.append_commit(bus, one.manifest.commit)
    written: list[Replaced] = []
    saved = fragments(asked.store, asked.name)
    try:
        while (item := await asyncio.to_thread(next, saved, None)) is not None:
            fragment, vectors = item
            index = fragment.commit.fragment
            if index not in wanted:
                continue
            begins, before = asked.beginnings[index], held[index]
            commit, master = _next_commit(asked, begins.commit, before), vectors[begins.master]
            parts = [NewPart.of(KEYFRAME, sync.global_scheme, master)]
            parts += [NewPart.of(MASTER, "f32", master)]
            parts += [NewPart.of(n, "f32", v) for n, v in vectors.items() if n.startswith(OUTER)]
            await writers[asked.plan.shard_of(index)].commit(commit, parts, before.manifest)
            saved_as = begins.commit.version
            written.append(Replaced(index, before.newest, commit.version, saved_as))
    except Fenced as error:
        msg = (
            f"A syncer of run {asked.run!r}, or another restore of it, has started meanwhile and"
            " has the state of the run now: stop it and give the same command again, which goes on"
            " where this one was."
        )
        raise RunMismatch(msg) from error
    return written


async def _held(bus: Bus, asked: Restore) -> tuple[Mapping[int, HeldFragment], frozenset[int]]:
    """Return what the log holds, and the fragments to write; RunMismatch if it must not be."""
    try:
        held = await read_held(bus, asked.run, asked.plan)
    except WrongPlan as error:
        raise _exists(asked.run) from error
    if asked.record is None:
        for fragment, ours in asked.beginnings.items():
            one = held[fragment]
            if one.newest and not (one.newest == ours.commit.version and one.holds(ours)):
                raise _exists(asked.run)
    return held, to_replace(held, asked.beginnings, asked.where)


def _next_commit(asked: Restore, saved: Commit, held: HeldFragment) -> Commit:
    """Return the commit after the newest one that the log knows of, or the first of a new run.

    Of two rows of a learner's progress the furthest counts, column by column.
    """
    is_new, last, now_ns = asked.record is None, held.last, time.time_ns()
    rows = {row.learner: row for row in last.progress} if last else {}
    for row in saved.progress:
        theirs = row if asked.is_same_log else replace(row, incarnation=0, identity=0)
        mine = rows.get(row.learner, theirs)
        rows[row.learner] = LearnerProgress(
            row.learner,
            *max((mine.incarnation, mine.identity), (theirs.incarnation, theirs.identity)),
            max(mine.tokens, theirs.tokens),
            max(mine.cursor, theirs.cursor),
        )
    return replace(
        saved,
        run=asked.run,
        version=saved.version if is_new else held.newest + 1,
        origin=CommitOrigin.RESTORED if is_new else CommitOrigin.REPLACED,
        source=asked.where,
        source_version=0 if is_new else saved.version,
        reason=None,
        step=max(saved.step, last.step if last else 0),
        opened_ns=now_ns,
        closed_ns=now_ns,
        quorum_s=0.0,
        grace_s=0.0,
        consumed=(),
        refused=(),
        contrib_floor=last.contrib_floor if last else 0,
        progress=tuple(rows[learner] for learner in sorted(rows)),
        final=False,
        trace_id="",
        merge_s=0.0,
        unnamed=(),
        master_origin=None,
        outer_version=0,
    )


async def _keep_members(bus: Bus, asked: Restore) -> None:
    """Make sure that every name keeps its data shard, and that no start is numbered twice.

    In a log that was rolled back, members and their newest starts may be missing; a learner that
    came back under a number that the checkpoint has already would not be listened to.
    """
    members = await ledger.members(bus, asked.run)
    owners = {member.shard: member.learner for member in members.values()}
    rows = [row for saved in asked.checkpoint.state for row in saved.commit.progress]
    for learner in asked.checkpoint.learners:
        numbers = [row.incarnation for row in rows if row.learner == learner.learner]
        newest = max(numbers, default=0) if asked.is_same_log else 0
        known = members.get(learner.learner)
        if known is not None and known.incarnation >= newest:
            continue
        if known is None and learner.shard in owners:
            msg = (
                f"Data shard {learner.shard} belongs to {owners[learner.shard]!r} in the log and "
                f"to {learner.learner!r} in the checkpoint: restore under another --run."
            )
            raise RunMismatch(msg)
        member = MemberRecord(
            run=asked.run,
            learner=learner.learner,
            incarnation=newest,
            host="",
            joined_ns=asked.checkpoint.created_ns,
            shard=known.shard if known else learner.shard,
        )
        subject = Subjects(asked.run).member(learner.learner)
        msg_id = f"member/{learner.learner}/{newest}"
        await bus.publish(subject, encode(member), msg_id=msg_id)


def span(versions: Sequence[int]) -> str:
    """Return the versions of all fragments for a sentence: ``7`` or ``5-7``."""
    low, high = min(versions, default=0), max(versions, default=0)
    return str(low) if low == high else f"{low}-{high}"
