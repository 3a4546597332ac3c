"""Putting a run's state back from a checkpoint, in the log that the run has already.

Two accidents end here, by one rule (``skerry_checkpointer.survey``): the broker's store was rolled
back to an older state of the run, or chunks and manifests are gone while the ledger stands. The
run keeps its id, its config, its members and their cursors, which never move back: what a learner's
data was used for stays used, although a part of what it did may be lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace as changed
from typing import TYPE_CHECKING, NamedTuple

from skerry.errors import RunMismatch, RunNotFound
from skerry.log import ledger, recovery
from skerry.protocol.messages import LearnerProgress, MemberRecord
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.loading import run_config_from_json
from skerry.store.base import FROM_ENVIRONMENT
from skerry.store.checkpoint import fragments, plan_of, read_manifest, verify
from skerry.store.listing import locate
from skerry_checkpointer.alive import living
from skerry_checkpointer.restore import all_fences, alone, at_work, fresh_commit, parts_of, restore
from skerry_checkpointer.survey import spread, survey, to_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.log.state_writer import StateWriter
    from skerry.protocol.messages import Commit, RunRecord
    from skerry.settings.models import RunConfig
    from skerry.store.base import Store, StoreAccess
    from skerry.store.manifest import Checkpoint
    from skerry_checkpointer.survey import Held


class Change(NamedTuple):
    """A fragment that was written anew: its version now, and the checkpoint's that it holds."""

    fragment: int
    before: int
    version: int
    saved: int


async def put_back(
    bus: Bus,
    where: str | Path,
    run: str,
    *,
    access: StoreAccess = FROM_ENVIRONMENT,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Change]:
    """Replace what run ``run`` lacks, or has older, by what a checkpoint of it holds.

    Raises RunMismatch where the checkpoint is another run's, where somebody works on the run, or
    where the log is newer than the checkpoint; CheckpointCorrupt for a damaged file. Nothing has
    been written then. RunMismatch also if a syncer has started meanwhile; the same command goes on.
    """
    store, name = await asyncio.to_thread(locate, where, access)
    checkpoint = await asyncio.to_thread(verify, store, name, on_bytes=on_bytes)
    plan = plan_of(checkpoint, store.where(name))
    try:
        record = await ledger.read_run(bus, run)
    except RunNotFound:
        await restore(bus, store.where(name), run, access=access)
        return []
    _refuse_foreign(record, checkpoint, store.where(name))
    config = run_config_from_json(record.config_json)
    if names := await living(bus, run, config):
        raise at_work(run, names)
    await _decided(bus, run, plan, store, name)
    await _keep_members(bus, run, checkpoint, same=_same_log(record, checkpoint))
    writers = await all_fences(bus, run, plan, config)
    held, wanted = await _decided(bus, run, plan, store, name)
    await _mend(bus, held.values())
    same = _same_log(record, checkpoint)
    with alone(run):
        return await _write(_Work(writers, store, name, config, same=same), held, wanted)


class _Work(NamedTuple):
    """What writing needs: a writer for each shard, and where the fragments come from."""

    writers: Sequence[StateWriter]
    store: Store
    name: str
    config: RunConfig
    same: bool


async def _decided(
    bus: Bus, run: str, plan: Plan, store: Store, name: str
) -> tuple[dict[int, Held], frozenset[int]]:
    """Look at the log and apply the rule; nothing is written."""
    held = await survey(bus, run, plan)
    checkpoint = await asyncio.to_thread(read_manifest, store, name)
    return held, to_replace(held, checkpoint.state, store.where(name))


async def _write(work: _Work, held: dict[int, Held], wanted: frozenset[int]) -> list[Change]:
    origin = work.store.where(work.name)
    changes: list[Change] = []
    saved = fragments(work.store, work.name)
    while (item := await asyncio.to_thread(next, saved, None)) is not None:
        fragment, vectors = item
        index = fragment.commit.fragment
        if index not in wanted:
            continue
        writer, before = work.writers[index % len(work.writers)], held[index]
        draft = _commit(fragment.commit, before, writer.run, origin, same=work.same)
        parts = parts_of(vectors, work.config.sync.global_scheme)
        await writer.commit(draft, parts, before.manifest)
        changes.append(Change(index, before.newest, draft.version, fragment.commit.version))
    return changes


async def _mend(bus: Bus, held: Iterable[Held]) -> None:
    """Append to the ledger what a syncer that died after a commit point left out."""
    for one in held:
        if one.manifest is not None and one.manifest.commit.version == one.newest:
            await recovery.append_commit(bus, one.manifest.commit)


def _commit(saved: Commit, held: Held, run: str, origin: str, *, same: bool) -> Commit:
    """Return the commit behind the newest one that the log knows of."""
    last = held.last
    begun = fresh_commit(saved, run, f"{origin} at version {saved.version}")
    return changed(
        begun,
        version=held.newest + 1,
        step=max(saved.step, last.step if last else 0),
        contrib_floor=last.contrib_floor if last else 0,
        progress=_progress(last.progress if last else (), saved.progress, same=same),
    )


def _progress(
    log: Iterable[LearnerProgress], saved: Iterable[LearnerProgress], *, same: bool
) -> tuple[LearnerProgress, ...]:
    """Return what counts as used: of two rows of a learner the one that is further, column-wise.

    Contributions are numbered by the log that took them, so numbers from another log (``same`` is
    False) mean nothing here.
    """
    rows = {row.learner: row for row in log}
    for row in saved:
        theirs = row if same else changed(row, incarnation=0, identity=0)
        mine = rows.get(row.learner, theirs)
        incarnation, identity = max(
            (mine.incarnation, mine.identity), (theirs.incarnation, theirs.identity)
        )
        rows[row.learner] = LearnerProgress(
            row.learner,
            incarnation,
            identity,
            max(mine.tokens, theirs.tokens),
            max(mine.cursor, theirs.cursor),
        )
    return tuple(rows[learner] for learner in sorted(rows))


async def _keep_members(bus: Bus, run: str, checkpoint: Checkpoint, *, same: bool) -> None:
    """Make sure that every name keeps its data shard, and that no start is numbered twice.

    In a log that was rolled back, members and their newest starts may be missing; a learner that
    came back under a number that the checkpoint knows already would not be listened to.
    """
    members = await ledger.members(bus, run)
    owners = {member.shard: member.learner for member in members.values()}
    rows = [row for saved in checkpoint.state for row in saved.commit.progress if same]
    for learner in checkpoint.learners:
        numbers = [row.incarnation for row in rows if row.learner == learner.learner]
        known, newest = members.get(learner.learner), max(numbers, default=0)
        if known is not None and known.incarnation >= newest:
            continue
        if known is None and learner.shard in owners:
            msg = (
                f"Data shard {learner.shard} belongs to {owners[learner.shard]!r} in the log and "
                f"to {learner.learner!r} in the checkpoint: restore under another --run."
            )
            raise RunMismatch(msg)
        member = MemberRecord(
            run=run,
            learner=learner.learner,
            incarnation=newest,
            host="",
            joined_ns=checkpoint.created_ns,
            shard=known.shard if known else learner.shard,
        )
        await bus.publish(
            Subjects(run).member(learner.learner),
            encode(member),
            msg_id=f"member/{learner.learner}/{newest}",
        )


def _same_log(record: RunRecord, checkpoint: Checkpoint) -> bool:
    return (record.run, record.created_ns) == (checkpoint.run, checkpoint.run_created_ns)


def _refuse_foreign(record: RunRecord, checkpoint: Checkpoint, origin: str) -> None:
    """Accept the run's own checkpoints, and the one that it began from."""
    fits = record.plan_digest == checkpoint.plan_digest
    if not fits or not (_same_log(record, checkpoint) or record.restored_from == origin):
        msg = (
            f"{origin} is not a checkpoint of run {record.run!r} in this log, nor the one that it "
            "began from: restore under another --run."
        )
        raise RunMismatch(msg)


def told(changes: Sequence[Change]) -> str:
    """Say what became of the fragments."""
    if not changes:
        return "every fragment is as the checkpoint has it"
    now = spread([change.version for change in changes])
    from_ = spread([change.saved for change in changes])
    return f"{len(changes)} fragments written anew, as version {now}, from version {from_}"
