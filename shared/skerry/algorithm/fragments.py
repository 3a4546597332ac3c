"""Fragments: the parts of a parameter tree that are synchronised on their own.

A fragment travels as a *padded vector*: its slices one after another, each padded with zeros to a
whole number of blocks, so that a block never crosses a tensor and every kernel sees
``(blocks, 256)``.

Sources: Streaming DiLoCo (arXiv 2501.18512), section on streaming partial updates, for fragments;
Decoupled DiLoCo (arXiv 2604.21428), on balanced tensor fragmentation, for packing by size instead
of by layer; R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969, for the bound of LPT.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from skerry.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

BLOCK = 256


def padded(size: int, grain: int = BLOCK) -> int:
    """Return ``size`` rounded up to whole blocks, or whole grains of another size."""
    return -(-size // grain) * grain


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of the model: its path in the tree, its shape, and whether it is an embedding."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def size(self) -> int:
        """Elements; one for a scalar, none if any dimension is zero."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of leaf number ``leaf``, in row-major order."""

    leaf: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed part of the parameter tree, synchronised on its own."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Parameters, without padding."""
        return sum(s.size for s in self.slices)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The start of each slice in the padded vector, and the end of the last."""
        return tuple(accumulate((padded(s.size) for s in self.slices), initial=0))

    @property
    def padded_size(self) -> int:
        """Length of the padded vector: a multiple of BLOCK."""
        return self.offsets[-1]

    @property
    def blocks(self) -> int:
        return self.padded_size // BLOCK


@dataclass(frozen=True, slots=True)
class Plan:
    """All fragments of a model; equal leaves and P give an equal plan on every machine."""

    leaves: tuple[LeafSpec, ...]
    fragments: tuple[Fragment, ...]
    digest: int

    @property
    def parameters(self) -> int:
        """Parameters of the model, without padding."""
        return sum(leaf.size for leaf in self.leaves)


def plan(leaves: Sequence[LeafSpec], fragments: int) -> Plan:
    """Cut ``leaves`` into ``fragments`` non-empty fragments of about equal size.

    Longest processing time first: the largest piece goes to the smallest fragment so far. A leaf
    larger than an even share is cut into pieces of that share, at block boundaries (at smaller
    powers of two only if whole blocks could not fill every fragment). The largest fragment then
    exceeds the smallest by at most the largest piece, which is at most one share.

    Leaves without elements are in no fragment.

    Raises:
        PlanError: fewer than one fragment, more fragments than parameters, or an impossible shape.

    """
    _check(leaves, fragments)
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    loads = [(0, index) for index in range(fragments)]
    pieces = _pieces([leaf.size for leaf in leaves], fragments)
    for piece in sorted(pieces, key=lambda s: (-s.size, s.leaf, s.start)):
        load, index = loads[0]
        bins[index].append(piece)
        heapq.heapreplace(loads, (load + piece.size, index))
    cut = tuple(Fragment(index, _joined(slices)) for index, slices in enumerate(bins))
    return Plan(tuple(leaves), cut, _digest(leaves, cut))


def gather(fragment: Fragment, leaves: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    """Copy a fragment out of the tree: leaves of any shape and float dtype -> f32 (padded_size,).

    Raises ValueError if a leaf is smaller than the plan says.
    """
    import numpy as np  # plans are made without it

    vector = np.zeros(fragment.padded_size, dtype=np.float32)
    for piece, offset in zip(fragment.slices, fragment.offsets, strict=False):
        flat = np.reshape(leaves[piece.leaf], -1)
        vector[offset : offset + piece.size] = _window(flat, piece)
    return vector


def scatter(
    fragment: Fragment, vector: NDArray[np.float32], leaves: Sequence[NDArray[Any]]
) -> None:
    """Write f32 (padded_size,) into the tree in place; padding is dropped, dtypes are kept.

    Raises ValueError if the vector has another length, or a leaf is too small or not contiguous.
    """
    if vector.shape != (fragment.padded_size,):
        msg = f"fragment {fragment.index} needs ({fragment.padded_size},), not {vector.shape}."
        raise ValueError(msg)
    for piece, offset in zip(fragment.slices, fragment.offsets, strict=False):
        leaf = leaves[piece.leaf]
        if not leaf.flags.c_contiguous:
            msg = f"leaf {piece.leaf} is not contiguous: a write would go to a copy."
            raise ValueError(msg)
        _window(leaf.reshape(-1), piece)[:] = vector[offset : offset + piece.size]


def averaged(of: Plan, fragment: Fragment) -> tuple[bool, ...]:
    """Return for each slice whether every merge averages it, as all do with embeddings.

    Decoupled DiLoCo (arXiv 2604.21428), on merging: RDA everywhere but in the embeddings.
    """
    return tuple(of.leaves[piece.leaf].embedding for piece in fragment.slices)


def _check(leaves: Sequence[LeafSpec], fragments: int) -> None:
    for leaf in leaves:
        if any(dimension < 0 for dimension in leaf.shape):
            msg = f"Leaf {leaf.name!r} has shape {leaf.shape}: no dimension may be negative."
            raise PlanError(msg, path="model")
    if fragments < 1:
        msg = f"A model cannot be cut into {fragments} fragments: set sync.fragments to 1 or more."
        raise PlanError(msg, path="sync.fragments")
    parameters = sum(leaf.size for leaf in leaves)
    if fragments > parameters:
        msg = (
            f"{fragments} fragments are more than the model's {parameters} parameters: "
            f"set sync.fragments to at most {parameters}."
        )
        raise PlanError(msg, path="sync.fragments")


def _pieces(sizes: Sequence[int], fragments: int) -> list[Slice]:
    """Cut leaves that exceed an even share, then the largest pieces, until there are enough."""
    grain = BLOCK
    while sum(-(-size // grain) for size in sizes) < fragments:
        grain //= 2
    share = padded(-(-sum(sizes) // fragments), grain)
    pieces = [
        Slice(leaf, start, min(start + share, size))
        for leaf, size in enumerate(sizes)
        for start in range(0, size, share)
    ]
    largest = [(-piece.size, piece.leaf, piece.start) for piece in pieces]
    heapq.heapify(largest)
    while len(largest) < fragments:
        negative, leaf, start = heapq.heappop(largest)
        half = padded((1 - negative) // 2, grain)
        heapq.heappush(largest, (-half, leaf, start))
        heapq.heappush(largest, (negative + half, leaf, start + half))
    return [Slice(leaf, start, start - negative) for negative, leaf, start in largest]


def _joined(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Sort by place in the tree and join neighbours."""
    joined: list[Slice] = []
    for piece in sorted(slices, key=lambda s: (s.leaf, s.start)):
        if joined and (joined[-1].leaf, joined[-1].stop) == (piece.leaf, piece.start):
            joined[-1] = Slice(piece.leaf, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def _digest(leaves: Sequence[LeafSpec], fragments: Sequence[Fragment]) -> int:
    """Return blake2b-64 over everything that two sides must agree on, as an unsigned integer."""
    content = json.dumps(
        [
            [[leaf.name, leaf.shape, leaf.embedding] for leaf in leaves],
            [[[s.leaf, s.start, s.stop] for s in fragment.slices] for fragment in fragments],
        ],
        separators=(",", ":"),
    )
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")


def _window(flat: NDArray[Any], piece: Slice) -> NDArray[Any]:
    if flat.size < piece.stop:
        msg = f"leaf {piece.leaf} has {flat.size} elements, the plan reaches {piece.stop}."
        raise ValueError(msg)
    return flat[piece.start : piece.stop]
