"""Where the pieces of a fragment lie in JAX leaves, and how a program reads and writes them.

A piece is a vector spread evenly over every device, in whole blocks: devices quantise it without
communication, and no device ever holds a whole leaf that it did not hold before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, Fragment, Slice, padded
from skerry.errors import ModelError


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring slices of one leaf, at ``offset`` of the padded vector.

    They are contiguous there as in the leaf: all but the last, such as experts, are whole blocks.
    """

    slices: tuple[Slice, ...]
    offset: int

    @property
    def leaf(self) -> int:
        return self.slices[0].leaf

    @property
    def start(self) -> int:
        return self.slices[0].start

    @property
    def size(self) -> int:
        return self.slices[-1].stop - self.slices[0].start


def pieces_of(fragment: Fragment) -> tuple[Piece, ...]:
    """Return a fragment's pieces in the order of its vector."""
    pieces: list[Piece] = []
    for part, offset in zip(fragment.slices, fragment.offsets, strict=False):
        before = pieces[-1].slices[-1] if pieces else None
        if (
            before is not None
            and (before.leaf, before.stop) == (part.leaf, part.start)
            and before.size % BLOCK == 0
        ):
            pieces[-1] = Piece((*pieces[-1].slices, part), pieces[-1].offset)
        else:
            pieces.append(Piece((part,), offset))
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a program must know of a piece: pieces with equal ``Cut`` share their programs.

    ``length`` is that of its vector on the devices; ``start`` is -1 if it is passed as an argument.
    On a mesh a part of a leaf needs a constant: it decides which devices communicate.
    ``own`` is sharded only over the axes that split the leaf: as a step between ``leaf`` and
    ``flat``, it keeps each device to what it holds, even if others hold copies of that.
    """

    size: int
    length: int
    start: int
    leaf: Sharding
    own: Sharding
    flat: Sharding

    @classmethod
    def of(cls, piece: Piece, leaf: jax.ShapeDtypeStruct) -> Cut:
        place, devices = automatic(leaf.sharding), leaf.sharding.num_devices
        fixed = devices > 1 and piece.size < leaf.size
        own, flat = _over_all(place)
        return cls(
            size=piece.size,
            length=padded(piece.size, BLOCK * devices),
            start=piece.start if fixed else -1,
            leaf=place,
            own=own,
            flat=flat,
        )

    def read(self, leaf: jax.Array, start: jax.Array) -> jax.Array:
        """Return the piece as a vector, f32 [length], with zeros behind it."""
        values = self._flattened(leaf)
        if self.start >= 0:
            values = values[self.start : self.start + self.size]
        elif self.size < leaf.size:
            values = jax.lax.dynamic_slice(values, (start,), (self.size,))
        return self._spread(jnp.pad(values, (0, self.length - self.size)))

    def write(self, leaf: jax.Array, vector: jax.Array, start: jax.Array) -> jax.Array:
        """Return the leaf with a vector, f32 [length], written into the piece."""
        if self.size == leaf.size:
            values = vector[: self.size]
        elif self.start < 0:
            values = self._flattened(leaf)
            values = jax.lax.dynamic_update_slice(values, vector[: self.size], (start,))
        else:  # as an update of a slice, XLA would gather the leaf on every device
            behind = leaf.size - self.start - self.length
            place = jax.lax.iota(jnp.int32, leaf.size)
            inside = (place >= self.start) & (place < self.start + self.size)
            moved = jax.lax.pad(vector, np.float32(0), [(self.start, behind, 0)])
            values = jnp.where(inside, self._spread(moved), self._flattened(leaf))
        rows = self._owned(self._spread(self._spread(values).reshape(leaf.shape)))
        placed: jax.Array = jax.lax.with_sharding_constraint(rows, self.leaf)
        return placed

    def _flattened(self, leaf: jax.Array) -> jax.Array:
        return self._spread(self._spread(self._owned(leaf)).reshape(-1))

    def _owned(self, rows: jax.Array) -> jax.Array:
        """Shard the first dimension over the axes that split the leaf, if other axes copy it."""
        if self.own == self.flat or not rows.ndim or rows.shape[0] % self.flat.num_devices:
            return rows
        owned: jax.Array = jax.lax.with_sharding_constraint(rows, self.own)
        return owned

    def _spread(self, array: jax.Array) -> jax.Array:
        """Shard the first dimension over all devices, if their number divides it."""
        devices = self.flat.num_devices
        if devices == 1 or not array.ndim or array.shape[0] % devices:
            return array
        spread: jax.Array = jax.lax.with_sharding_constraint(array, self.flat)
        return spread


def automatic(place: Sharding) -> Sharding:
    """Return a sharding with automatic mesh axes, so that our programs may reshard freely.

    ``jax.make_mesh`` makes explicit axes by default.
    """
    if not isinstance(place, NamedSharding) or AxisType.Explicit not in place.mesh.axis_types:
        return place
    names, devices = place.mesh.axis_names, np.asarray(place.mesh.devices)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, place.spec)


def lying(leaf: jax.Array, place: Sharding) -> jax.Array:
    """Return a leaf with an equivalent sharding; nothing is copied."""
    return leaf if leaf.sharding == place else jax.device_put(leaf, place)


def _over_all(place: Sharding) -> tuple[Sharding, Sharding]:
    """Return two shardings of a leaf's vector: over the axes that split the leaf, and over all.

    The axes that split the leaf come first: copies on the others are then cut without moving.
    """
    if not isinstance(place, NamedSharding):
        if place.num_devices == 1:
            return place, place
        msg = (
            f"A parameter lies on {place.num_devices} devices by a {type(place).__name__}: place"
            " parameters by jax.sharding.NamedSharding."
        )
        raise ModelError(msg, path="model")
    splits = [(names,) if isinstance(names, str) else names or () for names in place.spec]
    used = [name for names in splits for name in names]
    rest = [name for name in place.mesh.axis_names if name not in used]
    flat = NamedSharding(place.mesh, PartitionSpec((*used, *rest)))
    if all(place.mesh.shape[name] == 1 for name in rest):
        return flat, flat
    return NamedSharding(place.mesh, PartitionSpec(tuple(used) or None)), flat


def placed(vector: NDArray[np.float32], piece: Piece, cut: Cut) -> jax.Array:
    """Return a piece of a vector on the devices; each gets only its own part."""
    values = vector[piece.offset : piece.offset + padded(piece.size)]
    if len(values) == cut.length and cut.flat.num_devices == 1:
        whole: jax.Array = jax.device_put(values, cut.flat)
        return whole

    def part(index: Any) -> NDArray[np.float32]:
        start, stop, _ = index[0].indices(cut.length)
        own = values[start:stop]
        return np.pad(own, (0, stop - start - len(own)))

    return jax.make_array_from_callback((cut.length,), cut.flat, part)
