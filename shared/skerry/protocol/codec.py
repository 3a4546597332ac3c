"""The payload codec: quantised planes to chunks of packed bytes and back.

A fragment's planes are cut into chunks of whole blocks that stand alone, so that any of them can be
decoded in any order and memory stays flat. The packed bytes of a chunk are its sections, one after
another, each a little-endian u32 length and that many bytes; ``SECTIONS`` says which. Measured bits
per parameter, on Gaussian blocks and chunks of 512 KiB: int2 1.57,
int4 3.33, e3m0 3.52, int8 7.50, bf16 11.1, f32 28.1.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from skerry.algorithm.backend import cpu, decoder
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import Planes, allocate
from skerry.algorithm.schemes import raw_bytes, scheme_of
from skerry.errors import Corrupt, Oversized, Truncated, UnknownScheme
from skerry.protocol.lossless import Packing, compress, decompress
from skerry.protocol.vectors import VECTORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from skerry.protocol.messages import ChunkHeader

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk ``index`` of ``count``: blocks ``[first_block, first_block + blocks)``, packed."""

    index: int
    count: int
    first_block: int
    blocks: int
    scheme: str
    raw_bytes: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class Section:
    """A part of every block: bytes ``[start:stop:step]`` of its codes, or its scale."""

    start: int
    stop: int
    packing: Packing
    step: int = 1
    scale: bool = False

    @property
    def bytes_per_block(self) -> int:
        return len(range(self.start, self.stop, self.step))

    def of(self, planes: Planes) -> NDArray[np.uint8]:
        """Return the section as a view u8 (blocks, bytes_per_block) of the planes."""
        if self.scale:
            return planes.scales.view(np.uint8).reshape(-1, 2)
        return planes.codes[:, self.start : self.stop : self.step]


_SCALES = Section(0, 2, Packing.PAIRS, scale=True)
SECTIONS: Mapping[str, tuple[Section, ...]] = {
    "f32": (
        Section(3, 4 * BLOCK, Packing.FAST, step=4),
        *(Section(byte, 4 * BLOCK, Packing.STORED, step=4) for byte in (2, 1, 0)),
    ),
    "bf16": (
        Section(1, 2 * BLOCK, Packing.SMALL, step=2),
        Section(0, 2 * BLOCK, Packing.STORED, step=2),
    ),
    "int8": (
        _SCALES,
        Section(0, BLOCK // 2, Packing.ENTROPY),
        Section(BLOCK // 2, BLOCK, Packing.STORED),
    ),
}
"""How a scheme is laid out on the wire; one that is not here packs its scales, then its codes.

Low nibbles and the bytes of a mantissa are noise: no compressor sees them. A byte plane of its own
also keeps zstd's table of symbols clean, which one shuffled buffer does not in a small fragment.
"""


def packed_bound(scheme: str, blocks: int) -> int:
    """Return the most bytes that packing ``blocks`` blocks can take; raises UnknownScheme."""
    return raw_bytes(scheme, blocks) + _LENGTH.size * len(_sections(scheme))


def blocks_per_chunk(scheme: str, chunk_bytes: int) -> int:
    """Return how many blocks fit a chunk of ``chunk_bytes`` packed, even if nothing shrinks.

    Raises ValueError if not even one does.
    """
    blocks = (chunk_bytes - packed_bound(scheme, 0)) // raw_bytes(scheme, 1)
    if blocks < 1:
        msg = f"a chunk of {chunk_bytes} bytes does not hold one block of {scheme}"
        raise ValueError(msg)
    return blocks


def pack(scheme: str, planes: Planes, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the chunks of quantised planes, each made when it is asked for."""

    def cut(first: int, stop: int) -> Planes:
        scales = planes.scales[first:stop] if planes.scales.size else planes.scales
        return Planes(planes.codes[first:stop], scales)

    return _chunks(scheme, planes.codes.shape[0], chunk_bytes, cut)


def encode_vector(scheme: str, x: NDArray[np.float32], chunk_bytes: int) -> Iterator[Chunk]:
    """Quantise and pack a padded vector f32 (blocks*256,), chunk by chunk.

    Raises Diverged at the first chunk that is not finite.
    """

    def cut(first: int, stop: int) -> Planes:
        return cpu().quantise(scheme, x[first * BLOCK : stop * BLOCK])

    return _chunks(scheme, x.size // BLOCK, chunk_bytes, cut)


def unpack(header: ChunkHeader, packed: bytes | memoryview) -> Planes:
    """Return the planes of one chunk; raises Truncated, Oversized, Corrupt or UnknownScheme.

    ``header.blocks`` decides what is allocated: check it against the plan first, as
    ``envelope.unseal`` does.
    """
    sections = _split(header, packed)
    planes = allocate(header.scheme, header.blocks)
    _unpack_into(header.scheme, sections, planes)
    return planes


def vector_digest(x: NDArray[np.float32]) -> int:
    """Return xxh3-64 of the little-endian f32 bytes of a vector."""
    return xxhash.xxh3_64_intdigest(_little_endian(x))


class Coverage:
    """Which chunks of one vector are here: each once, next to each other, and none outside.

    Holds no payload. ``lacks`` and ``note`` frame the decoding of a chunk; ``add`` is both, for who
    only wants to know when a vector is whole.
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

    def add(self, header: ChunkHeader, packed: bytes | memoryview) -> bool:
        """Note a chunk and return whether all are here; raises as ``lacks`` does."""
        checksum = xxhash.xxh3_64_intdigest(packed)
        if self.lacks(header, checksum):
            self.note(header, checksum)
        return self.complete

    def lacks(self, header: ChunkHeader, checksum: int) -> bool:
        """Whether a chunk is not here yet and fits; raises the WireError that says why it does not.

        The same chunk again is no harm; one with another checksum in its place is Corrupt.
        """
        before = self._seen.get(header.index)
        if before is None:
            self._check(header)
            return True
        same = before == (header.first_block, header.blocks, checksum)
        if not same or header.scheme != self._scheme or header.count != self._count:
            msg = f"Chunk {header.index} came twice, with different contents."
            raise Corrupt(msg)
        return False

    def note(self, header: ChunkHeader, checksum: int) -> None:
        """Remember a chunk that was decoded."""
        self._count = header.count
        place = header.first_block, header.blocks
        self._seen[header.index] = (*place, checksum)
        self._starts.insert(bisect_left(self._starts, place), place)
        self._covered += header.blocks

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


class PlaneAssembler:
    """Puts the chunks of one vector together, in whatever order they come.

    Memory is one set of planes for ``blocks`` blocks, taken from the plan and not from a message;
    chunks are decompressed straight into it.
    """

    def __init__(self, scheme: str, blocks: int) -> None:
        self._scheme = scheme
        self._planes = allocate(scheme, blocks)
        self._cover = Coverage(scheme, blocks)

    @property
    def complete(self) -> bool:
        return self._cover.complete

    @property
    def planes(self) -> Planes:
        """The planes (blocks, ...); raises Truncated while chunks are missing."""
        self._cover.require()
        return self._planes

    def add(self, header: ChunkHeader, packed: bytes | memoryview) -> bool:
        """Take in one chunk and return whether all are here; the same chunk again is no harm.

        Raises a WireError, and forgets that chunk, if it is damaged, of another scheme, outside of
        the vector, or in conflict with a chunk that is here.
        """
        checksum = xxhash.xxh3_64_intdigest(packed)
        if self._cover.lacks(header, checksum):
            sections = _split(header, packed)
            part = slice(header.first_block, header.first_block + header.blocks)
            scales = self._planes.scales[part] if self._planes.scales.size else self._planes.scales
            _unpack_into(self._scheme, sections, Planes(self._planes.codes[part], scales))
            self._cover.note(header, checksum)
        return self._cover.complete


class VectorAssembler:
    """Puts the chunks of one vector together decoded, in whatever order they come.

    Memory is the f32 vector of ``blocks`` blocks, taken from the plan and not from a message, and
    one chunk's planes, which stay in the cache: planes of the whole would be written and read back.
    The digest grows with what is there without a gap, so that no pass is left for the end.
    """

    def __init__(self, scheme: str, blocks: int) -> None:
        self._scheme = scheme
        self._vector = VECTORS.empty(blocks * BLOCK)
        self._cover = Coverage(scheme, blocks)
        self._hash = xxhash.xxh3_64()
        self._hashed = 0
        self._decoded: dict[int, int] = {}
        """Where each chunk that is decoded and not hashed starts and stops, in elements."""

    @property
    def vector(self) -> NDArray[np.float32]:
        """The vector f32 (blocks*256,); raises Truncated while chunks are missing."""
        self._cover.require()
        return self._vector

    @property
    def digest(self) -> int:
        """``vector_digest`` of the vector; raises Truncated while chunks are missing."""
        self._cover.require()
        return self._hash.intdigest()

    def add(
        self, header: ChunkHeader, packed: bytes | memoryview, checksum: int | None = None
    ) -> bool:
        """Take in one chunk and return whether all are here; raises as ``PlaneAssembler.add``.

        ``checksum`` is one that the caller has compared, of all chunks of a vector or of none: it
        tells this chunk from another one.
        """
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(packed)
        if self._cover.lacks(header, checksum):
            first = header.first_block * BLOCK
            stop = first + header.blocks * BLOCK
            _decode_into(header, packed, self._vector[first:stop])
            self._cover.note(header, checksum)
            self._decoded[first] = stop
            self._hash_on()
        return self._cover.complete

    def _hash_on(self) -> None:
        """Hash each chunk before which nothing is missing any more."""
        while (stop := self._decoded.pop(self._hashed, None)) is not None:
            self._hash.update(_little_endian(self._vector[self._hashed : stop]))
            self._hashed = stop


def _little_endian(x: NDArray[np.float32]) -> memoryview:
    return np.ascontiguousarray(x, np.dtype("<f4")).data


def _sections(scheme: str) -> tuple[Section, ...]:
    kind = scheme_of(scheme)
    return SECTIONS.get(scheme) or (_SCALES, Section(0, kind.code_bytes, Packing.ENTROPY))


def _chunks(
    scheme: str, blocks: int, chunk_bytes: int, cut: Callable[[int, int], Planes]
) -> Iterator[Chunk]:
    size = blocks_per_chunk(scheme, chunk_bytes)
    count = -(-blocks // size)
    for index in range(count):
        first, stop = index * size, min((index + 1) * size, blocks)
        packed = _pack(scheme, cut(first, stop))
        raw = raw_bytes(scheme, stop - first)
        yield Chunk(index, count, first, stop - first, scheme, raw, packed)


def _pack(scheme: str, planes: Planes) -> bytes:
    parts: list[bytes] = []
    for section in _sections(scheme):
        data = compress(np.ascontiguousarray(section.of(planes)), section.packing)
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _split(header: ChunkHeader, packed: bytes | memoryview) -> list[memoryview]:
    """Return the sections of a chunk as views, once every size in it agrees with the others."""
    sections = _sections(header.scheme)
    if header.raw_bytes != raw_bytes(header.scheme, header.blocks):
        msg = f"{header.raw_bytes} bytes are not {header.blocks} blocks of {header.scheme}."
        raise Corrupt(msg)
    if len(packed) > packed_bound(header.scheme, header.blocks):
        msg = f"{len(packed)} bytes are more than {header.blocks} blocks can take."
        raise Oversized(msg)
    rest, found = memoryview(packed), list[memoryview]()
    for section in sections:
        if len(rest) < _LENGTH.size:
            msg = "The payload ends before its last section."
            raise Truncated(msg)
        (size,) = _LENGTH.unpack_from(rest)
        rest = rest[_LENGTH.size :]
        if size > min(len(rest), section.bytes_per_block * header.blocks):
            msg = f"A section of {size} bytes is longer than what is left of the payload."
            raise Truncated(msg)
        found.append(rest[:size])
        rest = rest[size:]
    if rest:
        msg = f"{len(rest)} bytes follow the last section."
        raise Corrupt(msg)
    return found


def _decode_into(header: ChunkHeader, packed: bytes | memoryview, out: NDArray[np.float32]) -> None:
    """Decode one chunk into f32 (blocks*256,); raises as ``unpack``.

    Where the sections are the bytes of each element, highest first, they are joined as they come:
    laid out as planes first, the global state would take half as long again.
    """
    codec = decoder(header.scheme)
    if scheme_of(header.scheme).has_scales:
        codec.dequantise(header.scheme, unpack(header, packed), out)
        return
    sections = zip(_sections(header.scheme), _split(header, packed), strict=True)
    codec.join([_plane(section, data, out.size) for section, data in sections], out)


def _plane(section: Section, packed: memoryview, size: int) -> NDArray[np.uint8]:
    """Return one byte of each element u8 (size,): a view where it is stored as it is."""
    if len(packed) == size:
        return np.frombuffer(packed, np.uint8)
    plane = np.empty(size, np.uint8)
    decompress(packed, section.packing, plane)
    return plane


def _unpack_into(scheme: str, packed: list[memoryview], out: Planes) -> None:
    """Decompress the sections of a chunk into planes of exactly its blocks."""
    for section, data in zip(_sections(scheme), packed, strict=True):
        target = section.of(out)
        if target.flags.c_contiguous:
            decompress(data, section.packing, target)
            continue
        whole = np.empty(target.shape, np.uint8)
        decompress(data, section.packing, whole)
        target[:] = whole
    kind = scheme_of(scheme)
    if kind.has_scales and int(out.scales.max(initial=0)) > kind.scale_ceiling:
        msg = "A scale is negative, not finite, or too large to decode."
        raise Corrupt(msg)
