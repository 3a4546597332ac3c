"""Quantised vectors: their two planes of bytes, and the checks that every backend makes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm.blocks import INF_BITS, MAGNITUDE
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import scheme_of
from skerry.errors import Diverged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.schemes import Scheme

LEAST_ELEMENTS = 256 * 1024
"""Smaller vectors come from malloc, which keeps what is freed by itself."""
MOST_IDLE = 2
"""Freed vectors that are kept: a learner reads two fragments at a time."""
MOST_IDLE_PLANES = 8
"""Freed planes that are kept: a syncer frees all contributions to a fragment at once."""
ALIGNED_BYTES = 64
"""Alignment of a vector: JAX uses memory aligned like this in place, and copies any other."""


class Planes(NamedTuple):
    """A quantised vector: codes u8 (blocks, code_bytes), scales u16 bf16 bits (blocks,) or (0,)."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint16]

    def part(self, blocks: slice) -> Planes:
        """Return a view of some of the blocks."""
        return Planes(self.codes[blocks], self.scales[blocks] if self.scales.size else self.scales)


def allocate(scheme: str, blocks: int) -> Planes:
    """Return planes for ``blocks`` blocks with undefined contents."""
    kind = scheme_of(scheme)
    codes = PLANES.empty(blocks * kind.code_bytes // 4).view(np.uint8)
    scales = np.empty(blocks if kind.has_scales else 0, np.uint16)
    return Planes(codes.reshape(blocks, kind.code_bytes), scales)


def exact(x: NDArray[np.float32]) -> Planes:
    """Return the planes of a padded vector f32 (blocks*256,) in scheme ``f32``: a view of it."""
    return Planes(as_blocks(x).view(np.uint8), np.empty(0, np.uint16))


def diverged() -> Diverged:
    """Return the error for a vector that holds NaN or infinity."""
    return Diverged("a vector to be quantised holds NaN or infinity; lower the learning rate")


def as_blocks(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """View a contiguous f32 vector (blocks*256,) as (blocks, 256); else raises ValueError."""
    if x.dtype != np.float32 or x.ndim != 1 or x.size % BLOCK or not x.flags.c_contiguous:
        msg = f"expected contiguous f32 in whole blocks of {BLOCK}, got {x.dtype} {x.shape}"
        raise ValueError(msg)
    return x.reshape(-1, BLOCK)


def check_planes(scheme: str, planes: Planes, out: NDArray[np.float32] | None) -> Scheme:
    """Check shapes and dtypes of ``planes`` (and ``out``) against the scheme; else ValueError."""
    kind = scheme_of(scheme)
    codes, scales = planes
    blocks = codes.shape[0]
    shaped = codes.shape[1:] == (kind.code_bytes,) and scales.shape == (blocks * kind.has_scales,)
    typed = codes.dtype == np.uint8 and scales.dtype == np.uint16
    if not (shaped and typed and codes.flags.c_contiguous and scales.flags.c_contiguous):
        msg = (
            f"codes {codes.dtype} {codes.shape}, scales {scales.dtype} {scales.shape}: no {scheme}"
        )
        raise ValueError(msg)
    if out is not None and as_blocks(out).shape[0] != blocks:
        msg = f"an output of {out.size} elements does not hold {blocks} blocks"
        raise ValueError(msg)
    return kind


def check_joined(planes: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
    """Check that byte planes u8 (n,) make up f32 ``out`` (n,); else raises ValueError."""
    if not 0 < len(planes) <= 4 or any(plane.shape != out.shape for plane in planes):
        msg = f"planes of {[plane.size for plane in planes]} bytes do not make {out.size} f32"
        raise ValueError(msg)


def peak(scheme: str, planes: Planes) -> float:
    """Return a bound on every magnitude that planes decode to; infinity if one is not finite.

    Without scales it is the largest magnitude itself, with them what the largest scale allows.
    """
    kind = scheme_of(scheme)
    if scheme == "f32":
        bits = int((planes.codes.view(np.uint32) & MAGNITUDE).max(initial=0))
    else:  # bf16 bits: the codes of scheme bf16, the scales of all others
        halves = planes.scales if kind.has_scales else planes.codes.view(np.uint16)
        bits = int((halves & np.uint16(MAGNITUDE >> 16)).max(initial=0)) << 16
    if bits >= INF_BITS:
        return math.inf
    return float(np.uint32(bits).view(np.float32)) * max(1, kind.levels)


class Vectors:
    """Memory for vectors, used again once the vector that lay in it is freed.

    The first touch of a page costs time, and much of it where the host of a virtual machine takes
    back free memory: 88 MB took 240 ms there, and 6 ms when they had been in use a moment before.
    Any thread may ask for a vector, and any may free it.
    """

    def __init__(self, most_idle: int = MOST_IDLE, slack: float = 2.0) -> None:
        """Keep memory of ``most_idle`` vectors at most, for vectors up to ``slack`` times smaller.

        When none fits, the memory that has waited longest is freed.
        """
        self._idle: deque[NDArray[np.uint8]] = deque(maxlen=most_idle)
        self._slack = slack

    def empty(self, size: int) -> NDArray[np.float32]:
        """Return an f32 vector (size,) with undefined contents."""
        if size < LEAST_ELEMENTS:
            return np.empty(size, np.float32)
        memory = self._idle_for(4 * size)
        if memory is None:
            memory = np.empty(4 * size + ALIGNED_BYTES, np.uint8)
            # Otherwise memory of a rare size is kept for ever: 4 bytes a parameter after genesis.
            with contextlib.suppress(IndexError):
                self._idle.popleft()
        start = -memory.ctypes.data % ALIGNED_BYTES
        # Through a memoryview: numpy would make views of views hold the memory, and not the vector.
        vector = np.frombuffer(memory.data, np.float32, size, start)
        weakref.finalize(vector, self._idle.append, memory).atexit = False
        return vector

    def _idle_for(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Take the most recently freed memory that is large enough, and not too large."""
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.pop()
            except IndexError:
                return None
            if nbytes <= memory.nbytes - ALIGNED_BYTES <= self._slack * nbytes:
                return memory
            self._idle.appendleft(memory)
        return None


VECTORS = Vectors()
"""Memory for the vectors of this process."""
PLANES = Vectors(MOST_IDLE_PLANES, 1.25)
"""Memory for planes, with little slack: those of global fragments stay for long."""
