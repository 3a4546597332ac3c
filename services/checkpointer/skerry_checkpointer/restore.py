"""Starting a new run in the log from a checkpoint.

State first, the run's record last: services wait for that record, so none of them meets a run that
is half restored, and a restore that was interrupted is simply started again.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from skerry.errors import ConfigError, RunMismatch, RunNotFound, WrongPlan
from skerry.log import ledger
from skerry.log.state import MASTER, PARAMS, read_manifests
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    Manifest,
    MemberRecord,
    RunRecord,
    RunState,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.checks import refuse_code
from skerry.settings.loading import load, run_config_from_json, to_json
from skerry.settings.tree import split_assignment
from skerry.store.checkpoint import fragments, plan_of, verify
from skerry.store.listing import locate
from skerry.store.opening import FROM_ENVIRONMENT
from skerry_checkpointer.compare import matches, span
from skerry_checkpointer.takeover import refuse_if_alive, refusing_others, take_fences

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.settings.models import RunConfig, StoreSettings
    from skerry.store.base import Store
    from skerry.store.manifest import Checkpoint

    OnBytes = Callable[[int], None]
    Drafts = Mapping[int, tuple[Commit, Manifest | None]]

EXTENDABLE = ("train.steps", "train.duration_s")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that has been verified, and where it is."""

    store: Store
    name: str
    checkpoint: Checkpoint
    plan: Plan

    @property
    def where(self) -> str:
        return self.store.where(self.name)


async def open_source(
    where: str | Path, access: StoreSettings, on_bytes: OnBytes | None = None
) -> Source:
    """Verify a checkpoint, or the newest in a run's folder; CheckpointCorrupt if it is damaged."""
    store, name = await asyncio.to_thread(locate, where, access)
    checkpoint = await asyncio.to_thread(verify, store, name, on_bytes=on_bytes)
    return Source(store, name, checkpoint, plan_of(checkpoint, store.where(name)))


async def restore(
    bus: Bus,
    where: str | Path,
    run: str,
    *,
    sets: Sequence[str] = (),
    access: StoreSettings = FROM_ENVIRONMENT,
    on_bytes: OnBytes | None = None,
) -> RunRecord:
    """Verify a checkpoint and write it into the log as run ``run``; versions go on from there.

    Args:
        bus: a connected bus.
        where: a checkpoint, or a run's folder for its newest one.
        run: the id of the run to create.
        sets: ``train.steps=…`` or ``train.duration_s=…``: how long the run goes on.
        access: how a remote store is reached.
        on_bytes: is called with the number of bytes that have just been verified.

    Raises:
        CheckpointCorrupt: a file is damaged; nothing has been written.
        RunMismatch: the log already holds this run, or something works on it, which is named.
        ConfigError: ``sets`` changes what a checkpoint fixes.
        CodeRefused: the checkpoint names code that this machine does not allow.
    """
    source = await open_source(where, access, on_bytes)
    return await restore_from(bus, source, run, extended(source.checkpoint, sets))


async def restore_from(bus: Bus, source: Source, run: str, config: RunConfig) -> RunRecord:
    """Write a verified checkpoint into the log as run ``run``."""
    refuse_code(config)
    await _refuse_existing(bus, run, source.checkpoint, config)
    await bus.declare(
        specs(
            run,
            replicas=config.log.replicas,
            window_bytes=config.log.window_bytes,
            window_s=config.log.window_s,
        )
    )
    with refusing_others(run):
        await _write_state(bus, source, run, config)
    for learner in source.checkpoint.learners:
        await publish_member(bus, run, source, learner.learner, 0, learner.shard)
    record = RunRecord(
        run=run,
        config_json=to_json(config),
        leaves=source.checkpoint.leaves,
        fragments=source.checkpoint.fragments,
        plan_digest=source.checkpoint.plan_digest,
        created_ns=time.time_ns(),
        skerry_version=version("skerry"),
        state=RunState.OPEN,
        restored_from=source.where,
    )
    if await ledger.create_run(bus, record) != record:
        raise _exists(run)
    return record


def extended(checkpoint: Checkpoint, sets: Sequence[str]) -> RunConfig:
    """Return the checkpoint's config with its length changed by ``sets``."""
    keys = [tuple(split_assignment(assignment)[0]) for assignment in sets]
    for key in keys:
        if (path := ".".join(key)) not in EXTENDABLE:
            msg = (
                f"--set {path} cannot change in a restored run, its checkpoint fixes it: "
                f"only {' and '.join(EXTENDABLE)} can."
            )
            raise ConfigError(msg, path=path)
    values = json.loads(json.dumps(checkpoint.config))
    chosen = load(None, sets, {}).run.train
    for key in keys:
        values["train"][key[-1]] = getattr(chosen, key[-1])
    return run_config_from_json(json.dumps(values))


async def _refuse_existing(bus: Bus, run: str, checkpoint: Checkpoint, config: RunConfig) -> None:
    """Raise RunMismatch if there is such a run, naming what works on it or what it holds.

    Learners whose run lost its log go on for a while, and send pulses into an empty broker at once:
    they are at a newer state than the checkpoint's, in a history that this log will not have.
    """
    try:
        record = await ledger.read_run(bus, run)
    except RunNotFound:
        await refuse_if_alive(bus, run, config)
        return
    await refuse_if_alive(bus, run, run_config_from_json(record.config_json))
    commits = await ledger.last_commits(bus, run)
    held = [commits[f].version if f in commits else 0 for f in range(record.fragments)]
    raise _exists(run, f" (version {span(held)}, the checkpoint {span(checkpoint.versions)})")


def _exists(run: str, versions: str = "") -> RunMismatch:
    msg = (
        f"Run {run!r} already has state in this log{versions}: restore under another --run, or into"
        " a broker with an empty store; --replace puts back what this log lost or has older."
    )
    return RunMismatch(msg)


async def _write_state(bus: Bus, source: Source, run: str, config: RunConfig) -> None:
    """Write what an earlier, interrupted restore has not written yet."""
    try:
        manifests = await read_manifests(bus, run, source.plan)
    except WrongPlan as error:
        raise _exists(run) from error
    _refuse_unlike(run, manifests, source.checkpoint)  # before anything is fenced off
    writers = await take_fences(bus, run, source.plan, config)
    # Read once more: what wrote before our fences can write no more, and is not written over.
    found: dict[int, Manifest] = {}
    for writer in writers:
        found |= await writer.recover()
    _refuse_unlike(run, found, source.checkpoint)
    drafts: Drafts = {
        saved.commit.fragment: (
            fresh_commit(saved.commit, run, CommitOrigin.RESTORED, source.where),
            None,
        )
        for saved in source.checkpoint.state
        if saved.commit.fragment not in found
    }
    await write_fragments(source, writers, config.sync.global_scheme, drafts)


def _refuse_unlike(run: str, held: Mapping[int, Manifest], checkpoint: Checkpoint) -> None:
    """Raise RunMismatch if the log holds state that is not the checkpoint's."""
    for saved in checkpoint.state:
        manifest = held.get(saved.commit.fragment)
        if manifest is not None and (
            manifest.commit.version != saved.commit.version or not matches(manifest, saved)
        ):
            raise _exists(run)


async def write_fragments(
    source: Source, writers: Sequence[StateWriter], scheme: str, drafts: Drafts
) -> None:
    """Commit the fragments that have a draft, from the checkpoint, each after its predecessor.

    Learners read ``params``, which is the master in the run's global scheme.
    """
    saved = fragments(source.store, source.name)
    while (item := await asyncio.to_thread(next, saved, None)) is not None:
        fragment, vectors = item
        index = fragment.commit.fragment
        if index in drafts:
            commit, previous = drafts[index]
            params = NewPart(PARAMS, scheme, vectors[MASTER])
            parts = [params, *(NewPart(name, "f32", vector) for name, vector in vectors.items())]
            await writers[index % len(writers)].commit(commit, parts, previous)


def fresh_commit(saved: Commit, run: str, origin: CommitOrigin, source: str) -> Commit:
    """Return the commit that begins a fragment in the new log.

    Learners number their starts and contributions from 1 again there, so the progress table keeps
    what the data has been used for and forgets those numbers.
    """
    now_ns = time.time_ns()
    return replace(
        saved,
        run=run,
        origin=origin,
        reason=None,
        source=source,
        source_version=0,
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


async def publish_member(
    bus: Bus, run: str, source: Source, learner: str, incarnation: int, shard: int
) -> None:
    """Record a learner, so that its name keeps the data shard that its cursor counts on."""
    member = MemberRecord(
        run=run,
        learner=learner,
        incarnation=incarnation,
        host="",
        joined_ns=source.checkpoint.created_ns,
        shard=shard,
    )
    msg_id = f"member/{learner}/{incarnation}"
    await bus.publish(Subjects(run).member(learner), encode(member), msg_id=msg_id)
