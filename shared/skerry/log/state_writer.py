"""The one writer of a shard's fragments: every write of it expects the shard's fence to be its own.

Chunks go to the slot that the current manifest does not use; the manifest is the commit point, and
the ledger record follows it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK
from skerry.errors import Conflict, StateLost, first_cause
from skerry.log import fences
from skerry.log.base import Expect
from skerry.log.loss import ledger_ahead
from skerry.log.recovery import append_commit, mend, predecessor, read_behind
from skerry.log.state import MASTER, PARAMS
from skerry.protocol.chunks import PlaneAssembler, seal, vector_digest
from skerry.protocol.codec import encode_vector
from skerry.protocol.messages import ChunkHeader, ChunkRef, Commit, Manifest, Part
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry.telemetry import instruments, metrics, spans, tracing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.log.base import Bus, Receipt
    from skerry.protocol.codec import Chunk

    Vector = NDArray[np.float32]


class NewPart(NamedTuple):
    """One vector to store: f32, padded to whole blocks, and the scheme it is stored in."""

    name: str
    scheme: str
    vector: Vector


@dataclass(slots=True)
class StateWriter:
    """The one writer of a shard's fragments, as long as its fence holds.

    Every method raises Fenced once another writer has taken the shard. ``published`` counts what
    it has written, so that a watcher sees a long commit go on.
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
        """Take the shard's fence from its holder; its stream sequence is the token.

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
                if held.token >= self.token:  # an older one: a replica that lags behind
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

        ``commit`` comes without digests, fence and link to the record before it; they are filled in
        here. On BrokerUnavailable
        it is unknown whether the commit happened: recover before anything else. Raises StateLost,
        before anything is written, where the ledger lacks the commit before this one. Parts that
        are one vector in one scheme share their chunks, as params and master do in f32.
        """
        slot = 1 - previous.slot if previous else 0
        attempt = f"{self.token}.{next(self.attempts)}"
        after = await predecessor(self.bus, commit)
        if after is None:
            await self.check()  # overtaken, it would find what the next writer has committed
            raise await ledger_ahead(self.bus, commit)
        stored: list[Part] = []
        first = 0
        for part in parts:
            twin = _twin(part, parts, stored)
            if twin is not None:
                stored.append(replace(twin, name=part.name))
                continue
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
            previous=after.digest,
        )
        manifest = Manifest(commit=whole, slot=slot, parts=tuple(stored))
        subject = Subjects(self.run).manifest(commit.fragment)
        await self._publish(
            subject,
            encode(manifest),
            f"manifest/{commit.fragment}/{attempt}",
            tracing.headers_for(commit.trace_id, spans.COMMIT),
        )
        await append_commit(self.bus, whole, after)
        return manifest

    async def _store(
        self, commit: Commit, part: NewPart, slot: int, first: int, attempt: str
    ) -> Part:
        """Publish one vector's chunks, a window at a time, and return where they are."""
        chunks = encode_vector(part.scheme, part.vector, self.chunk_bytes)
        assembler = PlaneAssembler(part.scheme, part.vector.size // BLOCK)
        refs: list[ChunkRef] = []
        spent_s = 0.0
        while True:
            batch, took_s = await asyncio.to_thread(_take, chunks, self.window)
            spent_s += took_s
            if not batch:
                break
            headers = [self._header(commit, part, chunk) for chunk in batch]
            for header, chunk in zip(headers, batch, strict=True):
                assembler.add(header, memoryview(chunk.packed))
            sealed = [seal(h, c.packed) for h, c in zip(headers, batch, strict=True)]
            refs += await self._publish_chunks(
                commit.fragment, slot, first + len(refs), sealed, attempt
            )
        labels = {metrics.RUN: self.run, metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, spent_s, labels)
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
            async with TaskGroup() as group:
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

    async def _publish(
        self, subject: str, payload: bytes, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> Receipt:
        fence = Subjects(self.run).fence(self.shard)
        try:
            receipt = await self.bus.publish(
                subject, payload, msg_id=msg_id, expect=Expect(fence, self.token), headers=headers
            )
        except Conflict as error:
            raise fences.overtaken(self.run, self.shard, self.holder) from error
        self.published += 1
        return receipt

    def _compare(self, newest: fences.Held | None) -> None:
        if newest is None or newest.token != self.token:
            raise fences.overtaken(self.run, self.shard, self.holder)


def _twin(part: NewPart, parts: Sequence[NewPart], stored: Sequence[Part]) -> Part | None:
    """Return what is stored of the same vector in the same scheme already, if anything is."""
    for before, done in zip(parts, stored, strict=False):
        if before.scheme == part.scheme and before.vector is part.vector:
            return done
    return None


def _take(chunks: Iterator[Chunk], number: int) -> tuple[list[Chunk], float]:
    """Return the next chunks, and the seconds that making them took."""
    began_s = time.perf_counter()
    taken = [chunk for _, chunk in zip(range(number), chunks, strict=False)]
    return taken, time.perf_counter() - began_s
