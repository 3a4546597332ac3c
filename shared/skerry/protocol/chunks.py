"""The chunks of a vector as messages: header and packed bytes in one checked frame, and assembly.

``unseal`` trusts nothing in a message; the assemblers take chunks in whatever order they come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, Fragment, Plan
from skerry.algorithm.planes import VECTORS, Planes, allocate
from skerry.algorithm.schemes import raw_bytes, scheme_of
from skerry.errors import Corrupt, Oversized, Truncated, UnknownScheme, WrongPlan
from skerry.protocol import door, wire
from skerry.protocol.codec import Chunk, decode_into, packed_bound, unpack_into
from skerry.protocol.messages import ChunkHeader, ContributionHeader, FrameKind
from skerry.protocol.records import check_plan, check_run

Packed = bytes | memoryview

OUTER_STACK = 16
"""A leaf of the outer optimizer's state is at most this many times as long as its fragment."""


def seal(header: ChunkHeader, packed: bytes) -> bytes:
    """Return the message that carries one chunk; Oversized above the caps of the frame."""
    return wire.write(FrameKind.CHUNK, wire.encode(header), packed)


def seal_chunk(  # noqa: PLR0913 - what an envelope says, by name
    chunk: Chunk,
    *,
    run: str,
    plan: Plan,
    fragment: int,
    version: int,
    sender: str,
    incarnation: int,
    part: str = "",
    contribution: ContributionHeader | None = None,
) -> bytes:
    """Return the message of a chunk of a part of the global state, or of a contribution.

    The first chunk of a contribution carries its header.
    """
    header = ChunkHeader(
        run=run,
        plan_digest=plan.digest,
        fragment=fragment,
        version=version,
        sender=sender,
        incarnation=incarnation,
        index=chunk.index,
        count=chunk.count,
        scheme=chunk.scheme,
        first_block=chunk.first_block,
        blocks=chunk.blocks,
        raw_bytes=chunk.raw_bytes,
        part=part,
        identity=contribution.identity if contribution else 0,
        contribution=contribution if chunk.index == 0 else None,
    )
    return seal(header, chunk.packed)


def unseal(
    data: Packed, *, run: str, plan: Plan, checked: bool = False
) -> tuple[ChunkHeader, memoryview]:
    """Return the header of a chunk and its packed bytes, a view into ``data``.

    Each check that fails is a WireError of its own, in this order: wire version (WrongVersion),
    sizes (Truncated, Oversized), checksum (Corrupt), run (WrongRun), plan digest and fragment
    (WrongPlan), scheme (UnknownScheme), blocks and sizes against the plan's fragment (Corrupt,
    Oversized), numbers and norms (Implausible, Corrupt). It is safe to allocate what a returned
    header says. With ``checked`` the checksum is skipped, because the caller has compared one over
    all of ``data``.
    """
    found = wire.read(FrameKind.CHUNK, data, checked=checked)
    header = wire.decode(ChunkHeader, found.header)
    check_run(header.run, run)
    check_plan(header.plan_digest, plan.digest)
    if header.fragment >= len(plan.fragments):
        msg = f"There is no fragment {header.fragment} in a plan of {len(plan.fragments)}."
        raise WrongPlan(msg)
    fragment = plan.fragments[header.fragment]
    scheme_of(header.scheme)
    _check_sizes(header, fragment, len(found.payload))
    door.check(header)
    if (claim := header.contribution) is not None:
        if claim.fragment != header.fragment:
            msg = f"A contribution to {claim.fragment} came as fragment {header.fragment}."
            raise Corrupt(msg)
        door.check_contribution(claim, len(fragment.slices))
    return header, found.payload


def vector_blocks(part: str, fragment: Fragment) -> int:
    """Return the most blocks a part can have; an outer optimizer may stack several vectors."""
    return fragment.blocks * (OUTER_STACK if part.startswith("outer.") else 1)


def _check_sizes(header: ChunkHeader, fragment: Fragment, packed: int) -> None:
    limit = vector_blocks(header.part, fragment)
    stop = header.first_block + header.blocks
    if header.blocks < 1 or stop > limit:
        msg = f"Blocks {header.first_block} to {stop} are not in a vector of {limit} blocks."
        raise Oversized(msg) if header.blocks > limit else Corrupt(msg)
    if header.index >= header.count or header.count > limit:
        msg = f"Chunk {header.index} of {header.count} cannot be of a vector of {limit} blocks."
        raise Corrupt(msg)
    want = raw_bytes(header.scheme, header.blocks)
    if header.raw_bytes != want:
        msg = f"{header.raw_bytes} bytes are not the {want} of {header.blocks} blocks."
        raise Oversized(msg) if header.raw_bytes > want else Corrupt(msg)
    bound = packed_bound(header.scheme, header.blocks)
    if packed > bound:
        msg = f"A payload of {packed} bytes is above the {bound} that its blocks can take."
        raise Oversized(msg)


class Coverage:
    """Tracks which chunks of one vector are here: each once, without overlap, and none outside.

    Holds no payload; the assemblers below also decode each chunk that is new and fits. No instance
    refers to itself, so its memory is freed with it, and not when the garbage collector runs.
    """

    def __init__(self, scheme: str, blocks: int) -> None:
        self._scheme = scheme
        self._blocks = blocks
        self._count = 0
        self._seen: dict[int, tuple[int, int, int]] = {}
        self._covered = 0
        self._starts: list[tuple[int, int]] = []

    @property
    def complete(self) -> bool:
        return 0 < self._count == len(self._seen)

    def require(self) -> None:
        """Raise Truncated while chunks are missing."""
        if not self.complete:
            msg = f"{len(self._seen)} of {self._count or 'unknown'} chunks are here."
            raise Truncated(msg)

    def add(self, header: ChunkHeader, packed: Packed, checksum: int | None = None) -> bool:
        """Take in one chunk and return whether all are here; the same chunk again is no harm.

        Raises a WireError, and forgets that chunk, if it is damaged, of another scheme, outside of
        the vector, or in conflict with a chunk that is here. ``checksum`` tells two chunks apart:
        the caller gives one that it has compared, for all chunks of a vector or for none.
        """
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(packed)
        if self._lacks(header, checksum):
            self._decode(header, packed)
            self._count = header.count
            place = header.first_block, header.blocks
            self._seen[header.index] = (*place, checksum)
            self._starts.insert(bisect_left(self._starts, place), place)
            self._covered += header.blocks
        return self.complete

    def _decode(self, header: ChunkHeader, packed: Packed) -> None:
        """Take in a chunk that is new and fits; one that this raises for is forgotten."""

    def _lacks(self, header: ChunkHeader, checksum: int) -> bool:
        before = self._seen.get(header.index)
        if before is None:
            self._check(header)
            return True
        same = before == (header.first_block, header.blocks, checksum)
        if not same or header.scheme != self._scheme or header.count != self._count:
            msg = f"Chunk {header.index} came twice, with different contents."
            raise Corrupt(msg)
        return False

    def _check(self, header: ChunkHeader) -> None:
        if header.scheme != self._scheme:
            msg = f"Chunk {header.index} is {header.scheme!r} in a vector of {self._scheme!r}."
            raise UnknownScheme(msg)
        if header.index >= header.count or header.count != (self._count or header.count):
            msg = f"Chunk {header.index} of {header.count} is in a vector of {self._count} chunks."
            raise Corrupt(msg)
        stop = header.first_block + header.blocks
        place = bisect_left(self._starts, (header.first_block, header.blocks))
        before = sum(self._starts[place - 1]) if place else 0
        after = self._starts[place][0] if place < len(self._starts) else self._blocks
        missing = self._blocks - self._covered - header.blocks
        if header.blocks < 1 or header.first_block < before or stop > after:
            msg = f"Blocks {header.first_block} to {stop} do not fit into {self._blocks} blocks."
            raise Corrupt(msg)
        if (len(self._seen) + 1 == header.count) != (missing == 0):
            msg = f"The {header.count} chunks do not cover the {self._blocks} blocks."
            raise Corrupt(msg)


class PlaneAssembler(Coverage):
    """Puts the chunks of one vector together.

    Memory is one set of planes for ``blocks`` blocks, taken from the plan and not from a message;
    chunks are decompressed straight into it.
    """

    def __init__(self, scheme: str, blocks: int) -> None:
        super().__init__(scheme, blocks)
        self._planes = allocate(scheme, blocks)

    @property
    def planes(self) -> Planes:
        """The planes (blocks, ...); raises Truncated while chunks are missing."""
        self.require()
        return self._planes

    def _decode(self, header: ChunkHeader, packed: Packed) -> None:
        blocks = slice(header.first_block, header.first_block + header.blocks)
        unpack_into(header, packed, self._planes.part(blocks))


class VectorAssembler(Coverage):
    """Decodes the chunks of one vector and puts them together.

    Memory is the f32 vector of ``blocks`` blocks, taken from the plan and not from a message, and
    one chunk's planes, which stay in the cache: planes of the whole would be written and read back.
    The digest grows with the part that has no gap, so that no pass is left for the end; without
    ``hashed`` there is no digest.
    """

    def __init__(self, scheme: str, blocks: int, *, hashed: bool = True) -> None:
        super().__init__(scheme, blocks)
        self._vector = VECTORS.empty(blocks * BLOCK)
        self._hash = VectorHash()
        self._hashes = hashed
        self._hashed = 0
        self._decoded: dict[int, int] = {}
        """Where each chunk that is decoded and not hashed starts and stops, in elements."""

    @property
    def vector(self) -> NDArray[np.float32]:
        """The vector f32 (blocks*256,); raises Truncated while chunks are missing."""
        self.require()
        return self._vector

    def holding(self, own: Sequence[range]) -> NDArray[np.float32]:
        """Return the vector f32 (blocks*256,); raises Truncated if it lacks some of these blocks.

        Other blocks may be missing: they are not written, and take no memory.
        """
        for blocks in own:
            at = blocks.start
            for first, count in self._starts:
                if first <= at:
                    at = max(at, first + count)
            if at < blocks.stop:
                msg = f"Blocks {at} to {blocks.stop} of a vector are not here."
                raise Truncated(msg)
        return self._vector

    @property
    def digest(self) -> int:
        """``vector_digest`` of the vector; raises Truncated while chunks are missing."""
        self.require()
        return self._hash.digest()

    def _decode(self, header: ChunkHeader, packed: Packed) -> None:
        first = header.first_block * BLOCK
        stop = first + header.blocks * BLOCK
        decode_into(header, packed, self._vector[first:stop])
        if not self._hashes:
            return
        self._decoded[first] = stop
        while (end := self._decoded.pop(self._hashed, None)) is not None:
            self._hash.update(self._vector[self._hashed : end])
            self._hashed = end


class VectorHash:
    """``vector_digest`` of a vector that is given piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, x: NDArray[np.float32]) -> None:
        self._hash.update(_little_endian(x))

    def digest(self) -> int:
        return self._hash.intdigest()


def vector_digest(x: NDArray[np.float32]) -> int:
    """Return xxh3-64 of the little-endian f32 bytes of a vector."""
    return xxhash.xxh3_64_intdigest(_little_endian(x))


def _little_endian(x: NDArray[np.float32]) -> memoryview:
    return np.ascontiguousarray(x, np.dtype("<f4")).data
