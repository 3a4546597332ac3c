"""Starting a run in an empty broker from a checkpoint.

State first, the run's record last: services wait for that record, so none of them meets a run that
is half restored, and a restore that was interrupted is simply started again.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from skerry.errors import ConfigError, Fenced, RunMismatch, RunNotFound, WrongPlan
from skerry.log import ledger
from skerry.log.state import MASTER, PARAMS, read_manifests
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import MemberRecord, RunRecord
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.loading import load, run_config_from_json, to_json
from skerry.settings.tree import split_assignment
from skerry.store.base import FROM_ENVIRONMENT
from skerry.store.checkpoint import fragments, plan_of, read_manifest, verify
from skerry.store.listing import locate
from skerry_checkpointer.alive import living
from skerry_checkpointer.survey import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit, Manifest
    from skerry.settings.models import RunConfig
    from skerry.store.base import Store, StoreAccess
    from skerry.store.manifest import Checkpoint, SavedFragment

EXTENDABLE = ("train.steps", "train.duration_s")
RESTORER = "restore"


async def restore(
    bus: Bus,
    where: str | Path,
    run: str,
    *,
    sets: Sequence[str] = (),
    access: StoreAccess = FROM_ENVIRONMENT,
    on_bytes: Callable[[int], None] | None = None,
) -> RunRecord:
    """Verify a checkpoint and write it into the log as run ``run``; versions go on from there.

    Args:
        bus: a connected bus.
        where: a checkpoint, or a run's folder for its newest one.
        run: the id of the run to create.
        sets: ``train.steps=…`` or ``train.duration_s=…``: how long the run goes on.
        access: how buckets are reached.
        on_bytes: told how many bytes of the files have been read, as they are.

    Raises:
        CheckpointCorrupt: a file is damaged; nothing has been written.
        RunMismatch: the log already holds this run, or somebody works on it; who does is named.
        ConfigError: ``sets`` changes what a checkpoint fixes.
    """
    store, name = await asyncio.to_thread(locate, where, access)
    checkpoint = await asyncio.to_thread(verify, store, name, on_bytes=on_bytes)
    config = extended(checkpoint, sets)
    await _refuse_existing(bus, run, checkpoint, config)
    await bus.declare(
        specs(
            run,
            replicas=config.log.replicas,
            window_bytes=config.log.window_bytes,
            window_s=config.log.window_s,
        )
    )
    with alone(run):
        await _write_state(bus, store, name, run, config)
    await _write_members(bus, checkpoint, run)
    record = RunRecord(
        run=run,
        config_json=to_json(config),
        leaves=checkpoint.leaves,
        fragments=checkpoint.fragments,
        plan_digest=checkpoint.plan_digest,
        created_ns=time.time_ns(),
        skerry_version=version("skerry"),
        restored_from=store.where(name),
    )
    created = await ledger.create_run(bus, record)
    if created != record:
        raise _exists(run, (), checkpoint.versions)
    return record


def extended(checkpoint: Checkpoint, sets: Sequence[str]) -> RunConfig:
    """Return the checkpoint's config with its length changed by ``sets``."""
    for assignment in sets:
        path = ".".join(split_assignment(assignment)[0])
        if path not in EXTENDABLE:
            msg = (
                f"--set {path} cannot change in a restored run, its checkpoint fixes it: "
                f"only {' and '.join(EXTENDABLE)} can."
            )
            raise ConfigError(msg, path=path)
    values = json.loads(json.dumps(checkpoint.config))
    chosen = load(None, sets, {}).run.train
    for assignment in sets:
        _, key = split_assignment(assignment)[0]
        values["train"][key] = getattr(chosen, key)
    return run_config_from_json(json.dumps(values))


async def _refuse_existing(bus: Bus, run: str, checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise RunMismatch if there is such a run, naming who works on it and what it holds.

    Whoever works on a run whose log is gone goes on for a while, and says so at once in a broker
    that is empty: from a newer state than the checkpoint's, a history that this log will not have.
    """
    record = await _existing(bus, run)
    known = run_config_from_json(record.config_json) if record else config
    if names := await living(bus, run, known):
        raise at_work(run, names)
    if record is None:
        return
    commits = await ledger.last_commits(bus, run)
    versions = [commits[f].version if f in commits else 0 for f in range(record.fragments)]
    raise _exists(run, versions, checkpoint.versions)


async def _existing(bus: Bus, run: str) -> RunRecord | None:
    try:
        return await ledger.read_run(bus, run)
    except RunNotFound:
        return None


def _exists(run: str, held: Sequence[int], saved: Sequence[int]) -> RunMismatch:
    there = f" (version {spread(held)}, the checkpoint {spread(saved)})" if held else ""
    msg = (
        f"Run {run!r} already has state in this log{there}: restore under another --run, or into a "
        "broker with an empty store; --replace puts back what this log lost or has older."
    )
    return RunMismatch(msg)


def at_work(run: str, names: Sequence[str]) -> RunMismatch:
    """Return the refusal to touch a run that somebody works on."""
    msg = (
        f"Run {run!r} is alive: {', '.join(names)} just said so. Stop all of it first, or restore "
        "under another --run."
    )
    return RunMismatch(msg)


@contextmanager
def alone(run: str) -> Generator[None]:
    """Say who a write was refused for: somebody who has taken the fences meanwhile."""
    try:
        yield
    except Fenced as error:
        msg = (
            f"A syncer of run {run!r}, or another restore of it, has started meanwhile and has the"
            " state of the run now: stop it and give the same command again, which goes on where"
            " this one was."
        )
        raise RunMismatch(msg) from error


async def all_fences(bus: Bus, run: str, plan: Plan, config: RunConfig) -> list[StateWriter]:
    """Take the fence of every shard: a syncer that was only asleep is refused from here on."""
    return [
        await StateWriter.acquire(
            bus,
            run,
            plan,
            holder=RESTORER,
            now_ns=time.time_ns(),
            shard=shard,
            shards=config.sync.shards,
            chunk_bytes=config.sync.chunk_bytes,
        )
        for shard in range(config.sync.shards)
    ]


async def _write_state(bus: Bus, store: Store, name: str, run: str, config: RunConfig) -> None:
    checkpoint = await asyncio.to_thread(read_manifest, store, name)
    plan = plan_of(checkpoint, store.where(name))
    await _refuse_others(bus, run, plan, checkpoint)  # before anybody is fenced off
    writers = await all_fences(bus, run, plan, config)
    found = await _found(run, checkpoint, writers)
    saved = fragments(store, name)
    while (item := await asyncio.to_thread(next, saved, None)) is not None:
        fragment, vectors = item
        index = fragment.commit.fragment
        if index in found:
            continue
        draft = fresh_commit(fragment.commit, run, store.where(name))
        parts = parts_of(vectors, config.sync.global_scheme)
        await writers[index % len(writers)].commit(draft, parts, None)


async def _refuse_others(bus: Bus, run: str, plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise RunMismatch where the log has state that is not the checkpoint's."""
    try:
        manifests = await read_manifests(bus, run, plan)
    except WrongPlan as error:
        raise _exists(run, (), ()) from error
    _refuse_unlike(run, manifests, checkpoint)


async def _found(
    run: str, checkpoint: Checkpoint, writers: Sequence[StateWriter]
) -> Mapping[int, Manifest]:
    """Return what a restore that was interrupted, or that we overtook, has already written.

    Read behind our own fences: whoever wrote before them can write no more, and what it wrote is
    not written over. Its ledger is mended, too.
    """
    found: dict[int, Manifest] = {}
    for writer in writers:
        found |= await writer.recover()
    _refuse_unlike(run, found, checkpoint)
    return found


def _refuse_unlike(run: str, held: Mapping[int, Manifest], checkpoint: Checkpoint) -> None:
    saved = {one.commit.fragment: one for one in checkpoint.state}
    if any(not _same(manifest, saved[index]) for index, manifest in held.items()):
        raise _exists(run, (), ())


def _same(held: Manifest, saved: SavedFragment) -> bool:
    digests = {part.name: part.digest for part in held.parts}
    return held.commit.version == saved.commit.version and all(
        digests.get(part.name) == part.digest for part in saved.parts
    )


def fresh_commit(saved: Commit, run: str, origin: str) -> Commit:
    """Return the commit that begins a fragment in the new log.

    Learners count incarnations and contributions anew there, so the progress table keeps what the
    data has been used for and forgets those numbers.
    """
    now_ns = time.time_ns()
    return replace(
        saved,
        run=run,
        reason=f"restored from {origin}",
        opened_ns=now_ns,
        closed_ns=now_ns,
        quorum_s=0.0,
        grace_s=0.0,
        consumed=(),
        refused=(),
        contrib_floor=0,
        progress=tuple(replace(row, incarnation=0, identity=0) for row in saved.progress),
        final=False,
        trace_id="",
    )


def parts_of(vectors: Mapping[str, NDArray[np.float32]], scheme: str) -> list[NewPart]:
    """Return what to store: learners read ``params``, which is the master in the global scheme."""
    params = NewPart(PARAMS, scheme, vectors[MASTER])
    return [params, *(NewPart(name, "f32", vector) for name, vector in vectors.items())]


async def _write_members(bus: Bus, checkpoint: Checkpoint, run: str) -> None:
    """Keep each name's data shard: its cursor, which the progress table holds, counts on that."""
    subjects = Subjects(run)
    for learner in checkpoint.learners:
        member = MemberRecord(
            run=run,
            learner=learner.learner,
            incarnation=0,
            host="",
            joined_ns=checkpoint.created_ns,
            shard=learner.shard,
        )
        await bus.publish(
            subjects.member(learner.learner), encode(member), msg_id=f"member/{learner.learner}/0"
        )
