"""Readers of global fragments: from deltas where they can, from a keyframe where they must."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from skerry.algorithm import closed_loop
from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, plan
from skerry.algorithm.planes import Planes
from skerry.errors import Corrupt, Overtaken, WireError
from skerry.log import global_fragments
from skerry.log.base import Record
from skerry.log.global_fragments import LEAST_BYTES, GlobalReader, Underway
from skerry.log.memory import DirectLink, MemoryBroker, MemoryBus
from skerry.log.state import RECORD_BYTES, Meters, PushedChunks, follow_deltas
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import AHEAD_BYTES, specs
from skerry.protocol.chunks import VectorHash, vector_digest
from skerry.protocol.messages import Manifest
from skerry.protocol.parts import DELTA, KEYFRAME, MASTER, is_due
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry_tools.lab.link import Pipe
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import commit
from tests.support.learners import walk
from tests.support.scripted_run import LEAVES, ScriptedRun
from tests.support.virtual_time import broker_of, far_of, simulate

Vector = NDArray[np.float32]

RUN, PLAN, EVERY = "t", plan(LEAVES, 2), 4
FRAGMENT = PLAN.fragments[0]


@dataclass
class Committing:
    """A syncer of fragment 0; ``vectors`` are the global fragments that it committed."""

    bus: MemoryBus
    writer: StateWriter
    master: Vector = field(default_factory=lambda: walk(FRAGMENT, 0))
    held: Planes | None = None
    manifests: list[Manifest] = field(default_factory=list[Manifest])
    vectors: list[Vector] = field(default_factory=list["Vector"])

    @classmethod
    async def of(cls, bus: MemoryBus) -> Committing:
        await bus.declare(specs(RUN))
        writer = await StateWriter.acquire(
            bus, RUN, PLAN, holder="s", now_ns=1, chunk_bytes=4096, every=EVERY
        )
        return cls(bus, writer)

    async def commit(self, times: int = 1) -> Manifest:
        for _ in range(times):
            before = self.manifests[-1] if self.manifests else None
            version = len(self.manifests) + 1
            self.master = self.master + walk(FRAGMENT, version)
            new = closed_loop.follow("bf16", "int4", self.held, self.master, VectorHash)
            self.held, digest = new.held, new.digest
            parts = [NewPart(DELTA, *new.delta, digest)] if new.delta else []
            if not parts or is_due(0, version, before, KEYFRAME, EVERY):
                parts.append(NewPart(KEYFRAME, "bf16", new.held, digest))
            parts.append(NewPart.of(MASTER, "f32", self.master))
            drafted = commit(version, run=RUN, plan_digest=PLAN.digest)
            self.manifests.append(await self.writer.commit(drafted, parts, before))
            self.vectors.append(cpu().dequantise("bf16", new.held))
        return self.manifests[-1]


@pytest.fixture
async def syncer(bus: MemoryBus) -> Committing:
    return await Committing.of(bus)


async def bytes_of(reader: GlobalReader, manifest: Manifest, expected: Vector) -> int:
    """Read a version, compare it bit by bit, and return the bytes that it took."""
    sizes: list[int] = []
    vector = await reader.read(manifest, Meters(sizes.append))
    np.testing.assert_array_equal(vector.view(np.uint32), expected.view(np.uint32))
    return sum(sizes)


async def test_a_reader_in_step_reads_deltas_alone(syncer: Committing) -> None:
    reader, sizes = GlobalReader(syncer.bus, RUN, PLAN), list[int]()
    for version in range(9):
        manifest = await syncer.commit()
        sizes.append(await bytes_of(reader, manifest, syncer.vectors[version]))
    assert max(sizes[1:]) < 0.5 * sizes[0]
    assert reader.mismatches == 0


@asynccontextmanager
async def sent_deltas(reader: GlobalReader) -> AsyncGenerator[None]:
    """Hold what the log sends of deltas while the context lasts."""

    async def hold() -> None:
        async with aclosing(follow_deltas(reader.bus, RUN, PLAN)) as deltas:
            async for record in deltas:
                reader.pushed.put(record)

    task = asyncio.create_task(hold())
    await asyncio.sleep(1.0)  # virtual: until it follows
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


class Cut(DirectLink):
    """A link that loses what it is to deliver first."""

    cut = True

    async def deliver(self, records: Sequence[Record], since_s: float) -> AsyncGenerator[Record]:
        lost, self.cut = self.cut, False
        if not lost:
            async for record in super().deliver(records, since_s):
                yield record


def test_deltas_that_were_stored_while_a_reader_was_cut_off_are_not_sent() -> None:
    subject, held = Subjects(RUN).shard(0).chunk(0, DELTA, 0, 0), list[Record]()

    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        await broker.connect().declare(specs(RUN))

        async def hold() -> None:
            async with aclosing(follow_deltas(broker.connect(Cut()), RUN, PLAN)) as deltas:
                async for record in deltas:
                    held.append(record)

        task = asyncio.create_task(hold())
        for payload in (b"missed", b"sent"):
            await asyncio.sleep(1.0)
            await broker.connect().publish(subject, payload)
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait({task})

    simulate(main)
    assert [record.payload for record in held] == [b"sent"]


def test_a_far_reader_in_step_has_a_delta_as_soon_as_its_manifest() -> None:
    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        syncer = await Committing.of(broker.connect())
        reader = GlobalReader(far_of(broker, 0.25), RUN, PLAN)
        await reader.read(await syncer.commit())
        async with sent_deltas(reader):
            for version in range(1, 2 * EVERY):
                manifest = await syncer.commit()
                await asyncio.sleep(0.25)  # the manifest is here
                came_s = loop.time()
                await bytes_of(reader, manifest, syncer.vectors[version])
                assert loop.time() == came_s

    simulate(main)


def test_a_delta_that_was_sent_wrong_is_read_from_the_log() -> None:
    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        syncer = await Committing.of(broker.connect())
        reader = GlobalReader(broker.connect(), RUN, PLAN)
        await reader.read(await syncer.commit())
        manifest = await syncer.commit()
        (chunk,) = next(part for part in manifest.parts if part.name == DELTA).chunks
        right = await reader.bus.get(Subjects(RUN).shard(0).stream("STATE"), chunk.sequence)
        assert right is not None
        reader.pushed.put(replace(right, payload=right.payload[:-1] + b"x"))
        await bytes_of(reader, manifest, syncer.vectors[-1])
        assert reader.mismatches == 0
        assert reader.pushed.take("SKERRY_t_STATE_0", chunk.sequence) is None, "it was looked at"

    simulate(main)


@pytest.mark.parametrize(("bytes_s", "together"), [(1e6, False), (1e9, True)])
def test_as_much_is_asked_for_at_once_as_the_link_brings_in_two_seconds(
    bytes_s: float, *, together: bool
) -> None:
    done_s = list[float]()

    async def main(loop: VirtualLoop) -> None:
        underway, pipe = Underway(), Pipe(0.5, bytes_s)

        async def read() -> None:
            async with underway.room(LEAST_BYTES):
                await pipe.carry(LEAST_BYTES)
            done_s.append(loop.time())

        await read()
        async with TaskGroup() as group:
            for _ in range(2):
                group.create_task(read())

    simulate(main)
    _, second, third = done_s
    assert (third - second < 0.1) is together
    assert together or third - second == pytest.approx(0.5 + LEAST_BYTES / bytes_s)


async def test_keyframes_of_several_fragments_are_asked_for_as_the_link_has_room(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await ScriptedRun.begin(bus)
    manifests = [await run.commit(fragment) for fragment in range(3)]
    read_part, reading, come = global_fragments.read_part, list[object](), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Vector:
        reading.append(args)
        await come.wait()
        return await read_part(*args, **options)

    monkeypatch.setattr(global_fragments, "read_part", slow)
    for room, together in ((1.0, 1), (LEAST_BYTES, 3)):
        reading.clear()
        come.clear()
        reader = GlobalReader(bus, "run", run.plan)
        reader._underway.most = room
        reads = asyncio.gather(*(reader.read(manifest) for manifest in manifests))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(reading) == together
        come.set()
        await reads


def test_of_chunks_that_nobody_takes_the_oldest_go_and_are_counted() -> None:
    subject, pushed = Subjects(RUN).shard(0).chunk(0, DELTA, 0, 0), PushedChunks()
    most, size, gone = AHEAD_BYTES // 2**20, 2**20 - RECORD_BYTES, 0
    for sequence in range(1, most + 3):
        for _ in range(2):  # a stream that was created again counts from 1
            gone += pushed.put(Record(subject, sequence, 0, bytes(size)))
    assert gone == size * (most + 2 + 2)
    held = [pushed.take("SKERRY_t_STATE_0", sequence) for sequence in range(1, most + 3)]
    assert [record is not None for record in held] == [False] * 2 + [True] * most


async def test_a_reader_that_joins_reads_the_keyframe_and_the_deltas_since(
    syncer: Committing,
) -> None:
    manifest = await syncer.commit(7)
    size = await bytes_of(GlobalReader(syncer.bus, RUN, PLAN), manifest, syncer.vectors[-1])
    named = {(p.name, p.version): sum(c.size for c in p.chunks) for p in manifest.parts}
    wanted = [(KEYFRAME, 4), (DELTA, 5), (DELTA, 6), (DELTA, 7)]
    assert size == sum(named[key] for key in wanted)


async def test_a_reader_that_was_away_goes_on_from_what_it_has_or_from_the_keyframe(
    syncer: Committing,
) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await bytes_of(reader, await syncer.commit(5), syncer.vectors[-1])
    behind = await bytes_of(reader, await syncer.commit(2), syncer.vectors[-1])
    far = await bytes_of(reader, await syncer.commit(9), syncer.vectors[-1])
    assert behind < far
    assert await bytes_of(reader, syncer.manifests[-1], syncer.vectors[-1]) == 0


async def test_what_is_held_and_is_not_what_was_committed_is_read_again_from_the_keyframe(
    syncer: Committing,
) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    reader.held[0].planes.codes[0, 1] ^= 1
    with structlog.testing.capture_logs() as lines:
        await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    assert reader.mismatches == 1
    assert [line["version"] for line in lines if line["event"] == "global_fragment_differs"] == [2]
    await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    assert reader.mismatches == 1


async def test_a_version_of_another_history_under_the_same_number_is_not_believed(
    syncer: Committing,
) -> None:
    manifest = await syncer.commit(3)
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await bytes_of(reader, manifest, syncer.vectors[-1])
    reader.held[0] = reader.held[0]._replace(digest=1)
    await bytes_of(reader, manifest, syncer.vectors[-1])
    assert reader.mismatches == 1


async def test_a_keyframe_whose_bytes_are_another_vectors_is_refused(syncer: Committing) -> None:
    manifest = await syncer.commit(2)
    forged = tuple(replace(p, digest=p.digest ^ 1) for p in manifest.parts)
    with pytest.raises(Corrupt, match="does not match its manifest's digest"):
        await GlobalReader(syncer.bus, RUN, PLAN).read(replace(manifest, parts=forged))


async def test_deltas_that_lead_elsewhere_are_refused(syncer: Committing) -> None:
    manifest = await syncer.commit(3)
    wrong = replace(manifest, commit=replace(manifest.commit, params_digest=9))
    with pytest.raises(Corrupt, match="What deltas make of fragment 0 is not its version 3"):
        await GlobalReader(syncer.bus, RUN, PLAN).read(wrong)


async def test_a_reader_that_is_overtaken_keeps_how_far_it_came(syncer: Committing) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    old = await syncer.commit(2)
    newest = await syncer.commit(EVERY)
    with pytest.raises(Overtaken):
        await reader.read(old)
    assert reader.held[0].version == 1
    await bytes_of(reader, newest, syncer.vectors[-1])


async def test_a_process_of_a_learner_reads_its_own_blocks_of_deltas_and_keyframes(
    syncer: Committing,
) -> None:
    own = [range(1, 3)]
    reader = GlobalReader(syncer.bus, RUN, PLAN, lambda _: own, 4096)
    at = slice(own[0].start * BLOCK, own[0].stop * BLOCK)
    for times in (1, 1, 9):
        vector = await reader.read(await syncer.commit(times))
        np.testing.assert_array_equal(vector[at], syncer.vectors[-1][at])


async def test_without_deltas_each_version_is_a_keyframe(syncer: Committing) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    for _ in range(3):
        syncer.held = None
        await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    rounded = cpu().dequantise("bf16", cpu().quantise("bf16", syncer.master))
    np.testing.assert_array_equal(syncer.vectors[-1], rounded)


async def test_a_process_does_not_go_on_from_another_history(syncer: Committing) -> None:
    """The log was put back, and committed otherwise: no digest of the whole says so."""
    reader = GlobalReader(syncer.bus, RUN, PLAN, lambda _: [range(1, 3)], 4096)
    await reader.read(await syncer.commit(2))
    other = await Committing.of(MemoryBroker().connect())
    other.master = walk(FRAGMENT, 77)
    reader.bus = other.bus
    vector = await reader.read(await other.commit(3))
    at = slice(BLOCK, 3 * BLOCK)
    np.testing.assert_array_equal(vector[at], other.vectors[-1][at])


async def test_two_reads_of_a_fragment_at_once_take_turns(syncer: Committing) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await reader.read(await syncer.commit())
    before, after = await syncer.commit(), await syncer.commit()
    first, second = await asyncio.gather(reader.read(before), reader.read(after))
    np.testing.assert_array_equal(first, syncer.vectors[1])
    np.testing.assert_array_equal(second, syncer.vectors[2])
    await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    assert reader.mismatches == 0


def not_finite() -> NewPart:
    planes = cpu().quantise("bf16", walk(FRAGMENT, 0))
    planes.codes[0, :2] = (0xC0, 0x7F)
    return NewPart(KEYFRAME, "bf16", planes, vector_digest(cpu().dequantise("bf16", planes)))


ODD = {
    "a keyframe that is not finite": not_finite(),
    "a short keyframe": NewPart.of(KEYFRAME, "bf16", walk(FRAGMENT, 0)[:BLOCK]),
    "a keyframe in few bits": NewPart.of(KEYFRAME, "int4", walk(FRAGMENT, 0)),
    "a short delta": NewPart.of(DELTA, "int4", walk(FRAGMENT, 0)[:BLOCK]),
    "a delta in f32": NewPart.of(DELTA, "f32", walk(FRAGMENT, 0)),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_a_part_that_cannot_be_is_refused_and_ends_no_reader(
    syncer: Committing, odd: NewPart
) -> None:
    reader = GlobalReader(syncer.bus, RUN, PLAN)
    await bytes_of(reader, await syncer.commit(), syncer.vectors[-1])
    drafted = commit(2, run=RUN, plan_digest=PLAN.digest)
    stored = [odd, NewPart.of(MASTER, "f32", syncer.master)]
    manifest = await syncer.writer.commit(drafted, stored, syncer.manifests[-1])
    with pytest.raises(WireError):
        await reader.read(manifest)


def test_a_far_reader_asks_for_a_keyframe_and_small_deltas_at_once() -> None:
    took_s = list[float]()

    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        syncer = await Committing.of(broker.connect())
        for version in (4, 7):  # a keyframe, and one with three deltas
            manifest = await syncer.commit(version - len(syncer.manifests))
            reader, began_s = GlobalReader(far_of(broker, 0.25), RUN, PLAN), loop.time()
            await bytes_of(reader, manifest, syncer.vectors[-1])
            took_s.append(loop.time() - began_s)

    simulate(main)
    assert took_s[1] == pytest.approx(took_s[0])
