"""Putting a run's state back from a checkpoint, in the log that the run has already.

Two accidents end here, by one rule (``skerry_checkpointer.compare``): the broker's store was rolled
back to an older state of the run, or chunks and manifests are gone while the ledger stands. The
run keeps its id, its config, its members and their cursors, which never move back: the data that a
learner has used stays used, although a part of what it contributed may be lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from skerry.errors import RunMismatch, RunNotFound
from skerry.log import ledger, recovery
from skerry.protocol.messages import CommitOrigin, LearnerProgress
from skerry.settings.loading import run_config_from_json
from skerry.store.opening import FROM_ENVIRONMENT
from skerry_checkpointer.compare import read_held, to_replace
from skerry_checkpointer.restore import (
    extended,
    fresh_commit,
    open_source,
    publish_member,
    restore_from,
    write_fragments,
)
from skerry_checkpointer.takeover import refuse_if_alive, refusing_others, take_fences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit, RunRecord
    from skerry.settings.models import StoreSettings
    from skerry_checkpointer.compare import HeldFragment
    from skerry_checkpointer.restore import Source


class PutBack(NamedTuple):
    """A fragment that was replaced: its versions before and now, and the checkpoint's."""

    fragment: int
    before: int
    version: int
    saved: int


async def put_back(
    bus: Bus,
    where: str | Path,
    run: str,
    *,
    access: StoreSettings = FROM_ENVIRONMENT,
    on_bytes: Callable[[int], None] | None = None,
) -> list[PutBack]:
    """Replace what run ``run`` lost, or has older, by what a checkpoint of it holds.

    Raises RunMismatch where the checkpoint is another run's, where something works on the run, or
    where the log is newer than the checkpoint; CheckpointCorrupt for a damaged file. Nothing has
    been written then. RunMismatch also if a syncer has started meanwhile; the same command goes on.
    """
    source = await open_source(where, access, on_bytes)
    try:
        record = await ledger.read_run(bus, run)
    except RunNotFound:
        await restore_from(bus, source, run, extended(source.checkpoint, ()))
        return []
    _refuse_foreign(record, source)
    config = run_config_from_json(record.config_json)
    await refuse_if_alive(bus, run, config)
    saved = source.checkpoint.state
    to_replace(await read_held(bus, run, source.plan), saved, source.where)  # before any write
    await _keep_members(bus, run, source, is_same_log=_is_same_log(record, source))
    writers = await take_fences(bus, run, source.plan, config)
    held = await read_held(bus, run, source.plan)
    wanted = sorted(to_replace(held, saved, source.where))
    for one in held.values():  # what a syncer that died after a commit point left out
        if one.manifest is not None and one.manifest.commit.version == one.newest:
            await recovery.append_commit(bus, one.manifest.commit)
    drafts = {i: (_next_commit(record, source, i, held[i]), held[i].manifest) for i in wanted}
    with refusing_others(run):
        await write_fragments(source, writers, config.sync.global_scheme, drafts)
    return [
        PutBack(i, held[i].newest, drafts[i][0].version, saved[i].commit.version) for i in wanted
    ]


def _next_commit(record: RunRecord, source: Source, index: int, held: HeldFragment) -> Commit:
    """Return the commit after the newest one that the log knows of."""
    saved, last = source.checkpoint.state[index].commit, held.last
    rows = last.progress if last else ()
    return replace(
        fresh_commit(saved, record.run, CommitOrigin.REPLACED, source.where),
        source_version=saved.version,
        version=held.newest + 1,
        step=max(saved.step, last.step if last else 0),
        contrib_floor=last.contrib_floor if last else 0,
        progress=_furthest(rows, saved.progress, is_same_log=_is_same_log(record, source)),
    )


def _furthest(
    log: Iterable[LearnerProgress], saved: Iterable[LearnerProgress], *, is_same_log: bool
) -> tuple[LearnerProgress, ...]:
    """Return what counts as used: of two rows of a learner the furthest, column by column.

    Contributions are numbered by the log that took them, so numbers from another log mean nothing
    here.
    """
    rows = {row.learner: row for row in log}
    for row in saved:
        theirs = row if is_same_log else replace(row, incarnation=0, identity=0)
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


async def _keep_members(bus: Bus, run: str, source: Source, *, is_same_log: bool) -> None:
    """Make sure that every name keeps its data shard, and that no start is numbered twice.

    In a log that was rolled back, members and their newest starts may be missing; a learner that
    came back under a number that the checkpoint has already would not be listened to.
    """
    members = await ledger.members(bus, run)
    owners = {member.shard: member.learner for member in members.values()}
    rows = [row for saved in source.checkpoint.state for row in saved.commit.progress]
    for learner in source.checkpoint.learners:
        numbers = [row.incarnation for row in rows if row.learner == learner.learner]
        newest = max(numbers, default=0) if is_same_log else 0
        known = members.get(learner.learner)
        if known is not None and known.incarnation >= newest:
            continue
        if known is None and learner.shard in owners:
            msg = (
                f"Data shard {learner.shard} belongs to {owners[learner.shard]!r} in the log and "
                f"to {learner.learner!r} in the checkpoint: restore under another --run."
            )
            raise RunMismatch(msg)
        shard = known.shard if known else learner.shard
        await publish_member(bus, run, source, learner.learner, newest, shard)


def _is_same_log(record: RunRecord, source: Source) -> bool:
    checkpoint = source.checkpoint
    return (record.run, record.created_ns) == (checkpoint.run, checkpoint.run_created_ns)


def _refuse_foreign(record: RunRecord, source: Source) -> None:
    """Accept the run's own checkpoints, and the one that it began from."""
    fits = record.plan_digest == source.checkpoint.plan_digest
    is_own = _is_same_log(record, source) or record.restored_from == source.where
    if not (fits and is_own):
        msg = (
            f"{source.where} is not a checkpoint of run {record.run!r} in this log, nor the one"
            " that it began from: restore under another --run."
        )
        raise RunMismatch(msg)
