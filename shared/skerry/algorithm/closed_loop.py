"""The global fragment that learners start from, sent on as quantised differences.

``G(v+1) = round(G(v) + dec(q(X(v+1) - G(v))))``: X is the syncer's f32 master, q a quantisation
scheme, and round that of the run's global scheme, in which G is held. What quantisation and
rounding leave out stays in ``X - G`` and is sent with the next difference, so errors never add up
(error feedback, arXiv 1809.07599, around the whole loop). Every backend computes the same bits: one
f32 addition, and rounding to nearest even.

Learners train without what a difference leaves out until a later one sends it. Few bits would
leave out too much of a large change if few rounds follow, so ``AUTO`` chooses for each change the
scheme of the fewest bits that its size allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu, decoder
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import Planes, allocate
from skerry.algorithm.schemes import AUTO, DELTAS, SCHEMES
from skerry.errors import Diverged

Vector = NDArray[np.float32]

LEFT_OUT = 2.0**-7
"""What ``AUTO`` may leave out of an element, as a share of the largest in its block: twice what
rounding to bf16 may leave out of the largest."""
SAMPLED_BLOCKS = 4096
"""Blocks, at least, in which the change of a larger fragment is measured."""
HASHED_BLOCKS = 1024
"""Blocks per call of a kernel and of a hash."""
PASS_BLOCKS = 256
"""Blocks in one pass: 256 KiB of f32, which stays in cache."""


class Delta(NamedTuple):
    """The quantised difference between one version and the next."""

    scheme: str
    planes: Planes


class Version(NamedTuple):
    """A version of a global fragment: G in the global scheme, and the hash of its f32.

    ``delta`` leads to it from the version before, unless it is None.
    """

    held: Planes
    digest: int
    delta: Delta | None


class Hash(Protocol):
    """A hash of a vector that is given piece by piece, as ``skerry.protocol.chunks.VectorHash``."""

    def update(self, x: Vector) -> None: ...
    def digest(self) -> int: ...


def follow(
    global_scheme: str,
    delta_scheme: str,
    held: Planes | None,
    master: Vector,
    new_hash: Callable[[], Hash],
) -> Version:
    """Return the next version of a global fragment; ``held`` is the one before, and is overwritten.

    If ``held`` is None, the delta scheme is ``none``, or no f32 holds the difference, the version
    is the rounded master, without a delta. No f32 vector of the fragment's length is made.
    """
    spare = np.empty(min(HASHED_BLOCKS * BLOCK, master.size), np.float32)
    if held is not None and delta_scheme != "none":
        chosen = delta_scheme
        if delta_scheme == AUTO:
            chosen = fewest_bits(relative_change(global_scheme, held, master))
        delta, found = Delta(chosen, allocate(chosen, master.size // BLOCK)), new_hash()
        with suppress(Diverged):  # two vectors so large that no f32 holds their difference
            for blocks, at in _pieces([range(master.size // BLOCK)], HASHED_BLOCKS):
                out, own = spare[: at.stop - at.start], held.part(blocks)
                into = delta.planes.part(blocks)
                cpu().step_towards(global_scheme, chosen, own, master[at], into, out)
                found.update(out)
            return Version(held, found.digest(), delta)
    held, found = begin(global_scheme, master), new_hash()
    for blocks, at in _pieces([range(master.size // BLOCK)], HASHED_BLOCKS):
        out = spare[: at.stop - at.start]
        found.update(decoder(global_scheme).dequantise(global_scheme, held.part(blocks), out))
    return Version(held, found.digest(), None)


def fewest_bits(changed: float) -> str:
    """Return the delta scheme of the fewest bits for a ``relative_change``, 0 to 1."""
    return next(n for n in DELTAS if SCHEMES[n].relative_error * changed <= LEFT_OUT)


def relative_change(scheme: str, held: Planes, master: Vector) -> float:
    """Return the RMS over blocks of the largest change over the largest parameter, at most 1.

    Only some blocks of a large fragment are measured. The sum has a fixed order, so that a replay
    of a commit finds the same scheme.
    """
    every = max(1, held.codes.shape[0] // SAMPLED_BLOCKS)
    squares = cpu().changes(scheme, held, master, every).astype(np.float64) ** 2
    return math.sqrt(np.cumsum(squares)[-1] / squares.size) if squares.size else 0.0


def begin(scheme: str, vector: Vector, ranges: Sequence[range] | None = None) -> Planes:
    """Return G of a vector f32 (padded_size,); ``ranges`` are the blocks it holds (None: all)."""
    if ranges is None:
        return cpu().quantise(scheme, vector)
    planes = allocate(scheme, vector.size // BLOCK)
    for blocks, at in _pieces(ranges, PASS_BLOCKS):
        planes.codes[blocks] = cpu().quantise(scheme, vector[at]).codes
    return planes


def advance(
    scheme: str,
    held: Planes,
    change: Vector,
    ranges: Sequence[range] | None = None,
    found: Hash | None = None,
) -> None:
    """Add a decoded difference to G, in place; ``change`` becomes the new G, f32 (padded_size,).

    ``ranges`` are the blocks that are held; None: all of them. ``found`` is given the new G. Raises
    Diverged where the sum is not finite, which leaves both vectors half done.
    """
    own = [range(held.codes.shape[0])] if ranges is None else ranges
    for blocks, at in _pieces(own, HASHED_BLOCKS):
        cpu().advance(scheme, held.part(blocks), change[at])
        if found is not None:
            found.update(change[at])


def _pieces(ranges: Sequence[range], most: int) -> Iterator[tuple[slice, slice]]:
    """Yield each piece of at most ``most`` blocks as slices of blocks and of elements."""
    for blocks in ranges:
        for first in range(blocks.start, blocks.stop, most):
            stop = min(first + most, blocks.stop)
            yield slice(first, stop), slice(first * BLOCK, stop * BLOCK)
