# pyright: basic
"""The lossless stage: the one place that calls blosc2, and that never trusts what it reads.

blosc2 writes as many bytes as a compressed buffer's own header says, whatever the destination
holds, and lets that header choose codec and filters. So a buffer is decompressed only if its header
names exactly the destination's size and is otherwise, byte for byte, one that blosc2 writes here
for a ``Packing``; blosc2 itself bounds-checks the rest of the buffer against that header. Data that
does not shrink is stored as it is, which its length shows.

Measured on Gaussian parameters (the high byte of each float, in bits per byte): zstd level 1 needs
3.1 and packs 0.3 GB/s; bit planes through LZ4 need 3.4 to 5 and pack 2 to 3 GB/s. Packed nibbles
lose 17 % to zstd's entropy coder at 1.1 GB/s; higher levels only cost time, and LZ4 gains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, NamedTuple, cast

import blosc2
import numpy as np
from numpy.typing import NDArray

from skerry.errors import Corrupt

_HEADER_BYTES = 32
_KIB = 1024

blosc2.set_releasegil(True)


class _Pipeline(NamedTuple):
    """The blosc2 parameters of a packing.

    The block size is pinned because blosc2 would choose it by this machine's cache: equal input
    gives equal bytes wherever the codec is of the same release.
    """

    codec: blosc2.Codec
    filter: blosc2.Filter
    typesize: int
    blocksize: int


class Packing(Enum):
    """How the bytes of a section are compressed."""

    STORED = None
    """Not compressed: the bytes are noise."""
    ENTROPY = _Pipeline(blosc2.Codec.ZSTD, blosc2.Filter.NOFILTER, 1, 1024 * _KIB)
    """For packed codes: few repetitions, uneven bytes."""
    PAIRS = _Pipeline(blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE, 2, 1024 * _KIB)
    """For an even number of bytes, words of two: all low bytes, then all high ones."""
    SMALL = _Pipeline(blosc2.Codec.ZSTD, blosc2.Filter.NOFILTER, 1, 128 * _KIB)
    """For bytes that travel far: the fewest bytes; in smaller blocks zstd needs 2 % fewer."""
    FAST = _Pipeline(blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE, 1, 1024 * _KIB)
    """For bytes that stay near: drops bits that are constant, many times as fast as zstd."""


def compress(data: NDArray[np.uint8], packing: Packing) -> bytes:
    """Return ``data`` (contiguous u8) compressed, or as it is where that is not smaller.

    Runs on the calling thread alone and releases the GIL.
    """
    if packing.value is None or data.nbytes <= _HEADER_BYTES:
        return data.tobytes()
    packed = _compress(data, packing.value)
    return packed if _is_trusted(packed, data.nbytes) else data.tobytes()


def decompress(packed: memoryview, packing: Packing, out: NDArray[np.uint8]) -> None:
    """Fill ``out`` (contiguous u8) exactly; never writes outside of it.

    Reads the bytes of any packing, so that a scheme can change its own.

    Raises:
        Corrupt: ``compress`` writes no such header for this size, or the data is damaged.

    """
    if len(packed) == out.nbytes:
        out.data.cast("B")[:] = packed
        return
    if packing.value is None or not _is_trusted(packed, out.nbytes):
        msg = f"A payload of {len(packed)} bytes cannot be unpacked to {out.nbytes} bytes."
        raise Corrupt(msg)
    try:
        blosc2.decompress2(packed, dst=out, dparams={"nthreads": 1})
    except (ValueError, RuntimeError) as error:
        msg = "The payload does not decompress."
        raise Corrupt(msg) from error


def _compress(data: NDArray[np.uint8], pipeline: _Pipeline) -> bytes:
    settings: dict[str, Any] = {
        "typesize": pipeline.typesize,
        "clevel": 1,
        "codec": pipeline.codec,
        "filters": [*[blosc2.Filter.NOFILTER] * 5, pipeline.filter],
        "filters_meta": [0] * 6,
        "splitmode": blosc2.SplitMode.NEVER_SPLIT,
        "blocksize": pipeline.blocksize,
        "nthreads": 1,
    }
    return cast("bytes", blosc2.compress2(data, cparams=settings))


def _is_trusted(packed: bytes | memoryview, nbytes: int) -> bool:
    """Return True if this header is one that a packing writes for ``nbytes`` bytes.

    A header whose last byte is set stands for a run of zeros, and nothing may follow it.
    """
    if not _HEADER_BYTES <= len(packed) < nbytes:
        return False
    head = bytes(packed[:_HEADER_BYTES])
    *sizes, blocksize = blosc2.get_cbuffer_sizes(head)
    known = {min(size, nbytes) for size in _blocksizes().get(_without_sizes(head), ())}
    whole = not head[-1] or len(packed) == _HEADER_BYTES
    return sizes == [nbytes, len(packed)] and blocksize in known and whole


@cache
def _blocksizes() -> Mapping[bytes, tuple[int, ...]]:
    """Return the headers, without sizes, that this blosc2 writes, and the block sizes of each."""
    sample = np.arange(4096, dtype=np.uint8) % np.uint8(5)
    found: dict[bytes, tuple[int, ...]] = {}
    for pipeline in (packing.value for packing in Packing if packing.value is not None):
        for data in (sample, np.zeros_like(sample)):
            head = _without_sizes(_compress(data, pipeline))
            found[head] = (*found.get(head, ()), pipeline.blocksize)
    return found


def _without_sizes(packed: bytes) -> bytes:
    """Return a header without nbytes, blocksize and cbytes, which are u32 from byte 4 on."""
    return packed[:4] + packed[16:_HEADER_BYTES]
