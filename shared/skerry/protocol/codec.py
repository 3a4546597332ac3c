"""The payload codec: quantised planes to chunks of packed bytes and back.

A fragment's planes are cut into chunks of whole blocks that stand alone, so that any of them can be
decoded in any order and memory stays flat. The packed bytes of a chunk are its sections, one after
another, each a little-endian u32 length and that many bytes; ``SECTIONS`` says which. Measured bits
per parameter, on Gaussian blocks and chunks of 512 KiB: int2 1.57, int4 3.33,
e3m0 3.52, int5 4.43, int6 5.47, int8 7.50, bf16 11.1, f32 28.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.backend import decoder
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import Planes, allocate
from skerry.algorithm.schemes import raw_bytes, scheme_of
from skerry.errors import Corrupt, Truncated
from skerry.protocol.lossless import Packing, compress, decompress
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
    **{
        name: (
            _SCALES,
            Section(0, BLOCK // 2, Packing.ENTROPY),
            Section(BLOCK // 2, scheme_of(name).code_bytes, Packing.STORED),
        )
        for name in ("int8", "int6", "int5")
    },
}
"""How a scheme is laid out on the wire; one that is not here packs its scales, then its codes.

Low bits and the bytes of a mantissa are noise: no compressor sees them. A byte plane of its own
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


@dataclass(frozen=True, slots=True)
class Shares:
    """Which blocks each of several senders has of one vector: ranges of blocks, ascending.

    ``mine`` is the index of the sender whose planes are packed here.
    """

    ranges: tuple[tuple[range, ...], ...]
    mine: int

    def chunks(self, size: int) -> tuple[int, int, list[range]]:
        """Return the index of our first chunk, the number of all chunks, and ours, by blocks."""
        cuts = [[cut for one in own for cut in _cut(one, size)] for own in self.ranges]
        before = sum(len(own) for own in cuts[: self.mine])
        return before, sum(map(len, cuts)), cuts[self.mine]


def _cut(blocks: range, size: int) -> Iterator[range]:
    for first in range(blocks.start, blocks.stop, size):
        yield range(first, min(first + size, blocks.stop))


def pack(
    scheme: str, planes: Planes, chunk_bytes: int, shares: Shares | None = None
) -> Iterator[Chunk]:
    """Yield the chunks of quantised planes, each made when it is asked for.

    With ``shares`` only the chunks of the sender ``shares.mine``.
    """
    shares = shares or Shares(((range(planes.codes.shape[0]),),), 0)
    first_index, count, own = shares.chunks(blocks_per_chunk(scheme, chunk_bytes))
    for index, blocks in enumerate(own, first_index):
        first, stop = blocks.start, blocks.stop
        parts, cut = list[bytes](), planes.part(slice(first, stop))
        for section in _sections(scheme):
            data = compress(np.ascontiguousarray(section.of(cut)), section.packing)
            parts += (_LENGTH.pack(len(data)), data)
        raw = raw_bytes(scheme, stop - first)
        yield Chunk(index, count, first, stop - first, scheme, raw, b"".join(parts))


def unpack(header: ChunkHeader, packed: bytes | memoryview) -> Planes:
    """Return the planes of one chunk; raises Truncated, Corrupt or UnknownScheme.

    ``header.blocks`` decides what is allocated: ``chunks.unseal`` checks it against the plan first.
    """
    planes = allocate(header.scheme, header.blocks)
    unpack_into(header, packed, planes)
    return planes


def unpack_into(header: ChunkHeader, packed: bytes | memoryview, out: Planes) -> None:
    """Decompress a chunk into planes of exactly its blocks; raises as ``unpack``."""
    for section, data in _split(header, packed):
        target = section.of(out)
        if target.flags.c_contiguous:
            decompress(data, section.packing, target)
            continue
        whole = np.empty(target.shape, np.uint8)
        decompress(data, section.packing, whole)
        target[:] = whole
    kind = scheme_of(header.scheme)
    if kind.has_scales and int(out.scales.max(initial=0)) > kind.scale_ceiling:
        msg = "A scale is negative, not finite, or too large to decode."
        raise Corrupt(msg)


def decode_into(header: ChunkHeader, packed: bytes | memoryview, out: NDArray[np.float32]) -> None:
    """Decode one chunk into f32 (blocks*256,); raises as ``unpack``.

    Without scales the sections are the bytes of each element, highest first, and are joined as they
    come: laid out as planes first, the global state would take half as long again.
    """
    codec = decoder(header.scheme)
    if scheme_of(header.scheme).has_scales:
        codec.dequantise(header.scheme, unpack(header, packed), out)
        return
    planes: list[NDArray[np.uint8]] = []
    for section, data in _split(header, packed):
        if len(data) == out.size:  # stored as it is
            planes.append(np.frombuffer(data, np.uint8))
            continue
        planes.append(np.empty(out.size, np.uint8))
        decompress(data, section.packing, planes[-1])
    codec.join(planes, out)


def _sections(scheme: str) -> tuple[Section, ...]:
    kind = scheme_of(scheme)
    return SECTIONS.get(scheme) or (_SCALES, Section(0, kind.code_bytes, Packing.ENTROPY))


def _split(header: ChunkHeader, packed: bytes | memoryview) -> list[tuple[Section, memoryview]]:
    """Return the sections of a chunk as views, once every size in it agrees with the others."""
    rest, found = memoryview(packed), list[tuple[Section, memoryview]]()
    for section in _sections(header.scheme):
        if len(rest) < _LENGTH.size:
            msg = "The payload ends before its last section."
            raise Truncated(msg)
        (size,) = _LENGTH.unpack_from(rest)
        rest = rest[_LENGTH.size :]
        if size > min(len(rest), section.bytes_per_block * header.blocks):
            msg = f"A section of {size} bytes is longer than what is left of the payload."
            raise Truncated(msg)
        found.append((section, rest[:size]))
        rest = rest[size:]
    if rest:
        msg = f"{len(rest)} bytes follow the last section."
        raise Corrupt(msg)
    return found
