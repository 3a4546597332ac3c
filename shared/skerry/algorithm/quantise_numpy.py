"""Quantisation of padded vectors in numpy: the reference, and the backend without numba."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.blocks import ARITHMETIC, INF_BITS, peaks, widened
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import (
    Planes,
    allocate,
    as_blocks,
    check_joined,
    check_planes,
    diverged,
)
from skerry.algorithm.schemes import scheme_of

_CHUNK = 256
"""Blocks per pass: 256 KiB of f32, which stays in cache."""


def quantise(scheme: str, x: NDArray[np.float32]) -> Planes:
    """Quantise a padded vector f32 (blocks*256,); raises Diverged if anything is not finite."""
    kind, encode = scheme_of(scheme), ARITHMETIC[scheme].encode
    rows = as_blocks(x)
    planes = allocate(scheme, rows.shape[0])
    for part in _parts(rows.shape[0]):
        peak = peaks(rows[part])
        if bool((peak >= INF_BITS).any()):
            raise diverged()
        codes, scales = encode(np, kind, rows[part], peak)
        planes.codes[part] = codes
        if scales is not None:
            planes.scales[part] = scales
    return planes


def dequantise(
    scheme: str, planes: Planes, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Decode planes to f32 (blocks*256,), into ``out`` if given; ValueError on wrong shapes."""
    kind, decode = check_planes(scheme, planes, out), ARITHMETIC[scheme].decode
    blocks = planes.codes.shape[0]
    vector = np.empty(blocks * BLOCK, np.float32) if out is None else out
    rows = as_blocks(vector)
    for part in _parts(blocks):
        pieces = decode(np, planes.codes[part])
        width = BLOCK // len(pieces)
        for number, piece in enumerate(pieces):
            target = rows[part, number * width : (number + 1) * width]
            if kind.has_scales:
                scales = widened(planes.scales[part])[:, None]
                np.multiply(scales, piece, out=target, dtype=np.float32)
            else:
                target[:] = piece
    return vector


def join(planes: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
    """Put f32 (n,) together from its byte planes u8 (n,), the highest first.

    Bytes that are not given are zero. Raises ValueError if a plane is of another length.
    """
    check_joined(planes, out)
    words = out.view(np.uint32)
    np.left_shift(planes[0], 24, out=words, dtype=np.uint32)
    for number, plane in enumerate(planes[1:], start=1):
        words |= np.left_shift(plane, 24 - 8 * number, dtype=np.uint32)


def step_towards(
    global_scheme: str,
    delta_scheme: str,
    held: Planes,
    master: NDArray[np.float32],
    delta: Planes,
    out: NDArray[np.float32],
) -> None:
    """Advance G, as its planes ``held``, towards a master f32 (blocks*256,) by a quantised delta.

    Writes the difference to ``delta`` and the new G, decoded, to ``out``. Raises Diverged where
    either is not finite, which leaves all three half done.
    """
    with np.errstate(over="ignore"):
        change = quantise(delta_scheme, master - dequantise(global_scheme, held, out))
        dequantise(delta_scheme, change, out)
        out += dequantise(global_scheme, held)
    for target, planes in ((delta, change), (held, quantise(global_scheme, out))):
        target.codes[:], target.scales[:] = planes
    dequantise(global_scheme, held, out)


def advance(scheme: str, held: Planes, change: NDArray[np.float32]) -> None:
    """Add a decoded difference f32 (blocks*256,) to G's planes; ``change`` becomes the new G.

    Raises Diverged where the sum is not finite, which leaves both half done.
    """
    with np.errstate(over="ignore"):
        change += dequantise(scheme, held)
    held.codes[:] = quantise(scheme, change).codes
    dequantise(scheme, held, change)


def changes(
    global_scheme: str, held: Planes, master: NDArray[np.float32], every: int
) -> NDArray[np.float32]:
    """Return the largest change over the largest parameter of each ``every``-th block, at most 1.

    The change is a master f32 (blocks*256,) less G, as its planes ``held``.
    """
    rows, some = as_blocks(master)[::every], held.part(slice(None, None, every))
    shares = np.empty(len(rows), np.float32)
    for part in _parts(len(rows)):
        own = Planes(np.ascontiguousarray(some.codes[part]), some.scales[part].copy())
        with np.errstate(over="ignore", invalid="ignore"):
            change = rows[part] - as_blocks(dequantise(global_scheme, own))
            moved, whole = (peaks(x).view(np.float32) for x in (change, rows[part]))
            share = np.divide(moved, whole, out=(moved > 0).astype(np.float32), where=whole > 0)
        shares[part] = np.fmin(share, np.float32(1))
    return shares


def _parts(blocks: int) -> Iterator[slice]:
    for first in range(0, blocks, _CHUNK):
        yield slice(first, first + _CHUNK)
