"""The global state: a fenced double buffer per fragment, with the manifest as its commit point.

Chunks go to the slot that the current manifest does not use; every write of a syncer expects the
shard's fence to be its own; readers start from the manifest, so that they see all of a version or
none of it (DESIGN section 4).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from skerry.bus import fences
from skerry.bus.base import Expect, Start
from skerry.bus.ledger import append_commit
from skerry.bus.loss import state_lost
from skerry.bus.recovery import mend, read_behind
from skerry.core.backend import cpu
from skerry.core.fragments import BLOCK
from skerry.errors import Conflict, Corrupt, Overtaken, StateLost, WireError, first_cause
from skerry.wire.codec import PlaneAssembler, VectorAssembler, encode_vector, vector_digest
from skerry.wire.envelope import seal, unseal, vector_blocks
from skerry.wire.messages import ChunkHeader, ChunkRef, Commit, Manifest, Part
from skerry.wire.records import decode, encode
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.bus.base import Bus, Receipt, Record
    from skerry.core.fragments import Fragment, Plan
    from skerry.wire.codec import Chunk

    Vector = NDArray[np.float32]

PARAMS = "params"
MASTER = "master"
READ_LANES, READ_GROUP = 3, 4
"""Groups of chunks on their way at once, and chunks decoded in one hop to a thread."""
LOST_ATTEMPTS = 8
LOST_PAUSE_S = 0.25
"""How often, and at which interval, a chunk is asked for before it counts as lost: a replica that
lags behind does not have the newest yet."""
OVERTAKEN_ATTEMPTS = 50


class NewPart(NamedTuple):
    """One vector to store: f32, padded to whole blocks, and the scheme it is stored in."""

    name: str
    scheme: str
    vector: Vector


@dataclass(slots=True)
class StateWriter:
    """The one writer of a shard's fragments, as long as its fence holds.

    Every method raises Fenced once another writer has taken the shard. ``published`` counts what
    it has written: whoever watches over a long commit sees that it goes on.
    """

    bus: Bus
    run: str
    plan: Plan
    shard: int
    shards: int
    holder: str
    token: int
    chunk_bytes: int
    window: int
    attempts: Iterator[int]
    published: int = 0

    @classmethod
    async def acquire(  # noqa: PLR0913 - what a writer is, by name
        cls,
        bus: Bus,
        run: str,
        plan: Plan,
        *,
        holder: str,
        now_ns: int,
        shard: int = 0,
        shards: int = 1,
        over: int | None = None,
        chunk_bytes: int = 524_288,
        window: int = 6,
    ) -> StateWriter:
        """Take the shard's fence from whoever holds it; its stream sequence is the token.

        With ``over``, only from that token (0: none): Conflict when it is not the newest any more.
        """
        token = await fences.take(bus, run, shard, holder=holder, now_ns=now_ns, over=over)
        return cls(bus, run, plan, shard, shards, holder, token, chunk_bytes, window, count(1))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments that this writer may commit to."""
        return tuple(f for f in self.plan.fragments if f.index % self.shards == self.shard)

    async def hold(self) -> None:
        """Raise Fenced as soon as another writer has taken the shard; return never.

        A writer that was frozen would learn of it only by its next commit, which may never come.
        """
        follower = fences.follow_fences(self.bus, self.run, [self.shard])
        async with aclosing(follower):
            async for held in follower:
                self._compare(held)

    async def check(self) -> None:
        """Raise Fenced if another writer has taken the shard by now."""
        self._compare(await fences.newest(self.bus, self.run, self.shard))

    async def recover(self) -> dict[int, Manifest]:
        """Append to the ledger what a syncer that died after a commit point left out.

        Returns the manifest of every fragment of the shard that has one. Raises StateLost when the
        ledger knows of a version that the state does not hold.
        """
        own = [fragment.index for fragment in self.fragments]
        found, newest = await read_behind(self.bus, self.run, own, self.shard, self.token)
        if newest != self.token:
            raise fences.overtaken(self.run, self.shard, self.holder)
        try:
            return await mend(self.bus, self.run, self.plan, own, found)
        except StateLost:
            # Overtaken after its manifests were read, a writer sees the next one's commits as lost.
            await self.check()
            raise

    async def commit(
        self, commit: Commit, parts: Sequence[NewPart], previous: Manifest | None
    ) -> Manifest:
        """Store a new version of a fragment whole: chunks, manifest (commit point), ledger.

        ``commit`` comes without digests and fence; they are filled in here. On BrokerUnavailable
        it is unknown whether the commit happened: recover before anything else.
        """
        slot = 1 - previous.slot if previous else 0
        attempt = f"{self.token}.{next(self.attempts)}"
        stored: list[Part] = []
        first = 0
        for part in parts:
            done = await self._store(commit, part, slot, first, attempt)
            first += len(done.chunks)
            stored.append(done)
        digests = {part.name: part.digest for part in stored}
        whole = replace(
            commit,
            fence=self.token,
            syncer=self.holder,
            params_digest=digests[PARAMS],
            master_digest=digests[MASTER],
        )
        manifest = Manifest(commit=whole, slot=slot, parts=tuple(stored))
        subject = Subjects(self.run).manifest(commit.fragment)
        await self._publish(subject, encode(manifest), f"manifest/{commit.fragment}/{attempt}")
        await append_commit(self.bus, whole)
        return manifest

    async def _store(
        self, commit: Commit, part: NewPart, slot: int, first: int, attempt: str
    ) -> Part:
        """Publish one vector's chunks, a window at a time, and return where they are."""
        chunks = encode_vector(part.scheme, part.vector, self.chunk_bytes)
        assembler = PlaneAssembler(part.scheme, part.vector.size // BLOCK)
        refs: list[ChunkRef] = []
        while batch := await asyncio.to_thread(_take, chunks, self.window):
            headers = [self._header(commit, part, chunk) for chunk in batch]
            for header, chunk in zip(headers, batch, strict=True):
                assembler.add(header, memoryview(chunk.packed))
            sealed = [seal(h, c.packed) for h, c in zip(headers, batch, strict=True)]
            refs += await self._publish_chunks(
                commit.fragment, slot, first + len(refs), sealed, attempt
            )
        decoded = await asyncio.to_thread(cpu().dequantise, part.scheme, assembler.planes)
        digest = await asyncio.to_thread(vector_digest, decoded)
        blocks = part.vector.size // BLOCK
        return Part(part.name, part.scheme, digest, tuple(refs), blocks)

    def _header(self, commit: Commit, part: NewPart, chunk: Chunk) -> ChunkHeader:
        return ChunkHeader(
            run=self.run,
            plan_digest=self.plan.digest,
            fragment=commit.fragment,
            version=commit.version,
            sender=self.holder,
            incarnation=self.token,
            index=chunk.index,
            count=chunk.count,
            scheme=chunk.scheme,
            first_block=chunk.first_block,
            blocks=chunk.blocks,
            raw_bytes=chunk.raw_bytes,
            part=part.name,
        )

    async def _publish_chunks(
        self, fragment: int, slot: int, first: int, sealed: Sequence[bytes], attempt: str
    ) -> list[ChunkRef]:
        subjects = Subjects(self.run)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        self._publish(
                            subjects.chunk(fragment, slot, index),
                            data,
                            f"chunk/{fragment}/{index}/{attempt}",
                        )
                    )
                    for index, data in enumerate(sealed, first)
                ]
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return [
            ChunkRef(task.result().sequence, len(data), xxhash.xxh3_64_intdigest(data))
            for task, data in zip(tasks, sealed, strict=True)
        ]

    async def _publish(self, subject: str, payload: bytes, msg_id: str) -> Receipt:
        fence = Subjects(self.run).fence(self.shard)
        try:
            receipt = await self.bus.publish(
                subject, payload, msg_id=msg_id, expect=Expect(fence, self.token)
            )
        except Conflict as error:
            raise fences.overtaken(self.run, self.shard, self.holder) from error
        self.published += 1
        return receipt

    def _compare(self, newest: fences.Held | None) -> None:
        if newest is None or newest.token != self.token:
            raise fences.overtaken(self.run, self.shard, self.holder)


def _take(chunks: Iterator[Chunk], number: int) -> list[Chunk]:
    return [chunk for _, chunk in zip(range(number), chunks, strict=False)]


async def read_manifests(bus: Bus, run: str, plan: Plan) -> dict[int, Manifest]:
    """Return the manifest of every fragment that has been committed."""
    records = await bus.last_each(Subjects(run).manifests())
    found = [decode(Manifest, r.payload, run=run, plan_digest=plan.digest) for r in records]
    return {m.commit.fragment: m for m in found}


async def read_manifest(bus: Bus, run: str, plan: Plan, fragment: int) -> Manifest | None:
    """Return the manifest of one fragment, or None before its first commit."""
    record = await bus.last(Subjects(run).manifest(fragment))
    if record is None:
        return None
    return decode(Manifest, record.payload, run=run, plan_digest=plan.digest)


async def follow_manifests(bus: Bus, run: str, plan: Plan) -> AsyncGenerator[Manifest]:
    """Yield the newest manifest of every fragment, then each new one.

    What cannot be read is left out: it must not end a reader, and the next commit replaces it.
    """
    follower = bus.follow(Subjects(run).manifests(), start=Start.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for record in follower:
            try:
                yield decode(Manifest, record.payload, run=run, plan_digest=plan.digest)
            except WireError:
                continue


async def read_part(
    bus: Bus,
    run: str,
    plan: Plan,
    manifest: Manifest,
    name: str,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> Vector:
    """Return one part of a fragment as an f32 padded vector, verified chunk by chunk and whole.

    Raises Overtaken when a newer commit has replaced a chunk meanwhile, StateLost when a chunk is
    gone although the manifest is still the newest, Corrupt when the bytes are not what the manifest
    says.
    """
    part = _part(manifest, name)
    fragment = plan.fragments[manifest.commit.fragment]
    if part.blocks > vector_blocks(name, fragment):
        msg = f"Part {name!r} claims {part.blocks} blocks, more than fragment {fragment.index} has."
        raise Corrupt(msg)
    assembler = VectorAssembler(part.scheme, part.blocks)
    stream, placing = Subjects(run).stream("STATE"), asyncio.Lock()
    groups = iter([part.chunks[i : i + READ_GROUP] for i in range(0, len(part.chunks), READ_GROUP)])

    async def fetch(ref: ChunkRef) -> tuple[Record, ChunkRef]:
        found = await bus.get(stream, ref.sequence)
        record = found or await _missed(bus, stream, plan, manifest, name, ref)
        if on_bytes is not None:
            on_bytes(len(record.payload))
        return record, ref

    async def lane() -> None:
        for refs in groups:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(fetch(ref)) for ref in refs]
            got = tuple(task.result() for task in tasks)
            async with placing:  # an assembler is for one thread at a time
                await asyncio.to_thread(_accept, got, manifest, part, plan, assembler)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(READ_LANES):
                group.create_task(lane())
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    vector = assembler.vector
    if await asyncio.to_thread(vector_digest, vector) != part.digest:
        msg = f"Part {name!r} of fragment {fragment.index} does not match its manifest's digest."
        raise Corrupt(msg)
    return vector


async def _missed(
    bus: Bus, stream: str, plan: Plan, manifest: Manifest, name: str, ref: ChunkRef
) -> Record:
    """Return a chunk that was not there when it was asked for, or say why it will never be."""
    commit = manifest.commit
    for attempt in range(LOST_ATTEMPTS):
        await asyncio.sleep(LOST_PAUSE_S if attempt else 0)
        newest = await read_manifest(bus, commit.run, plan, commit.fragment)
        if newest is not None and newest.parts != manifest.parts:
            msg = f"Fragment {commit.fragment} has moved on from version {commit.version}."
            raise Overtaken(msg)
        if newest is not None and (record := await bus.get(stream, ref.sequence)) is not None:
            return record
    what = f"the chunk of its {name!r} at sequence {ref.sequence} of {stream} is not in the log"
    raise await state_lost(bus, commit.run, commit.fragment, commit.version, what)


def _accept(
    got: Sequence[tuple[Record, ChunkRef]],
    manifest: Manifest,
    part: Part,
    plan: Plan,
    assembler: VectorAssembler,
) -> None:
    commit = manifest.commit
    for record, ref in got:
        data = record.payload
        if len(data) != ref.size or xxhash.xxh3_64_intdigest(data) != ref.checksum:
            msg = f"Chunk at sequence {ref.sequence} does not match the manifest that names it."
            raise Corrupt(msg)
        header, packed = unseal(data, run=commit.run, plan=plan)
        named = commit.fragment, commit.version, part.name
        if (header.fragment, header.version, header.part) != named:
            msg = f"Chunk at sequence {ref.sequence} belongs to another fragment, version or part."
            raise Corrupt(msg)
        assembler.add(header, packed)


def _part(manifest: Manifest, name: str) -> Part:
    for part in manifest.parts:
        if part.name == name:
            return part
    msg = f"The manifest of fragment {manifest.commit.fragment} has no part {name!r}."
    raise Corrupt(msg)


async def read_latest(
    bus: Bus,
    run: str,
    plan: Plan,
    fragment: Fragment,
    names: Sequence[str] | None = None,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[Manifest, Mapping[str, Vector]] | None:
    """Return the newest whole version of a fragment with the named parts (None: all of them).

    Reads the manifest again when a commit overtakes it; None before the fragment's first commit.
    """
    for _ in range(OVERTAKEN_ATTEMPTS):
        manifest = await read_manifest(bus, run, plan, fragment.index)
        if manifest is None:
            return None
        wanted = names if names is not None else [part.name for part in manifest.parts]
        try:
            parts = {
                name: await read_part(bus, run, plan, manifest, name, on_bytes=on_bytes)
                for name in wanted
            }
        except Overtaken:
            continue
        return manifest, parts
    msg = f"Fragment {fragment.index} is committed faster than this link can read it."
    raise Overtaken(msg)
