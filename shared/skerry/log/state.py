"""Reading the global state: fenced chunk buffers per fragment, whose manifest is what counts.

Readers start from the manifest, so that they see all of a version or none of it;
``state_writer`` is the other side, ``global_fragments`` reads what learners start from.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from skerry.algorithm.backend import decoder
from skerry.errors import Corrupt, Overtaken, WireError
from skerry.log.base import Deliver
from skerry.log.client import merged, together
from skerry.log.ledger import state_lost
from skerry.log.reading import LOOK_PAUSES_S
from skerry.log.run_records import readable
from skerry.log.streams import AHEAD_BYTES
from skerry.protocol.chunks import VectorAssembler, unseal, vector_blocks
from skerry.protocol.codec import blocks_per_chunk
from skerry.protocol.messages import ChunkRef, Manifest, Part
from skerry.protocol.parts import DELTA, kind_of, newest
from skerry.protocol.records import read
from skerry.protocol.subjects import ANY, Subjects, stream_of
from skerry.telemetry import instruments, metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus, Record

    Vector = NDArray[np.float32]


class Meters(NamedTuple):
    """Callbacks for the bytes of each chunk that is read, and the seconds of decoding a part."""

    on_bytes: Callable[[int], None] | None = None
    on_decoded: Callable[[float], None] | None = None


NO_METERS = Meters()


RECORD_BYTES = 1024
"""More than a record takes beside its payload."""


@dataclass(slots=True)
class PushedChunks:
    """Chunks that the log sent as they were stored: none of them has to be asked for.

    They are verified like any other. Holds AHEAD_BYTES at most, RECORD_BYTES for each included, and
    drops the oldest.
    """

    _held: dict[tuple[str, int], Record] = field(default_factory=dict[tuple[str, int], "Record"])
    _bytes: int = 0

    def put(self, record: Record) -> int:
        """Hold a chunk until it is taken, or too many have come after it.

        Returns the bytes of chunks that were dropped.
        """
        place = stream_of(record.subject), record.sequence
        let_go = [self.take(*place)]
        self._held[place] = record
        self._bytes += len(record.payload) + RECORD_BYTES
        while self._bytes > AHEAD_BYTES:
            let_go.append(self.take(*next(iter(self._held))))
        return sum(len(gone.payload) for gone in let_go if gone is not None)

    def take(self, stream: str, sequence: int) -> Record | None:
        """Return a chunk and hold it no more; None where it has not come."""
        record = self._held.pop((stream, sequence), None)
        if record is not None:
            self._bytes -= len(record.payload) + RECORD_BYTES
        return record


class OwnBlocks(NamedTuple):
    """The blocks of a fragment that a reader wants, and how long chunks are by its run's config."""

    ranges: Sequence[range]
    chunk_bytes: int


async def read_manifests(bus: Bus, run: str, plan: Plan) -> dict[int, Manifest]:
    """Return the manifest of every fragment that has been committed.

    What is stored for a fragment that the plan does not have is left out, whatever it is.
    """
    names = [Subjects(run).shard(shard).manifest for shard in range(plan.shards)]
    subjects = {names[plan.shard_of(f.index)](f.index): f.index for f in plan.fragments}
    shards = await together(bus.last_each(manifest()) for manifest in names)
    return {
        subjects[record.subject]: _decoded(record, run, plan)
        for record in chain.from_iterable(shards)
        if record.subject in subjects
    }


async def follow_manifests(bus: Bus, run: str, plan: Plan) -> AsyncGenerator[Manifest]:
    """Yield the newest manifest of each fragment, then each new one, for ever.

    Manifests that are refused, or of another plan, are left out.
    """
    patterns = [Subjects(run).shard(shard).manifest() for shard in range(plan.shards)]
    followers = [bus.follow(one, deliver=Deliver.LAST_PER_SUBJECT) for one in patterns]
    async with aclosing(merged(followers)) as records:
        async for record in records:
            if (manifest := readable(Manifest, record, run, plan.digest)) is not None:
                yield manifest


def follow_deltas(bus: Bus, run: str, plan: Plan) -> AsyncGenerator[Record]:
    """Yield every chunk of a delta as it is stored, of whatever fragment, for ever."""
    patterns = [Subjects(run).shard(shard).chunk(ANY, DELTA) for shard in range(plan.shards)]
    return merged([bus.follow(one, deliver=Deliver.LIVE) for one in patterns])


def _decoded(record: Record, run: str, plan: Plan) -> Manifest:
    """Return a manifest; the WireError for one that cannot be read says where it lies."""
    try:
        return read(Manifest, record, run=run, plan_digest=plan.digest)
    except WireError as error:
        error.args = (f"The manifest on {record.subject} cannot be read: {error}",)
        raise


async def read_manifest(bus: Bus, run: str, plan: Plan, fragment: int) -> Manifest | None:
    """Return the manifest of one fragment, or None before its first commit."""
    shard = Subjects(run).of_fragment(fragment, plan.shards)
    record = await bus.last(shard.manifest(fragment))
    if record is None:
        return None
    return _decoded(record, run, plan)


async def read_part(
    bus: Bus,
    run: str,
    plan: Plan,
    manifest: Manifest,
    wanted: str | Part,
    *,
    own: OwnBlocks | None = None,
    pushed: PushedChunks | None = None,
    meters: Meters = NO_METERS,
) -> Vector:
    """Return one part of a fragment as an f32 padded vector, verified chunk by chunk and whole.

    A name stands for its newest part. A delta is verified as a whole by the version that it leads
    to, which is left to the caller.

    With ``own`` only chunks that hold some of those blocks are read and verified, and the rest of
    the vector is undefined. ``pushed`` holds chunks that are here already.
    Raises Overtaken when a newer commit has replaced a chunk meanwhile, StateLost when a chunk is
    gone although the manifest is still the newest, Corrupt when the bytes are not what the manifest
    says.
    """
    fragment = plan.fragments[manifest.commit.fragment]
    part = newest(manifest, wanted) if isinstance(wanted, str) else wanted
    if part is None:
        msg = f"The manifest of fragment {fragment.index} has no part {wanted!r}."
        raise Corrupt(msg)
    name = part.name
    if part.blocks > vector_blocks(name, fragment):
        msg = f"Part {name!r} claims {part.blocks} blocks, more than fragment {fragment.index} has."
        raise Corrupt(msg)
    compared = own is None and name != DELTA
    assembler = VectorAssembler(part.scheme, part.blocks, hashed=compared)
    spent_s = 0.0
    await asyncio.to_thread(decoder, part.scheme)  # which may have kernels to load, for seconds
    # Here and not in another thread: a chunk takes a fraction of a millisecond to decode, and two
    # threads that take turns at it lose more to each other than they win.
    chunks = _chunks(bus, plan, manifest, part, _wanted(part, own), pushed)
    async with aclosing(chunks) as records:
        async for record, ref in records:
            if meters.on_bytes is not None:
                meters.on_bytes(len(record.payload))
            spent_s += _accept(record, ref, manifest, part, plan, assembler)
    if compared and assembler.digest != part.digest:
        msg = f"Part {name!r} of fragment {fragment.index} does not match its manifest's digest."
        raise Corrupt(msg)
    labels = {metrics.RUN: run, metrics.OPERATION: "decode"}
    instruments.record(metrics.CODEC_DURATION, spent_s, labels)
    if meters.on_decoded is not None:
        meters.on_decoded(spent_s)
    return assembler.vector if own is None else assembler.holding(own.ranges)


async def _chunks(
    bus: Bus,
    plan: Plan,
    manifest: Manifest,
    part: Part,
    wanted: Sequence[ChunkRef],
    pushed: PushedChunks | None,
) -> AsyncGenerator[tuple[Record, ChunkRef]]:
    """Yield chunks of a part as the log holds them, in its order."""
    fragment = manifest.commit.fragment
    shard = Subjects(manifest.commit.run).of_fragment(fragment, plan.shards)
    stream, subject = shard.stream("STATE"), shard.chunk(fragment, kind_of(part.name), part.slot)
    left = deque(sorted(wanted, key=lambda ref: ref.sequence))
    while left and pushed and (record := pushed.take(stream, left[0].sequence)) is not None:
        ref = left.popleft()
        yield await _checked(bus, stream, record, ref), ref
    while left:
        async with aclosing(bus.get_each(subject, [ref.sequence for ref in left])) as records:
            async for record in records:
                ref = left.popleft()
                yield await _checked(bus, stream, record, ref), ref
        if left:
            ref = left.popleft()
            missed = await _missed(bus, plan, manifest, part.name, ref)
            yield await _checked(bus, stream, missed, ref), ref


def _wanted(part: Part, own: OwnBlocks | None) -> Sequence[ChunkRef]:
    """Return the chunks that hold some of our blocks: all chunks but the last are of one size."""
    if own is None:
        return part.chunks
    size = blocks_per_chunk(part.scheme, own.chunk_bytes)
    if len(part.chunks) != -(-part.blocks // size):  # they were written by another setting
        return part.chunks
    return [
        ref
        for first, ref in zip(range(0, part.blocks, size), part.chunks, strict=True)
        if any(blocks.start < first + size and first < blocks.stop for blocks in own.ranges)
    ]


async def _missed(bus: Bus, plan: Plan, manifest: Manifest, name: str, ref: ChunkRef) -> Record:
    """Return a chunk that was missing at first, or raise Overtaken or StateLost if it is gone."""
    commit = manifest.commit
    stream = Subjects(commit.run).of_fragment(commit.fragment, plan.shards).stream("STATE")
    for pause_s in LOOK_PAUSES_S:
        await asyncio.sleep(pause_s)
        newest = await read_manifest(bus, commit.run, plan, commit.fragment)
        if newest is not None and newest.parts != manifest.parts:
            msg = f"Fragment {commit.fragment} has moved on from version {commit.version}."
            raise Overtaken(msg)
        if newest is not None and (record := await bus.get(stream, ref.sequence)) is not None:
            return record
    what = f"the chunk of its {name!r} at sequence {ref.sequence} of {stream} is not in the log"
    raise await state_lost(bus, commit.run, commit.fragment, commit.version, what)


async def _checked(bus: Bus, stream: str, record: Record, ref: ChunkRef) -> Record:
    """Return the chunk that a manifest names, from the log itself if ``record`` is not that chunk.

    A region's cache may hold anything. Raises Corrupt where the log does not have it either.
    """
    if _is(record, ref):
        return record
    found = await bus.get(stream, ref.sequence)
    if found is None or not _is(found, ref):
        msg = f"Chunk at sequence {ref.sequence} does not match the manifest that names it."
        raise Corrupt(msg)
    return found


def _is(record: Record, ref: ChunkRef) -> bool:
    """Return True if a message has the bytes that a manifest names."""
    data = record.payload
    return len(data) == ref.size and xxhash.xxh3_64_intdigest(data) == ref.checksum


def _accept(
    record: Record,
    ref: ChunkRef,
    manifest: Manifest,
    part: Part,
    plan: Plan,
    assembler: VectorAssembler,
) -> float:
    """Decode a chunk that was ``_checked``; return the seconds that took."""
    began_s = time.perf_counter()
    commit, data = manifest.commit, record.payload
    header, packed = unseal(data, run=commit.run, plan=plan, checked=True)
    if (header.fragment, header.version, header.part) != (commit.fragment, part.version, part.name):
        msg = f"Chunk at sequence {ref.sequence} belongs to another fragment, version or part."
        raise Corrupt(msg)
    assembler.add(header, packed, ref.checksum)
    return time.perf_counter() - began_s
