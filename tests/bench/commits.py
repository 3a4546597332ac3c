"""Many small commits in little time, through the syncer's own writer: the log of a long run.

Every commit is what a round with all learners leaves behind: each of them consumed, a row of
progress for each, a bf16 vector for learners, an f32 master. Nothing is merged, and fragments take
turns as in a real run, several at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    LearnerProgress,
    Manifest,
    RunRecord,
)
from skerry.settings.models import RunConfig, SyncConfig
from skerry.tasks import TaskGroup
from tests.support.builders import run_record

WINDOW_BYTES = 16 * 1024**2
H_STEPS = 24
TOKENS = 1024
"""Tokens of one step."""
BEGAN_NS = 1_790_000_000_000_000_000
ROUND_NS = 1_500_000_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the run is: ``blocks`` of 256 parameters per fragment."""

    commits: int
    fragments: int = 16
    blocks: int = 4
    learners: int = 8

    @property
    def names(self) -> list[str]:
        return [f"learner-{number}" for number in range(self.learners)]

    @property
    def cut(self) -> Plan:
        leaves = [LeafSpec(f"w{i}", (self.blocks, BLOCK)) for i in range(self.fragments)]
        return plan(leaves, self.fragments)


async def begin(bus: Bus, run: str, scale: Scale) -> tuple[RunRecord, StateWriter]:
    """Create the run with its learners, and take its fence."""
    await bus.declare(specs(run, window_bytes=WINDOW_BYTES))
    config = RunConfig(sync=SyncConfig(fragments=scale.fragments, learners=scale.learners))
    record = await ledger.create_run(bus, run_record(run, scale.cut, config.model_dump_json()))
    for name in scale.names:
        await ledger.join(bus, run, name, "host", BEGAN_NS)
    writer = await StateWriter.acquire(bus, run, scale.cut, holder="bench-syncer", now_ns=1)
    return record, writer


async def write(
    writer: StateWriter, scale: Scale, *, lanes: int = 8, done: Callable[[int], None] | None = None
) -> float:
    """Commit each fragment in turn, ``lanes`` at once; returns seconds.

    ``done`` hears how many commits are through, after each.
    """
    vectors = [noise(fragment.padded_size, fragment.index) for fragment in scale.cut.fragments]
    held: dict[int, Manifest] = {}
    numbers = iter(range(scale.commits))
    turns = [asyncio.Lock() for _ in vectors]
    through = 0

    async def lane() -> None:
        nonlocal through
        for number in numbers:
            index = number % scale.fragments
            async with turns[index]:
                draft = commit_of(writer.plan, writer.run, scale, index, number)
                parts = [NewPart.of("keyframe", "bf16", vectors[index])]
                parts.append(NewPart.of("master", "f32", vectors[index]))
                held[index] = await writer.commit(draft, parts, held.get(index))
            through += 1
            if done is not None:
                done(through)

    began = time.monotonic()
    async with TaskGroup() as group:
        for _ in range(min(lanes, scale.fragments)):
            group.create_task(lane())
    return time.monotonic() - began


def noise(size: int, seed: int) -> NDArray[np.float32]:
    """Return f32 (size,) as parameters are distributed: it compresses no better than they do."""
    return np.random.default_rng(seed).normal(0, 0.02, size).astype(np.float32)


def commit_of(cut: Plan, run: str, scale: Scale, index: int, number: int) -> Commit:
    """Return the record of commit ``number`` of the run: every learner answered it."""
    turn = number // scale.fragments
    closed_ns = BEGAN_NS + number * ROUND_NS + 123_456_789
    genesis = turn == 0
    step = turn * H_STEPS
    consumed = [_consumed(learner, rank, scale, number) for rank, learner in enumerate(scale.names)]
    counted = (replace(consumed[0], weight=1.0),) if genesis else tuple(consumed)
    return Commit(
        run=run,
        plan_digest=cut.digest,
        fragment=index,
        version=turn + 1,
        step=step,
        origin=CommitOrigin.GENESIS if genesis else CommitOrigin.ROUND,
        reason=None if genesis else CloseReason.ALL_ARRIVED,
        syncer="",
        fence=0,
        opened_ns=closed_ns - 812_345_678,
        closed_ns=closed_ns,
        quorum_s=0.312345678,
        grace_s=0.087654321,
        consumed=counted,
        refused=(),
        contrib_floor=_sequence(number + 1, 0, scale),
        progress=tuple(
            LearnerProgress(c.learner, 1, c.identity, step * TOKENS, step * 8) for c in counted
        ),
        params_digest=0,
        master_digest=0,
    )


def _consumed(learner: str, rank: int, scale: Scale, number: int) -> Consumed:
    turn = number // scale.fragments
    sequence, step = _sequence(number, rank, scale), turn * H_STEPS
    before = max(0, step - H_STEPS)
    return Consumed(
        learner=learner,
        incarnation=1,
        identity=turn + (rank == 0),  # the first one has contributed genesis too
        sequence_first=sequence,
        sequence_last=sequence,
        base_version=turn,
        staleness=0,
        step=step,
        steps=step - before,
        tokens=(step - before) * TOKENS,
        cursor_from=before * 8,
        cursor_to=step * 8,
        weight=1 / scale.learners,
        loss=2.345678,
    )


def _sequence(number: int, rank: int, scale: Scale) -> int:
    return 1 + number * scale.learners + rank
