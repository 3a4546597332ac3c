"""What many commits leave in a real server's store: it is bounded, whatever a run goes through."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skerry.algorithm.fragments import BLOCK, LeafSpec, plan
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.state import read_manifests
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, LearnerProgress, Manifest
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from tests.support.builders import commit, consumed, run_record
from tests.support.learners import walk

if TYPE_CHECKING:
    from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

COMMITS = 2000
LEARNERS = 8
LEDGER_BYTES = 1024
"""A commit's share of the ledger's files, with all its learners in it."""
STEPS = 24
CUT = plan([LeafSpec(f"w{i}", (3, BLOCK)) for i in range(16)], 16)
DRAFT = commit(
    plan_digest=CUT.digest,
    opened_ns=1_790_000_000_000_000_000,
    closed_ns=1_790_000_000_312_345_678,
    quorum_s=0.2123456,
    grace_s=0.1123456,
    contrib_floor=2**18,
)
CONSUMED = consumed(
    sequence_first=2**18,
    sequence_last=2**18,
    steps=STEPS,
    tokens=STEPS * 1024,
    cursor_from=2**18,
    cursor_to=2**18,
    weight=1 / LEARNERS,
    loss=2.345678,
)


@dataclass(frozen=True, slots=True)
class Written:
    """A log after its last commit, still open."""

    bus: NatsBus
    run: str
    manifests: Mapping[int, Manifest]


def commit_of(run: str, fragment: int, version: int) -> Commit:
    """Return a commit to which every learner has contributed."""
    names, step = [f"site-{i}" for i in range(LEARNERS)], version * STEPS
    took = replace(CONSUMED, identity=version, base_version=version - 1, step=step)
    rows = (LearnerProgress(name, 1, version, step * 1024, step * 8) for name in names)
    return replace(
        DRAFT,
        run=run,
        fragment=fragment,
        version=version,
        step=step,
        consumed=tuple(replace(took, learner=name) for name in names),
        progress=tuple(rows),
    )


async def written(bus: NatsBus, run: str, commits: int) -> Written:
    """Commit fragment after fragment; those of different fragments at the same time."""
    await bus.declare(specs(run, window_bytes=16 * 1024**2))
    await ledger.create_run(bus, run_record(run, CUT, RunConfig().model_dump_json()))
    writer = await StateWriter.acquire(bus, run, CUT, holder="script", now_ns=1)
    turns = commits // len(CUT.fragments)

    async def fill(fragment: int) -> Manifest:
        vector, held = walk(CUT.fragments[fragment], "master"), None
        parts = [NewPart.of("keyframe", "bf16", vector), NewPart.of("master", "f32", vector)]
        for version in range(1, turns + 1):
            held = await writer.commit(commit_of(run, fragment, version), parts, held)
        assert held is not None
        return held

    manifests = await asyncio.gather(*(fill(f.index) for f in CUT.fragments))
    return Written(bus, run, dict(zip(count(), manifests, strict=False)))


def on_disk(store: Path, stream: str) -> int:
    """Return the bytes that a stream's files take; they come and go while one looks."""
    (folder,) = (path for path in store.rglob(stream) if path.is_dir())
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


@pytest.mark.drill
async def test_many_commits_leave_what_lives_and_a_kilobyte_of_history_each(
    nats_server: NatsServer, run_id: str
) -> None:
    names = Subjects(run_id)
    async with NatsBus(nats_server.url, options=NatsOptions(publish_window=32)) as bus:
        log = await written(bus, run_id, COMMITS)
        assert await read_manifests(bus, run_id, CUT) == log.manifests

        (state,) = [s for s in await bus.streams() if s.name == names.shard(0).stream("STATE")]
        chunks = sum(len(part.chunks) for m in log.manifests.values() for part in m.parts)
        both_slots, fence = 2 * chunks, 1
        assert state.messages == both_slots + len(log.manifests) + fence

    ledger_bytes = on_disk(nats_server.store, names.stream("LEDGER"))
    assert COMMITS * 200 < ledger_bytes < COMMITS * LEDGER_BYTES


async def test_history_is_compressed_a_block_at_a_time(
    nats_server: NatsServer, run_id: str
) -> None:
    names, size, messages = Subjects(run_id), 256 * 1024, 48
    async with NatsBus(nats_server.url) as bus, asyncio.timeout(60):
        await bus.declare(specs(run_id, window_bytes=16 * 1024**2))
        for number in range(messages):
            await bus.publish(names.commit(0), bytes(size), msg_id=f"{number}")
        stream = names.stream("LEDGER")
        while on_disk(nats_server.store, stream) > size * messages * 3 / 4:
            await bus.get(stream, 1)  # the server compresses beside its other work
        first = await bus.get(stream, 1)
    assert first is not None
    assert first.payload == bytes(size)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_hundred_thousand_commits_take_a_third_of_that(
    nats_server: NatsServer, run_id: str
) -> None:
    """Blocks of the ledger that are full are compressed; the short test never fills one."""
    commits = 100_000
    async with NatsBus(nats_server.url, options=NatsOptions(publish_window=32)) as bus:
        await written(bus, run_id, commits)
    ledger_bytes = on_disk(nats_server.store, Subjects(run_id).stream("LEDGER"))
    assert ledger_bytes < commits * LEDGER_BYTES / 2
