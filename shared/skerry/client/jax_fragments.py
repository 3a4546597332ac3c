"""The fragments of JAX parameters, cut out and put in where they lie.

Used by one thread; every call only dispatches. Parameters may lie on one device or be spread over a
mesh by ``NamedSharding``. A fragment is handled in pieces, each of one leaf. A piece is a vector
spread evenly over every device, in whole blocks, so that it can be quantised without a word between
them, and no device ever holds a leaf that is not its own. Programs are compiled by the shapes of
pieces, not by fragment: all layers of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from skerry.algorithm import adoption, quantise_jax
from skerry.algorithm.fragments import BLOCK, Fragment, Plan, Slice, padded
from skerry.algorithm.planes import Planes
from skerry.errors import Diverged, ModelError
from skerry.models.base import Layout, Params
from skerry.models.mesh import in_turn
from skerry.settings.models import SyncConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring slices of one leaf, at ``offset`` of the padded vector.

    They lie there as in the leaf: all but the last are whole blocks, such as a stack's experts.
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
    """What a program has to know of a piece: pieces of one ``Cut`` share their programs.

    ``length`` is that of its vector on the devices; ``start`` is -1 where it is an argument. On a
    mesh it cannot be one for a part of a leaf: which devices talk to each other depends on it.
    ``own`` is over those axes alone that split the leaf: on the way between ``leaf`` and ``flat``
    each device then meets no more than what it holds, where others hold copies of it.
    """

    size: int
    length: int
    start: int
    leaf: Sharding
    own: Sharding
    flat: Sharding

    @classmethod
    def of(cls, piece: Piece, leaf: jax.Array) -> Cut:
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
        """Have the first dimension lie over the axes that split the leaf, if others copy it."""
        if self.own == self.flat or not rows.ndim or rows.shape[0] % self.flat.num_devices:
            return rows
        owned: jax.Array = jax.lax.with_sharding_constraint(rows, self.own)
        return owned

    def _spread(self, array: jax.Array) -> jax.Array:
        """Have the first dimension lie over all devices, where they divide it."""
        devices = self.flat.num_devices
        if devices == 1 or not array.ndim or array.shape[0] % devices:
            return array
        spread: jax.Array = jax.lax.with_sharding_constraint(array, self.flat)
        return spread


def automatic(place: Sharding) -> Sharding:
    """Return a sharding on a mesh of automatic axes: our programs move arrays as they please.

    ``jax.make_mesh`` makes explicit ones unless it is given others.
    """
    if not isinstance(place, NamedSharding) or AxisType.Explicit not in place.mesh.axis_types:
        return place
    names, devices = place.mesh.axis_names, np.asarray(place.mesh.devices)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return NamedSharding(mesh, place.spec)


def _lying(leaf: jax.Array, place: Sharding) -> jax.Array:
    """Return a leaf under another name of where it lies; nothing is copied."""
    return leaf if leaf.sharding == place else jax.device_put(leaf, place)


def _over_all(place: Sharding) -> tuple[Sharding, Sharding]:
    """Return shardings of a leaf's vector: over what splits the leaf, and over all devices.

    The axes that split the leaf come first: what the others hold copies of is cut where it lies.
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


@dataclass(frozen=True, slots=True)
class DeviceVector:
    """A fragment's padded vector, f32 [padded_size], as its pieces on the devices.

    ``numpy.array`` fetches it.
    """

    fragment: Fragment
    parts: tuple[jax.Array, ...]

    @property
    def pieces(self) -> Iterator[tuple[Piece, jax.Array]]:
        return zip(pieces_of(self.fragment), self.parts, strict=True)

    def devices(self) -> set[Any]:
        """Return the devices that hold some of it."""
        return self.parts[0].devices()

    def quantise(self, scheme: str, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
        """Quantise piece by piece where each lies; codes, scales and norms come to the host.

        Raises Diverged if anything is not finite.
        """
        made = [
            quantise_jax.encode(scheme, tuple(part.size for part in piece.slices), values)
            for piece, values in self.pieces
        ]
        codes, scales, norms = list[NDArray[Any]](), list[NDArray[Any]](), list[float]()
        for (piece, _), (planes, measured) in zip(self.pieces, jax.device_get(made), strict=True):
            if not planes.finite:
                msg = f"The outer gradient of fragment {fragment.index} is not finite: not sent."
                raise Diverged(msg)
            blocks = padded(piece.size) // BLOCK
            codes.append(planes.codes[:blocks])
            scales.append(planes.scales[:blocks])
            norms += measured.tolist()
        return Planes(np.concatenate(codes), np.concatenate(scales)), tuple(norms)

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> NDArray[Any]:
        vector = np.empty((self.fragment.padded_size,), np.float32)
        for part in self.parts:
            part.copy_to_host_async()
        for piece, part in self.pieces:
            size = padded(piece.size)
            vector[piece.offset : piece.offset + size] = np.asarray(part)[:size]
        return vector if dtype is None else vector.astype(dtype, copy=False)


def narrowed(values: jax.Array) -> jax.Array:
    """Return f32 that bf16 holds exactly as bf16: by bits, for a device may flush subnormals."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) >> np.uint32(16)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def widened(values: jax.Array) -> jax.Array:
    """Return bf16 as f32, bit by bit; f32 as it is."""
    if values.dtype == jnp.float32:
        return values
    bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << np.uint32(16), jnp.float32)


@partial(jax.jit, static_argnames=("cut", "keeps"))
def _capture(
    leaf: jax.Array, anchor: jax.Array, start: Any, *, cut: Cut, keeps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the outer gradient of a piece and, if it is wanted, what it is now.

    The outer gradient is ``anchor - local`` (DiLoCo, arXiv 2311.08105, and its heirs).
    """
    local = cut.read(leaf, start)
    return widened(anchor) - local, local if keeps else None


@partial(jax.jit, static_argnames=("cut", "method", "narrow"), donate_argnames="leaf")
def _adopt(  # noqa: PLR0913 - all of them are operands
    leaf: jax.Array,
    base: jax.Array,
    new: jax.Array,
    start: Any,
    keep: Any,
    first: Any,
    *,
    cut: Cut,
    method: adoption.Method,
    narrow: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the leaf with a piece adopted, and the anchor; the leaf passed in is given up.

    ``base`` is the local value that ``new`` already accounts for: what was captured for the
    contribution, or the anchor when none was. The formulas are ``skerry.algorithm.adoption``'s;
    what is adopted ``first`` overwrites.
    """
    adopted = adoption.adopt(method, cut.read(leaf, start), base, new, keep)
    leaf = cut.write(leaf, jnp.where(first, new, adopted), start)
    return leaf, narrowed(new) if narrow else new


_widen = jax.jit(widened)


def _widened(anchors: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(in_turn(_widen(anchor)) for anchor in anchors)


class JaxFragments:
    """The fragments of one tree of parameters, and an anchor of each.

    ``params`` are the parameters; the training loop sets them after a step. ``cuts`` are the pieces
    of each fragment, and where each lies. An anchor is bf16
    where global fragments travel so, which holds it exactly. In flight a fragment costs its outer
    gradient until it is sent and, if adoption is by rebase, what was captured until it is merged.
    """

    def __init__(self, plan: Plan, sync: SyncConfig, params: Params) -> None:
        self.params = params
        self._sync = sync
        self._fragments = plan.fragments
        self._narrow = sync.global_scheme == "bf16"
        self._layout = Layout.of(params)
        self._numbers = [self._layout.names.index(spec.name) for spec in plan.leaves]
        leaves = self._leaves()
        if [leaves[n].shape for n in self._numbers] != [spec.shape for spec in plan.leaves]:
            msg = "the parameters do not have the shapes of the plan"
            raise ValueError(msg)
        self.cuts = [
            [(piece, Cut.of(piece, leaves[self._numbers[piece.leaf]])) for piece in pieces_of(f)]
            for f in plan.fragments
        ]
        self._anchors: dict[int, tuple[jax.Array, ...]] = {}
        self._captured: dict[int, tuple[jax.Array, ...]] = {}

    def warm(self, tick: Callable[[], None]) -> None:
        """Compile everything, calling ``tick`` in between; nothing is run, nothing changes."""
        for _, program in self.programs():
            program.compile()
            tick()

    def programs(self) -> Iterator[tuple[str, Any]]:
        """Lower each program once for all pieces that share it; yields its name with it."""
        leaves, done = self._leaves(), set[Any]()
        start, keep, first = np.int32(0), np.float32(0), np.zeros((), np.bool_)
        kept = jnp.bfloat16 if self._narrow else jnp.float32
        for piece, cut in (pair for cuts in self.cuts for pair in cuts):
            leaf = _lying(leaves[self._numbers[piece.leaf]], cut.leaf)
            if (leaf.shape, cut) in done:
                continue
            done.add((leaf.shape, cut))
            vector = jax.ShapeDtypeStruct((cut.length,), jnp.float32, sharding=cut.flat)
            anchor = jax.ShapeDtypeStruct((cut.length,), kept, sharding=cut.flat)
            name = f"{self._layout.names[self._numbers[piece.leaf]]}[{piece.start}:]"
            yield (
                f"capture {name}",
                _capture.lower(leaf, anchor, start, cut=cut, keeps=self._rebases),
            )
            operands = leaf, vector, vector, start, keep, first
            kind = {"cut": cut, "method": self._sync.adoption, "narrow": self._narrow}
            yield f"adopt {name}", _adopt.lower(*operands, **kind)

    def genesis(self, fragment: int) -> DeviceVector:
        """Return the outer gradient of the parameters relative to zero."""
        kept = jnp.bfloat16 if self._narrow else jnp.float32
        zeros = [
            in_turn(jnp.zeros((cut.length,), kept, device=cut.flat))
            for _, cut in self.cuts[fragment]
        ]
        return self._capture(fragment, zeros)[0]

    def capture(self, fragment: int) -> DeviceVector:
        """Return ``anchor - local``, and remember local for the adoption."""
        gradient, local = self._capture(fragment, self._anchors[fragment])
        if self._rebases:
            self._captured[fragment] = local
        return gradient

    def release(self, fragment: int) -> None:
        """Forget what was captured: no commit will merge it, so it is local progress again."""
        self._captured.pop(fragment, None)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, f32 [padded_size]; it becomes the anchor bit by bit.

        The first adoption of a fragment overwrites it. The array must not be written to
        afterwards: on a CPU what is on the device may be this very memory.
        """
        new = tuple(_placed(vector, piece, cut) for piece, cut in self.cuts[fragment])
        first = fragment not in self._anchors
        base = self._captured.pop(fragment, None)
        if base is None:
            base = _widened(self._anchors[fragment]) if self._rebases and not first else new
        self._anchors.pop(fragment, None)
        self._anchors[fragment] = self._write(fragment, base, new, first=first)

    def anchor(self, fragment: int) -> DeviceVector:
        """Return the anchor of a fragment that has been adopted."""
        return DeviceVector(self._fragments[fragment], self._anchors[fragment])

    def reset(self) -> None:
        """Fall back to the anchors.

        What is in flight stays in flight: its progress comes back with the global state.
        """
        self._captured.clear()
        for fragment, anchor in self._anchors.items():
            new = _widened(anchor)
            self._write(fragment, new, new, first=True)

    @property
    def _rebases(self) -> bool:
        return self._sync.adoption == "rebase"

    def _leaves(self) -> list[jax.Array]:
        return self._layout.leaves(self.params)

    def _capture(self, fragment: int, anchors: Any) -> tuple[DeviceVector, Any]:
        leaves = self._leaves()
        made = [
            in_turn(
                _capture(
                    _lying(leaves[self._numbers[piece.leaf]], cut.leaf),
                    *(anchor, np.int32(piece.start)),
                    cut=cut,
                    keeps=self._rebases,
                )
            )
            for (piece, cut), anchor in zip(self.cuts[fragment], anchors, strict=True)
        ]
        gradients, locals_ = zip(*made, strict=True)
        return DeviceVector(self._fragments[fragment], gradients), locals_

    def _write(self, fragment: int, base: Any, new: Any, *, first: bool) -> tuple[jax.Array, ...]:
        """Adopt piece by piece; returns the anchors."""
        leaves, anchors = self._leaves(), list[jax.Array]()
        self.params = None  # so that a leaf that is given up has no other holder
        for (piece, cut), before, vector in zip(self.cuts[fragment], base, new, strict=True):
            number = self._numbers[piece.leaf]
            place = leaves[number].sharding
            leaf, anchor = in_turn(
                _adopt(
                    *(_lying(leaves[number], cut.leaf), before, vector, np.int32(piece.start)),
                    *(np.float32(self._sync.blend_alpha), np.bool_(first)),
                    cut=cut,
                    method=self._sync.adoption,
                    narrow=self._narrow,
                )
            )
            leaves[number] = _lying(leaf, place)
            anchors.append(anchor)
        self.params = self._layout.params(leaves)
        return tuple(anchors)


def _placed(vector: NDArray[np.float32], piece: Piece, cut: Cut) -> jax.Array:
    """Return a piece of a vector on the devices, each of which is given its own part only."""
    values = vector[piece.offset : piece.offset + padded(piece.size)]
    if len(values) == cut.length and cut.flat.num_devices == 1:
        whole: jax.Array = jax.device_put(values, cut.flat)
        return whole

    def part(index: Any) -> NDArray[np.float32]:
        start, stop, _ = index[0].indices(cut.length)
        own = values[start:stop]
        return np.pad(own, (0, stop - start - len(own)))

    return jax.make_array_from_callback((cut.length,), cut.flat, part)
