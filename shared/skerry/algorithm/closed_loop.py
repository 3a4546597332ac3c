"""The global fragment that learners start from, sent on as quantised differences.

``G(v+1) = round(G(v) + dec(q(X(v+1) - G(v))))``: X is the syncer's f32 master, q a quantisation
scheme, and round that of the run's global scheme, in which G is held. What quantisation and
rounding leave out stays in ``X - G`` and is sent with the next difference, so errors never add up
(error feedback, arXiv 1809.07599, around the whole loop). Every backend computes the same bits: one
f32 addition, and rounding to nearest even.

What one difference leaves out is in the master, and not in what learners train on: of a large
change, few bits leave out too much where few rounds follow. ``AUTO`` is the scheme of the fewest
bits that a change of that size allows.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm.backend import cpu, decoder
from skerry.algorithm.blocks import peaks
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import VECTORS, allocate, as_blocks
from skerry.algorithm.schemes import DELTAS, SCHEMES
from skerry.errors import Diverged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.planes import Planes

    Vector = NDArray[np.float32]

AUTO = "auto"
LEFT_OUT = 2.0**-7
"""What ``AUTO`` may leave out of an element, as a share of the largest in its block: four times
what rounding to bf16 leaves out of that one."""
PASS_BLOCKS = 256
"""Blocks in one pass: 256 KiB of f32, which stays in cache."""


class Delta(NamedTuple):
    """What leads from one version to the next: planes in a scheme."""

    scheme: str
    planes: Planes


class Version(NamedTuple):
    """A version of a global fragment: G in the global scheme, and decoded f32 (padded_size,).

    ``delta`` leads to it from the version before; None where none does.
    """

    held: Planes
    vector: Vector
    delta: Delta | None


def follow(global_scheme: str, delta_scheme: str, held: Planes | None, master: Vector) -> Version:
    """Return the next version of a global fragment; ``held`` is the one before, and is changed.

    It begins again with the master, rounded, where the version before is not known, and where the
    delta scheme is ``none``.
    """
    if held is not None and delta_scheme != "none":
        change = difference(global_scheme, held, master)
        with suppress(Diverged):  # two vectors so large that no f32 holds their difference
            chosen = delta_scheme
            if delta_scheme == AUTO:
                chosen = fewest_bits(relative_change(change, master))
            delta = Delta(chosen, cpu().quantise(chosen, change))
            cpu().dequantise(*delta, change)
            advance(global_scheme, held, change)
            return Version(held, change, delta)
    held = begin(global_scheme, master)
    return Version(held, decoder(global_scheme).dequantise(global_scheme, held), None)


def fewest_bits(changed: float) -> str:
    """Return the delta scheme of the fewest bits for a ``relative_change``, 0 to 1."""
    return next(n for n in DELTAS if SCHEMES[n].relative_error * changed <= LEFT_OUT)


def relative_change(change: Vector, master: Vector) -> float:
    """Return the largest change over the largest parameter of a block, at most 1, its RMS.

    The sum has one order, so that whoever replays a commit finds the same scheme.
    """
    moved, whole = (peaks(as_blocks(x)).view(np.float32) for x in (change, master))
    with np.errstate(over="ignore", invalid="ignore"):
        share = np.divide(moved, whole, out=(moved > 0).astype(np.float32), where=whole > 0)
    squares = np.fmin(share, np.float32(1)).astype(np.float64) ** 2
    return math.sqrt(np.cumsum(squares)[-1] / squares.size) if squares.size else 0.0


def begin(scheme: str, vector: Vector, ranges: Sequence[range] | None = None) -> Planes:
    """Return G of a vector f32 (padded_size,); ``ranges`` are the blocks that are there."""
    if ranges is None:
        return cpu().quantise(scheme, vector)
    planes = allocate(scheme, vector.size // BLOCK)
    for blocks in _passes(ranges):
        part = cpu().quantise(scheme, vector[blocks.start * BLOCK : blocks.stop * BLOCK])
        planes.codes[blocks] = part.codes
    return planes


def difference(scheme: str, held: Planes, master: Vector) -> Vector:
    """Return ``X - G``, f32 (padded_size,): what is to be quantised and sent."""
    out = VECTORS.empty(master.size)
    codec = decoder(scheme)
    for blocks in _passes([range(held.codes.shape[0])]):
        at = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        codec.dequantise(scheme, held.part(blocks), out[at])
        with np.errstate(over="ignore"):
            np.subtract(master[at], out[at], out=out[at])
    return out


def advance(
    scheme: str, held: Planes, change: Vector, ranges: Sequence[range] | None = None
) -> None:
    """Add a decoded difference to G, in place; ``change`` becomes the new G, f32 (padded_size,).

    ``ranges`` are the blocks that are held; None: all of them. Raises Diverged where the sum is not
    finite, which leaves both vectors half done.
    """
    codec, reader = cpu(), decoder(scheme)
    for blocks in _passes([range(held.codes.shape[0])] if ranges is None else ranges):
        at = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        into, own = change[at], held.part(blocks)
        with np.errstate(over="ignore"):
            into += reader.dequantise(scheme, own)
        own.codes[:] = codec.quantise(scheme, into).codes
        reader.dequantise(scheme, own, into)


def _passes(ranges: Sequence[range]) -> Iterator[slice]:
    for blocks in ranges:
        for first in range(blocks.start, blocks.stop, PASS_BLOCKS):
            yield slice(first, min(first + PASS_BLOCKS, blocks.stop))
