"""Messages with sensible values, of which a test names only what it is about; and waiting for one.

Each function returns a message of run ``run`` and learner ``a``; any field can be given by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from skerry.algorithm.fragments import LeafSpec, Plan
from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import (
    CheckpointRecord,
    ChunkRef,
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    ContributionHeader,
    ContributionKind,
    Evaluation,
    LearnerPhase,
    LearnerProgress,
    Manifest,
    MemberRecord,
    Part,
    Pulse,
    RefusalCause,
    Refused,
    Round,
    RunRecord,
    RunState,
    SyncerPulse,
)
from skerry.status.report import LearnerRow
from skerry.status.sources import RunMessage, Seen

T = TypeVar("T")

RUN = "run"


def ns(seconds: float) -> int:
    """Return a time or duration in nanoseconds."""
    return round(seconds * 1e9)


def as_seen(
    message: RunMessage, at_s: float, sequence: int = 0, stored_s: float | None = None
) -> Seen[RunMessage]:
    """Return a message as a viewer has it, by default as old by the broker's clock as by ours."""
    return Seen(message, sequence, ns(at_s if stored_s is None else stored_s), at_s)


def run_record(
    run: str = RUN, plan: Plan | None = None, config_json: str = "{}", **changes: Any
) -> RunRecord:
    """Return the record of a run whose parameters are those of ``plan``; created just now."""
    record = RunRecord(
        run=run,
        config_json=config_json,
        leaves=plan.specs if plan else (LeafSpec("w", (1,)),),
        fragments=len(plan.fragments) if plan else 1,
        shards=plan.shards if plan else 1,
        plan_digest=plan.digest if plan else 1,
        created_ns=time.time_ns(),
        skerry_version="test",
        state=RunState.OPEN,
    )
    return replace(record, **changes)


def member(learner: str = "a", incarnation: int = 1, **changes: Any) -> MemberRecord:
    record = MemberRecord(
        run=RUN, learner=learner, incarnation=incarnation, host="host", joined_ns=1, shard=0
    )
    return replace(record, **changes)


def round_(version: int = 2, fragment: int = 0, **changes: Any) -> Round:
    record = Round(
        run=RUN,
        plan_digest=1,
        fragment=fragment,
        version=version,
        due_step=8,
        opened_ns=1,
        syncer="s",
    )
    return replace(record, **changes)


def pulse(learner: str = "a", step: int = 8, **changes: Any) -> Pulse:
    """Return the pulse of a learner that trains; it has taken ``step`` steps of 10 tokens."""
    steps = changes.get("steps", step)
    record = Pulse(
        run=RUN,
        learner=learner,
        incarnation=1,
        phase=LearnerPhase.TRAINING,
        sent_ns=1,
        step=step,
        steps=steps,
        tokens=10 * steps,
        cursor=steps,
        loss=2.0,
        step_time_s=0.1,
        busy_s=0.1 * steps,
        alive_s=0.1 * steps,
        bytes_up=0,
        bytes_down=0,
        contributions=0,
        versions=(),
    )
    return replace(record, **changes)


def syncer_pulse(syncer: str = "s", **changes: Any) -> SyncerPulse:
    return replace(SyncerPulse(RUN, syncer, "i", sent_ns=1, host="host"), **changes)


def header(identity: int = 1, learner: str = "a", **changes: Any) -> ContributionHeader:
    """Return the header of a contribution of 5 steps to fragment 0, towards the next version."""
    base = changes.get("base_version", 1)
    record = ContributionHeader(
        kind=ContributionKind.OUTER_GRADIENT,
        learner=learner,
        incarnation=1,
        identity=identity,
        fragment=0,
        base_version=base,
        round_version=base + 1,
        step=10,
        steps=5,
        tokens=1000,
        cursor_from=0,
        cursor_to=10,
        loss=2.0,
        captured_ns=1,
    )
    return replace(record, **changes)


def consumed(learner: str = "a", identity: int = 1, **changes: Any) -> Consumed:
    record = Consumed(
        learner=learner,
        incarnation=1,
        identity=identity,
        sequence_first=1,
        sequence_last=1,
        base_version=1,
        staleness=0,
        step=10,
        steps=5,
        tokens=1000,
        cursor_from=0,
        cursor_to=8,
        weight=1.0,
        loss=2.0,
    )
    return replace(record, **changes)


def refused(
    cause: RefusalCause = RefusalCause.TOO_STALE, learner: str = "a", **changes: Any
) -> Refused:
    return replace(Refused(cause, learner), **changes)


def progress(learner: str = "a", identity: int = 1, **changes: Any) -> LearnerProgress:
    row = LearnerProgress(learner, incarnation=1, identity=identity, tokens=1000, cursor=8)
    return replace(row, **changes)


def commit(version: int = 2, fragment: int = 0, **changes: Any) -> Commit:
    """Return a commit of a round in which all arrived; of genesis where the version is 1."""
    origin = CommitOrigin.GENESIS if version == 1 else CommitOrigin.ROUND
    origin = changes.get("origin", CommitOrigin.ROUND if changes.get("reason") else origin)
    record = Commit(
        run=RUN,
        plan_digest=1,
        fragment=fragment,
        version=version,
        step=8 * (version - 1),
        origin=origin,
        syncer="s",
        fence=1,
        opened_ns=1,
        closed_ns=2,
        quorum_s=0.5,
        grace_s=0.25,
        consumed=(),
        refused=(),
        contrib_floor=0,
        progress=(),
        params_digest=0,
        master_digest=0,
        reason=CloseReason.ALL_ARRIVED if origin is CommitOrigin.ROUND else None,
    )
    return replace(record, **changes)


def part(name: str = "keyframe", *chunks: ChunkRef, **changes: Any) -> Part:
    record = Part(name, scheme="bf16", digest=0, chunks=chunks, blocks=1, version=1, slot=0)
    return replace(record, **changes)


def manifest(version: int = 2, fragment: int = 0, *parts: Part, **changes: Any) -> Manifest:
    """Return the manifest of a commit; ``changes`` are those of the commit."""
    return Manifest(commit(version, fragment, **changes), parts)


def evaluation(step: int = 8, **changes: Any) -> Evaluation:
    record = Evaluation(
        run=RUN,
        evaluator="e",
        step=step,
        tokens=100,
        versions=(2,),
        loss=2.0,
        perplexity=7.4,
        bits_per_byte=2.9,
        evaluated_tokens=64,
        text_digest=7,
        evaluated_ns=1,
    )
    return replace(record, **changes)


def checkpoint_record(path: str = "/saved", **changes: Any) -> CheckpointRecord:
    record = CheckpointRecord(
        run=RUN,
        path=path,
        digest="d",
        versions=(2,),
        step=8,
        tokens=100,
        written_ns=1,
        size_bytes=512,
    )
    return replace(record, **changes)


async def until(holds: Callable[[], T], within_s: float = 60.0) -> T:
    """Let other tasks, threads and processes run until ``holds`` returns something true; return it.

    The test fails with TimeoutError after ``within_s``.
    """
    async with asyncio.timeout(within_s):
        while not (found := holds()):  # noqa: ASYNC110 - threads and processes send us no event
            await asyncio.sleep(0.005)
    return found


@asynccontextmanager
async def background(
    *coroutines: Coroutine[Any, Any, Any],
) -> AsyncGenerator[list[asyncio.Task[Any]]]:
    """Run these while the context lasts, and yield their tasks."""
    tasks = [asyncio.create_task(c) for c in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def learner_row(name: str = "a", **changes: Any) -> LearnerRow:
    """Return the row of a learner that trains well."""
    row = LearnerRow(
        name=name,
        incarnation=1,
        liveness=Liveness.ALIVE,
        reason=LivenessReason.PULSING,
        phase=LearnerPhase.TRAINING,
        step=5,
        tokens=100,
        loss=2.0,
        step_time_s=0.1,
        tokens_per_s=50.0,
        goodput=0.9,
        bytes_up=1,
        bytes_down=1,
        f32_bytes_up=1,
        f32_bytes_down=1,
        time={"train": 0.9},
        contributions=3,
        staleness=0,
        syncs_skipped=0,
        seen_s_ago=0.2,
        heard=True,
    )
    return replace(row, **changes)


def wait_until(holds: Callable[[], T], what: str = "it", within_s: float = 60.0) -> T:
    """Wait as ``until`` does, for a test without an event loop."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} took more than {within_s:g} s"
        time.sleep(0.01)
    return found
