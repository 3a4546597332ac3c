"""The one writer of a shard's fragments: each write expects the shard's fence to be its own.

Chunks go to slots that the current manifest does not use; the manifest is the commit point, and the
ledger record follows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import Fragment, Plan
from skerry.algorithm.planes import Planes, exact
from skerry.algorithm.schemes import CHUNK_BYTES
from skerry.errors import Conflict, StateLost
from skerry.log import fences
from skerry.log.base import Bus, Expect, Receipt
from skerry.log.client import together
from skerry.log.ledger import history_lost
from skerry.log.recovery import append_commit, mend, predecessor, read_behind
from skerry.protocol import parts as layout
from skerry.protocol.chunks import seal_chunk, vector_digest
from skerry.protocol.codec import Chunk, pack
from skerry.protocol.messages import ChunkRef, Commit, Manifest, Part
from skerry.protocol.records import encode, subject_of
from skerry.protocol.subjects import Subjects
from skerry.telemetry import instruments, metrics, spans, tracing

Vector = NDArray[np.float32]


WINDOW = 6
"""Chunks that are made and on their way at once."""


class NewPart(NamedTuple):
    """One vector to store, quantised; ``digest`` is what readers of it compare."""

    name: str
    scheme: str
    planes: Planes
    digest: int

    @classmethod
    def of(cls, name: str, scheme: str, vector: Vector) -> NewPart:
        """Quantise a vector f32 (blocks*256,); the digest is that of the decoded vector.

        In scheme f32 that is the vector itself, which is not copied.
        """
        if scheme == "f32":
            return cls(name, scheme, exact(vector), vector_digest(vector))
        planes = cpu().quantise(scheme, vector)
        return cls(name, scheme, planes, vector_digest(cpu().dequantise(scheme, planes)))


@dataclass(slots=True)
class StateWriter:
    """The one writer of a shard's fragments, as long as its fence holds.

    Every method raises Fenced once another writer has taken the shard. ``every`` is how many
    versions lie between two keyframes. ``published`` counts what it has written, so that a watcher
    sees a long commit go on.
    """

    bus: Bus
    run: str
    plan: Plan
    shard: int
    holder: str
    token: int
    chunk_bytes: int
    every: int
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
        over: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        every: int = 16,
    ) -> StateWriter:
        """Take the shard's fence from its holder; its stream sequence is the token.

        With ``over``, only from that token (0: none): Conflict when it is not the newest any more.
        """
        token = await fences.take(bus, run, shard, holder=holder, now_ns=now_ns, over=over)
        return cls(bus, run, plan, shard, holder, token, chunk_bytes, every, count(1))

    @property
    def fragments(self) -> tuple[Fragment, ...]:
        """The fragments that this writer may commit to."""
        return self.plan.of_shard(self.shard)

    async def hold(self) -> None:
        """Wait until another writer has taken the shard, then raise Fenced.

        A writer that was frozen would learn of it only by its next commit, which may never come.
        """
        async with aclosing(fences.follow_fence(self.bus, self.run, self.shard)) as follower:
            async for held in follower:
                if held.token >= self.token:  # an older one comes from a replica that lags behind
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
            # A writer that was overtaken meanwhile would see the next one's commits as lost.
            await self.check()
            raise

    async def commit(
        self, commit: Commit, parts: Iterable[NewPart], previous: Manifest | None
    ) -> Manifest:
        """Store a new version of a fragment whole: chunks, manifest (commit point), ledger.

        ``commit`` comes without fence, link to the record before it, and digests of what is stored;
        they are filled in here. Each of ``parts`` is made in a thread when the one before it is
        stored; a delta, if there is one, comes first. On BrokerUnavailable it is unknown whether
        the commit happened: recover before anything else. Raises StateLost, before anything is
        written, where the ledger lacks the commit before this one.
        """
        attempt = f"{self.token}.{next(self.attempts)}"
        after = await predecessor(self.bus, commit)
        if after is None:
            await self.check()  # if overtaken, it is the next writer's commit that is there
            what = (
                f"The ledger of run {self.run!r} already names version {commit.version} of fragment"
                f" {commit.fragment} or a later one, which no syncer has committed: something else"
                " has written there, and what is committed now could not be recorded."
            )
            raise await history_lost(self.bus, self.run, what)
        stored: list[Part] = []
        making = iter(parts)
        while True:
            began_s = time.perf_counter()
            part = await asyncio.to_thread(next, making, None)
            if part is None:
                break
            spent_s = time.perf_counter() - began_s
            stored.append(await self._store(commit, part, previous, stored, attempt, spent_s))
        digests = {part.name: part.digest for part in reversed(stored)}
        whole = replace(
            commit,
            fence=self.token,
            syncer=self.holder,
            params_digest=digests[layout.DELTA if layout.DELTA in digests else layout.KEYFRAME],
            master_digest=digests.get(layout.MASTER, commit.master_digest),
            previous=after.digest,
        )
        manifest = Manifest(whole, layout.kept(previous, stored, self.every), self.shard)
        await self._publish(
            subject_of(manifest),
            encode(manifest),
            f"manifest/{commit.fragment}/{attempt}",
            tracing.headers_for(commit.trace_id, spans.COMMIT),
        )
        await append_commit(self.bus, whole, after)
        return manifest

    async def _store(
        self,
        commit: Commit,
        part: NewPart,
        previous: Manifest | None,
        stored: Sequence[Part],
        attempt: str,
        spent_s: float,
    ) -> Part:
        """Publish one vector's chunks, a window at a time, and return where they are."""
        chunks = pack(part.scheme, part.planes, self.chunk_bytes)
        kind, slot = (
            layout.kind_of(part.name),
            layout.slot(part.name, commit.version, previous, self.every),
        )
        first = sum(len(p.chunks) for p in stored if layout.kind_of(p.name) == kind)
        subjects = Subjects(self.run).shard(self.shard)
        refs: list[ChunkRef] = []
        while True:
            some = islice(chunks, WINDOW)
            sealed, took_s = await asyncio.to_thread(self._seal, some, commit, part.name)
            spent_s += took_s
            if not sealed:
                break
            at = enumerate(sealed, first + len(refs))
            publishes = (
                self._publish(
                    subjects.chunk(commit.fragment, kind, slot, index),
                    data,
                    f"chunk/{commit.fragment}/{kind}/{index}/{attempt}",
                )
                for index, data in at
            )
            receipts = await together(publishes)
            refs += [
                ChunkRef(receipt.sequence, len(data), xxhash.xxh3_64_intdigest(data))
                for receipt, data in zip(receipts, sealed, strict=True)
            ]
        labels = {metrics.RUN: self.run, metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, spent_s, labels)
        return Part(
            name=part.name,
            scheme=part.scheme,
            digest=part.digest,
            chunks=tuple(refs),
            blocks=part.planes.codes.shape[0],
            version=commit.version,
            slot=slot,
        )

    def _seal(
        self, chunks: Iterable[Chunk], commit: Commit, part: str
    ) -> tuple[list[bytes], float]:
        """Return chunks of a part as messages, and the seconds that making them took."""
        began_s = time.perf_counter()
        sealed = [
            seal_chunk(
                chunk,
                run=self.run,
                plan=self.plan,
                fragment=commit.fragment,
                version=commit.version,
                sender=self.holder,
                incarnation=self.token,
                part=part,
            )
            for chunk in chunks
        ]
        return sealed, time.perf_counter() - began_s

    async def _publish(
        self, subject: str, payload: bytes, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> Receipt:
        fence = Subjects(self.run).shard(self.shard).fence()
        try:
            receipt = await self.bus.publish(
                subject, payload, msg_id=msg_id, expect=Expect(fence, self.token), headers=headers
            )
        except Conflict as error:
            raise fences.overtaken(self.run, self.shard, self.holder) from error
        self.published += 1
        return receipt

    def _compare(self, newest: fences.HeldFence | None) -> None:
        if newest is None or newest.token != self.token:
            raise fences.overtaken(self.run, self.shard, self.holder)
