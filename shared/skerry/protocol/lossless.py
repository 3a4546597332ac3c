# pyright: basic
"""The lossless stage: the one place that calls blosc2, and that never believes what it reads.

blosc2 writes as many bytes as a compressed buffer's own header says, whatever the destination
holds, and lets that header choose the codec and the filters. So a buffer is decompressed only if
its 32-byte header is, byte for byte, one that ``compress`` itself makes for that size; the rest of
it is bounds-checked by blosc2 against that header. What does not shrink is stored as it is, which
its length tells.

zstd's entropy coder gains 17 % on packed nibbles, and 66 % on the plane of bf16's high bytes;
higher levels only cost time, lz4 and blosclz gain nothing, bitshuffle loses it all. What repeats in
such a plane repeats by chance: references to it cost more bits than they save, and twice the time
to write and to read. blosc2 cannot tell zstd to look for fewer of them, so that bytes that are not
shuffled are compressed by zstd itself and laid out here as blosc2 lays them out, for any blosc2 to
read.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any, cast

import blosc2

from skerry.errors import Corrupt

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd  # pyright: ignore[reportMissingImports] - 3.14 does without it

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

STORED = 0
"""The ``typesize`` of bytes that are never worth compressing."""

_BLOCKSIZE = 1024 * 1024
"""Pinned, because blosc2 would choose it by this machine's cache: equal input, equal bytes, where
zstd is of the same release."""
_HEADER = struct.Struct("<4B3I6B2B6B2B")
_FORMAT, _ZSTD_FORMAT, _ZSTD, _SHUFFLE = 5, 1, 5, 1
_FLAGS, _ALL_ZERO = 0x95, 0x10
_WORD = struct.Struct("<I")
_ENTROPY: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.strategy: zstd.Strategy.fast,
    zstd.CompressionParameter.hash_log: 6,
    zstd.CompressionParameter.min_match: 7,
}
"""The least search that zstd has: it still finds runs, and little else."""

blosc2.set_releasegil(True)


def compress(data: NDArray[np.uint8], typesize: int) -> bytes:
    """Return ``data`` (contiguous u8) compressed, or as it is where that is not smaller.

    ``typesize`` is the width that bytes are shuffled by; 1 means no shuffle, STORED no attempt.
    Runs on the calling thread alone and releases the GIL.
    """
    if typesize == STORED or data.nbytes <= _HEADER.size:
        return data.tobytes()
    packed = _shuffled(data, typesize) if typesize > 1 else _entropy_coded(data)
    if len(packed) >= data.nbytes or not _is_ours(packed, typesize, data.nbytes):
        return data.tobytes()
    return packed


def decompress(packed: memoryview, typesize: int, out: NDArray[np.uint8]) -> None:
    """Fill ``out`` (contiguous u8) exactly; raises Corrupt, and never writes outside of it."""
    if len(packed) == out.nbytes:
        out.data.cast("B")[:] = packed
        return
    if typesize == STORED or not _is_ours(packed, typesize, out.nbytes):
        msg = f"A payload of {len(packed)} bytes cannot be unpacked to {out.nbytes} bytes."
        raise Corrupt(msg)
    try:
        blosc2.decompress2(packed, dst=out, dparams={"nthreads": 1})
    except (ValueError, RuntimeError) as error:
        msg = "The payload does not decompress."
        raise Corrupt(msg) from error


def _shuffled(data: NDArray[np.uint8], typesize: int) -> bytes:
    settings: dict[str, Any] = {
        "typesize": typesize,
        "clevel": 1,
        "codec": blosc2.Codec.ZSTD,
        "filters": [*[blosc2.Filter.NOFILTER] * 5, blosc2.Filter.SHUFFLE],
        "filters_meta": [0] * 6,
        "splitmode": blosc2.SplitMode.NEVER_SPLIT,
        "blocksize": _BLOCKSIZE,
        "nthreads": 1,
    }
    return cast("bytes", blosc2.compress2(data, cparams=settings))


def _entropy_coded(data: NDArray[np.uint8]) -> bytes:
    """Return a blosc2 chunk: header, where each block starts, and each with its length before it.

    A block that zstd does not shrink stays as it is, which again its length tells.
    """
    if not data.any():
        return _header(1, data.nbytes, _HEADER.size, _ALL_ZERO)
    whole = data.reshape(-1).data
    blocks: list[bytes | memoryview] = []
    for first in range(0, data.nbytes, _BLOCKSIZE):
        plain = whole[first : first + _BLOCKSIZE]
        coded = zstd.compress(plain, options=_ENTROPY)
        blocks.append(coded if len(coded) < len(plain) else plain)
    starts = bytearray()
    size = _HEADER.size + _WORD.size * len(blocks)
    for block in blocks:
        starts += _WORD.pack(size)
        size += _WORD.size + len(block)
    parts: list[bytes | bytearray | memoryview] = [_header(1, data.nbytes, size, 0), starts]
    for block in blocks:
        parts += (_WORD.pack(len(block)), block)
    return b"".join(parts)


def _is_ours(packed: bytes | memoryview, typesize: int, nbytes: int) -> bool:
    """Whether the header of ``packed`` is one that ``compress`` makes for ``nbytes`` bytes."""
    if not _HEADER.size <= len(packed) < nbytes:
        return False
    head = bytes(packed[: _HEADER.size])
    return head == _header(typesize, nbytes, len(packed), 0) or (
        len(packed) == _HEADER.size and head == _header(typesize, nbytes, len(packed), _ALL_ZERO)
    )


def _header(typesize: int, nbytes: int, cbytes: int, special: int) -> bytes:
    return _HEADER.pack(
        *(_FORMAT, _ZSTD_FORMAT, _FLAGS, typesize),
        *(nbytes, min(_BLOCKSIZE, nbytes), cbytes),
        *(0, 0, 0, 0, 0, _SHUFFLE if typesize > 1 else 0),
        *(_ZSTD, 0),
        *(0, 0, 0, 0, 0, 0),
        *(0, special),
    )
