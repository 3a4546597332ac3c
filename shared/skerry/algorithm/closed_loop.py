"""The global fragment that learners start from, sent on as quantised differences.

``G(v+1) = round(G(v) + dec(q(X(v+1) - G(v))))``: X is the syncer's f32 master, q a quantisation
scheme, and round that of the run's global scheme, in which G is held. What quantisation and
rounding leave out stays in ``X - G`` and is sent with the next difference, so errors never add up
(error feedback, arXiv 1809.07599, around the whole loop). Every backend computes the same bits: one
f32 addition, and rounding to nearest even.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm.backend import cpu, decoder
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import VECTORS, allocate
from skerry.errors import Diverged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.planes import Planes

    Vector = NDArray[np.float32]

PASS_BLOCKS = 256
"""Blocks in one pass: 256 KiB of f32, which stays in cache."""


class Version(NamedTuple):
    """A version of a global fragment: G in the global scheme, and decoded f32 (padded_size,).

    ``delta`` are the planes that lead to it from the version before; None where none does.
    """

    held: Planes
    vector: Vector
    delta: Planes | None


def follow(global_scheme: str, delta_scheme: str, held: Planes | None, master: Vector) -> Version:
    """Return the next version of a global fragment; ``held`` is the one before, and is changed.

    It begins again with the master, rounded, where the version before is not known, and where the
    delta scheme is ``none``.
    """
    if held is not None and delta_scheme != "none":
        change = difference(global_scheme, held, master)
        with suppress(Diverged):  # two vectors so large that no f32 holds their difference
            delta = cpu().quantise(delta_scheme, change)
            cpu().dequantise(delta_scheme, delta, change)
            advance(global_scheme, held, change)
            return Version(held, change, delta)
    held = begin(global_scheme, master)
    return Version(held, decoder(global_scheme).dequantise(global_scheme, held), None)


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
