"""Starting a run in an empty broker from a checkpoint.

State first, the run's record last: services wait for that record, so none of them meets a run that
is half restored, and a restore that was interrupted is simply started again.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from skerry.bus import ledger
from skerry.bus.state import MASTER, PARAMS, NewPart, StateWriter, read_manifests
from skerry.bus.streams import specs
from skerry.errors import ConfigError, RunMismatch, RunNotFound, WrongPlan
from skerry.settings import load, run_config_from_json, to_json
from skerry.settings_tree import split_assignment
from skerry.store.checkpoint import fragments, plan_of, read_manifest, verify
from skerry.store.listing import locate
from skerry.wire.messages import MemberRecord, RunRecord
from skerry.wire.records import encode
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from skerry.bus.base import Bus
    from skerry.core.fragments import Plan
    from skerry.settings import RunConfig
    from skerry.store.base import Store
    from skerry.store.manifest import Checkpoint, SavedFragment
    from skerry.wire.messages import Commit, Manifest

EXTENDABLE = ("train.steps", "train.duration_s")
RESTORER = "restore"


async def restore(
    bus: Bus,
    path: Path,
    run: str,
    *,
    sets: Sequence[str] = (),
    on_bytes: Callable[[int], None] | None = None,
) -> RunRecord:
    """Verify a checkpoint and write it into the log as run ``run``; versions go on from there.

    Args:
        bus: a connected bus.
        path: a checkpoint, or a run's folder for its newest one.
        run: the id of the run to create.
        sets: ``train.steps=…`` or ``train.duration_s=…``: how long the run goes on.
        on_bytes: told how many bytes of the files have been read, as they are.

    Raises:
        CheckpointCorrupt: a file is damaged; nothing has been written.
        RunMismatch: the log already holds this run.
        ConfigError: ``sets`` changes what a checkpoint fixes.
    """
    store, name = await asyncio.to_thread(locate, path)
    checkpoint = await asyncio.to_thread(verify, store, name, on_bytes=on_bytes)
    config = extended(checkpoint, sets)
    await _refuse_existing(bus, run)
    await bus.declare(
        specs(
            run,
            replicas=config.log.replicas,
            window_bytes=config.log.window_bytes,
            window_s=config.log.window_s,
        )
    )
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
        raise _exists(run)
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


async def _refuse_existing(bus: Bus, run: str) -> None:
    try:
        await ledger.read_run(bus, run)
    except RunNotFound:
        return
    raise _exists(run)


def _exists(run: str) -> RunMismatch:
    msg = (
        f"Run {run!r} already has state in this log: restore under another --run, "
        "or into a broker with an empty store."
    )
    return RunMismatch(msg)


async def _write_state(bus: Bus, store: Store, name: str, run: str, config: RunConfig) -> None:
    plan = plan_of(read_manifest(store, name), store.where(name))
    found = await _found(bus, run, plan)
    writer = await StateWriter.acquire(
        bus,
        run,
        plan,
        holder=RESTORER,
        now_ns=time.time_ns(),
        chunk_bytes=config.sync.chunk_bytes,
    )
    saved = fragments(store, name)
    while (item := await asyncio.to_thread(next, saved, None)) is not None:
        fragment, vectors = item
        held = found.get(fragment.commit.fragment)
        if held is None:
            draft = _commit(fragment.commit, run, store.where(name))
            await writer.commit(draft, _parts(vectors, config.sync.global_scheme), None)
        elif not _same(held, fragment):
            raise _exists(run)
    await writer.recover()


async def _found(bus: Bus, run: str, plan: Plan) -> dict[int, Manifest]:
    """Return what an interrupted restore has already written."""
    try:
        return await read_manifests(bus, run, plan)
    except WrongPlan as error:
        raise _exists(run) from error


def _same(held: Manifest, saved: SavedFragment) -> bool:
    digests = {part.name: part.digest for part in held.parts}
    return held.commit.version == saved.commit.version and all(
        digests.get(part.name) == part.digest for part in saved.parts
    )


def _commit(saved: Commit, run: str, origin: str) -> Commit:
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


def _parts(vectors: Mapping[str, NDArray[np.float32]], scheme: str) -> list[NewPart]:
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
