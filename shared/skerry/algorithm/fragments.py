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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from skerry.errors import PlanError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 256
MOST_SLICES = 2**16
"""The most slices of a plan: a contribution has a norm and a token count for each of its own."""

MOST_SHARDS = 1024
"""The most shards of a run: each has two streams, and a key names the subjects of each."""


def padded(size: int, grain: int = BLOCK) -> int:
    """Return ``size`` rounded up to whole blocks, or whole grains of another size."""
    return -(-size // grain) * grain


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of the model: its path in the tree, its shape, and how it is merged.

    A leaf that is not ``trainable`` is the same on every machine and in no fragment. ``unit`` is
    how many elements are one tensor to a merge, such as one expert of a stack; 0: all of them.
    """

    name: str
    shape: tuple[int, ...]
    embedding: bool = False
    trainable: bool = True
    unit: int = 0

    @property
    def size(self) -> int:
        """Elements; one for a scalar, none if any dimension is zero."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True for what Muon trains: a matrix, or a stack of experts with one matrix each.

        Embeddings, heads and routers are tables of vectors: AdamW trains them, as it does norms.
        """
        return not self.embedding and len(self.shape) == (3 if self.unit else 2)

    @property
    def units(self) -> int:
        """Number of tensors that a merge sees in this leaf."""
        return self.size // self.unit if self.unit else min(self.size, 1)


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
    """All fragments of a model; equal leaves and P give an equal plan on every machine.

    ``leaves`` are the trained ones, which ``Slice.leaf`` numbers; ``frozen`` are the others. The
    fragments are dealt to ``shards`` shards, each with streams and a syncer of its own; the digest
    does not depend on their number.
    """

    leaves: tuple[LeafSpec, ...]
    fragments: tuple[Fragment, ...]
    digest: int
    frozen: tuple[LeafSpec, ...] = ()
    shards: int = 1

    def shard_of(self, fragment: int) -> int:
        return shard_of(fragment, self.shards)

    def of_shard(self, shard: int) -> tuple[Fragment, ...]:
        return tuple(f for f in self.fragments if self.shard_of(f.index) == shard)

    @property
    def specs(self) -> tuple[LeafSpec, ...]:
        """All leaves of the model, as a run's record and a checkpoint hold them."""
        return (*self.leaves, *self.frozen)

    @property
    def largest(self) -> int:
        """Parameters of the largest fragment, padding included."""
        return max(fragment.padded_size for fragment in self.fragments)

    @property
    def parameters(self) -> int:
        """Parameters that are trained, without padding."""
        return sum(leaf.size for leaf in self.leaves)


def shard_of(fragment: int, shards: int) -> int:
    """Return the shard to which a fragment belongs: they are dealt out in turn."""
    return fragment % shards


def trainable(leaves: Iterable[LeafSpec]) -> tuple[LeafSpec, ...]:
    """Return the leaves that a plan cuts, in their order."""
    return tuple(leaf for leaf in leaves if leaf.trainable)


def plan(leaves: Sequence[LeafSpec], fragments: int, shards: int = 1) -> Plan:
    """Cut ``leaves`` into ``fragments`` non-empty fragments of about equal size, in ``shards``.

    Longest processing time first: the largest piece goes to the smallest fragment so far. A leaf
    larger than an even share is cut into pieces of that share, at block boundaries (at smaller
    powers of two only if whole blocks could not fill every fragment). The largest fragment then
    exceeds the smallest by at most the largest piece, which is at most one share. A leaf with units
    is cut between units, and inside a unit only if it is larger than a share; no slice holds
    elements of two units.

    Leaves without elements, and leaves that are not trainable, are in no fragment.

    Raises:
        PlanError: fewer than one fragment, more fragments than parameters, an impossible shape, or
            units that do not divide their leaf or are too many.

    """
    check(leaves, fragments)
    trained = trainable(leaves)
    frozen = tuple(leaf for leaf in leaves if not leaf.trainable)
    bins: list[list[Slice]] = [[] for _ in range(fragments)]
    loads = [(0, index) for index in range(fragments)]
    pieces = _pieces(trained, fragments)
    for piece in sorted(pieces, key=lambda s: (-s.size, s.leaf, s.start)):
        load, index = loads[0]
        bins[index].append(piece)
        heapq.heapreplace(loads, (load + piece.size, index))
    cut = tuple(Fragment(index, _joined(slices, trained)) for index, slices in enumerate(bins))
    return Plan(trained, cut, _digest((*trained, *frozen), cut), frozen, shards)


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


def scatter(fragment: Fragment, vector: NDArray[Any], leaves: Sequence[NDArray[Any]]) -> None:
    """Write f32, or bits of the leaves' own type, (padded_size,) into the tree in place.

    Padding is dropped, and the leaves keep their types.

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


def clear_padding(fragment: Fragment, vector: NDArray[np.float32]) -> None:
    """Write zeros into the padding of a vector f32 (padded_size,).

    A checkpoint holds no padding: one of a vector that had some could not be restored.
    """
    for piece, start in zip(fragment.slices, fragment.offsets, strict=False):
        vector[start + piece.size : start + padded(piece.size)] = 0


def averaged(of: Plan, fragment: Fragment) -> tuple[bool, ...]:
    """Return for each slice whether every merge averages it, as all do with embeddings.

    Decoupled DiLoCo (arXiv 2604.21428), on merging: RDA everywhere but in the embeddings.
    """
    return tuple(of.leaves[piece.leaf].embedding for piece in fragment.slices)


def check(leaves: Sequence[LeafSpec], fragments: int) -> None:
    """Raise PlanError, as ``plan`` does, without making the plan."""
    for leaf in leaves:
        if any(dimension < 0 for dimension in leaf.shape):
            msg = f"Leaf {leaf.name!r} has shape {leaf.shape}: no dimension may be negative."
            raise PlanError(msg, path="model")
        if leaf.unit < 0 or (leaf.unit and leaf.size % leaf.unit):
            msg = (
                f"Leaf {leaf.name!r} of {leaf.size} elements does not split into units of"
                f" {leaf.unit}: give a divisor."
            )
            raise PlanError(msg, path="model")
    if len({leaf.name for leaf in leaves}) < len(leaves):
        msg = "Two parameters of the model share a name: give each its own."
        raise PlanError(msg, path="model")
    trained = trainable(leaves)
    if (units := sum(leaf.units for leaf in trained)) > MOST_SLICES:
        msg = f"The model has {units} tensors to merge: a run takes at most {MOST_SLICES}."
        raise PlanError(msg, path="model")
    if fragments < 1:
        msg = f"A model cannot be cut into {fragments} fragments: set sync.fragments to 1 or more."
        raise PlanError(msg, path="sync.fragments")
    parameters = sum(leaf.size for leaf in trained)
    if fragments > parameters:
        msg = (
            f"{fragments} fragments are more than the model's {parameters} parameters: "
            f"set sync.fragments to at most {parameters}."
        )
        raise PlanError(msg, path="sync.fragments")


def _pieces(leaves: Sequence[LeafSpec], fragments: int) -> list[Slice]:
    """Cut leaves that exceed an even share, then the largest pieces, until there are enough."""
    units = [leaf.unit or leaf.size for leaf in leaves]
    grain = BLOCK
    while sum(f.units * -(-u // grain) for f, u in zip(leaves, units, strict=True)) < fragments:
        grain //= 2
    share = padded(-(-sum(leaf.size for leaf in leaves) // fragments), grain)
    largest = [
        (start - stop, number, start)
        for number, leaf in enumerate(leaves)
        for start, stop in _cuts(leaf.size, units[number], share)
    ]
    heapq.heapify(largest)
    smallest: list[tuple[int, int, int]] = []
    while len(largest) + len(smallest) < fragments:
        negative, leaf, start = heapq.heappop(largest)
        several = -negative > units[leaf]
        if not several and -negative <= grain:
            smallest.append((negative, leaf, start))
            continue
        half = padded((1 - negative) // 2, units[leaf] if several else grain)
        heapq.heappush(largest, (-half, leaf, start))
        heapq.heappush(largest, (negative + half, leaf, start + half))
    return [Slice(leaf, start, start - negative) for negative, leaf, start in largest + smallest]


def _cuts(size: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a leaf into ranges of at most ``most``: between units, or inside one larger than that."""
    run = max(unit, most // max(unit, 1) * unit)
    for first in range(0, size, max(run, 1)):
        last = min(first + run, size)
        for start in range(first, last, most):
            yield start, min(start + most, last)


def _joined(slices: Sequence[Slice], leaves: Sequence[LeafSpec]) -> tuple[Slice, ...]:
    """Sort by place in the tree, join neighbours, and split between units."""
    joined: list[Slice] = []
    for piece in sorted(slices, key=lambda s: (s.leaf, s.start)):
        if joined and (joined[-1].leaf, joined[-1].stop) == (piece.leaf, piece.start):
            joined[-1] = Slice(piece.leaf, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(
        Slice(piece.leaf, max(piece.start, start), min(piece.stop, start + unit))
        for piece in joined
        for unit in (leaves[piece.leaf].unit or leaves[piece.leaf].size,)
        for start in range(piece.start // unit * unit, piece.stop, unit)
    )


def _digest(leaves: Sequence[LeafSpec], fragments: Sequence[Fragment]) -> int:
    """Return blake2b-64 over everything that two sides must agree on, as an unsigned integer.

    A trained leaf of one unit is written as it was before leaves could be frozen or have units, so
    that older digests hold.
    """
    plain = (True, 0)
    content = json.dumps(
        [
            [
                [
                    *(leaf.name, leaf.shape, leaf.embedding),
                    *(() if (leaf.trainable, leaf.unit) == plain else (leaf.trainable, leaf.unit)),
                ]
                for leaf in leaves
            ],
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
