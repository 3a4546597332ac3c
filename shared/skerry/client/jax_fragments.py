"""The fragments of JAX parameters, read and written on the devices that hold them.

Used by one thread; every call only dispatches. Parameters may lie on one device or be spread over a
mesh by ``NamedSharding``. A fragment is handled in pieces, each of one leaf (``jax_cuts``).
Programs are compiled per shape of a piece, not per fragment: all layers of a model share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from skerry.algorithm import adoption, quantise_jax
from skerry.algorithm.fragments import BLOCK, Fragment, Plan, padded
from skerry.algorithm.planes import Planes
from skerry.client.jax_cuts import Cut, Piece, automatic, lying, pieces_of, placed
from skerry.errors import Diverged, ModelError
from skerry.models.base import Layout, Params, path_name
from skerry.models.mesh import in_turn
from skerry.models.stacks import NO_STACKS, Stacks, row_place, rows_of
from skerry.settings.models import SyncConfig


@dataclass(frozen=True, slots=True)
class DeviceVector:
    """A fragment's padded vector, f32 [padded_size], held as pieces on the devices.

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


Kind: TypeAlias = tuple[bool, Any, tuple[int, ...], set[Any]] | str
"""For an array: whether it was donated, its dtype, its shape and its devices. For anything else,
such as a tracer of ``jit``: the name of its type."""


def _kind(leaf: Any) -> Kind:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return type(leaf).__name__
    return leaf.is_deleted(), leaf.dtype, leaf.shape, leaf.sharding.device_set


def _said(kind: Kind | None) -> str:
    if kind is None or isinstance(kind, str):
        return kind or "missing"
    donated, dtype, shape, devices = kind
    lies = ", ".join(sorted(map(str, devices)))
    return f"{'donated ' * donated}{dtype} {list(shape)} on {lies:.80}"


def check_values(params: Params) -> None:
    """Raise ModelError for a leaf without values: a shape, a tracer, a donated array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        shape_alone = isinstance(leaf, (jax.ShapeDtypeStruct, Tracer))
        if shape_alone or getattr(leaf, "is_deleted", bool)():
            kind = _said(_kind(leaf))
            msg = f"Parameter {path_name(path)} has no values ({kind}): join with arrays that do."
            raise ModelError(msg)


def _kinds(params: Params) -> dict[str, Kind]:
    """Return the kind of each leaf of a tree, by name, in flattening order."""
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    return {path_name(path): _kind(leaf) for path, leaf in found}


def narrowed(values: jax.Array) -> jax.Array:
    """Return f32 values that bf16 holds exactly as bf16; bitwise, as devices flush subnormals."""
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
    held: jax.Array, anchor: jax.Array, row: Any, start: Any, *, cut: Cut, keeps: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return the outer gradient of a piece and, if wanted, its local value.

    The outer gradient is ``anchor - local`` (DiLoCo, arXiv 2311.08105, and its heirs).
    """
    local = cut.read(_leaf_in(held, row, cut), start)
    return widened(anchor) - local, local if keeps else None


def _leaf_in(held: jax.Array, row: Any, cut: Cut) -> jax.Array:
    """Return a leaf: a row of a stack or, if ``row`` is None, all of ``held``."""
    if row is None:
        return held
    leaf = jax.lax.dynamic_index_in_dim(held, row, keepdims=False)
    # Otherwise XLA spreads the whole stack and cuts the row out afterwards.
    lying: jax.Array = jax.lax.with_sharding_constraint(leaf, cut.leaf)
    return lying


@partial(jax.jit, static_argnames=("cut", "method", "narrow"), donate_argnames="held")
def _adopt(  # noqa: PLR0913 - all of them are operands
    held: jax.Array,
    base: jax.Array,
    new: jax.Array,
    row: Any,
    start: Any,
    keep: Any,
    first: Any,
    *,
    cut: Cut,
    method: adoption.Method,
    narrow: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return the leaf, or its stack, with a piece adopted, and the anchor; ``held`` is donated.

    ``base`` is the local value that ``new`` already accounts for: what was captured for the
    contribution, or the anchor when none was. The formulas are ``skerry.algorithm.adoption``'s; the
    ``first`` adoption overwrites.
    """
    leaf = _leaf_in(held, row, cut)
    adopted = adoption.adopt(method, cut.read(leaf, start), base, new, keep)
    leaf = cut.write(leaf, jnp.where(first, new, adopted), start)
    if row is not None:
        leaf = jax.lax.dynamic_update_index_in_dim(held, leaf, row, 0)
    return leaf, narrowed(new) if narrow else new


_widen = jax.jit(widened)


def _widened(anchors: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(in_turn(_widen(anchor)) for anchor in anchors)


class Place(NamedTuple):
    """Where a leaf is held: the number of an array in the order of names, and its row there.

    Row None: the leaf is the whole array.
    """

    number: int
    row: np.int32 | None

    def held(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return the array, on a mesh of automatic axes."""
        array = leaves[self.number]
        return lying(array, automatic(array.sharding))

    def kind(self, leaves: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
        """Return the leaf's shape and dtype, and where it lies."""
        array = leaves[self.number]
        if self.row is None:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        lies = row_place(array.sharding)
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=lies)


class JaxFragments:
    """The fragments of one tree of parameters, and an anchor of each.

    ``params`` are the parameters, some perhaps in ``stacks``; the training loop sets them after a
    step. ``cuts`` are the pieces of each fragment, and where each lies. If global fragments are
    bf16, anchors are bf16, which is exact. A fragment in flight takes memory for its outer gradient
    until it is sent and, with adoption by rebase, for the captured values until it is merged.
    """

    def __init__(
        self, plan: Plan, sync: SyncConfig, params: Params, stacks: Stacks = NO_STACKS
    ) -> None:
        self.params = params
        self._sync = sync
        self._fragments = plan.fragments
        self._narrow = sync.global_scheme == "bf16"
        self._layout = Layout.of(params)
        self._kinds = _kinds(params)
        inside = rows_of(stacks)
        self._places = [
            Place(self._layout.names.index(name), None if row is None else np.int32(row))
            for name, row in (inside.get(spec.name, (spec.name, None)) for spec in plan.leaves)
        ]
        leaves = self._leaves()
        kinds = [place.kind(leaves) for place in self._places]
        if [kind.shape for kind in kinds] != [spec.shape for spec in plan.leaves]:
            msg = "the parameters do not have the shapes of the plan"
            raise ValueError(msg)
        self.cuts = [
            [(piece, Cut.of(piece, kinds[piece.leaf])) for piece in pieces_of(f)]
            for f in plan.fragments
        ]
        self._anchors: dict[int, tuple[jax.Array, ...]] = {}
        self._captured: dict[int, tuple[jax.Array, ...]] = {}

    def take(self, params: Params) -> None:
        """Hold a step's parameters; ModelError unless they are a tree like the one held so far.

        They are checked at every step, because a later round would fail halfway through them.
        """
        leaves, tree = jax.tree.flatten(params)
        if tree != self._layout.tree or [*map(_kind, leaves)] != [*self._kinds.values()]:
            found = _kinds(params)
            differ = (n for n in {**self._kinds, **found} if self._kinds.get(n) != found.get(n))
            about = "The tree of parameters has other containers in this step"
            for name in differ:
                before, now = (_said(kinds.get(name)) for kinds in (self._kinds, found))
                about = f"Parameter {name} is {before} in the run, and {now} in this step"
                break
            msg = (
                f"{about}: call step outside of jit, with arrays in a tree like that of join,"
                " on the same devices."
            )
            raise ModelError(msg)
        self.params = in_turn(params)

    def warm(self, tick: Callable[[], None]) -> None:
        """Compile all programs without running them, calling ``tick`` in between."""
        for _, program in self.programs():
            program.compile()
            tick()

    def programs(self) -> Iterator[tuple[str, Any]]:
        """Lower each program once for all pieces that share it; yields its name with it."""
        leaves, done = self._leaves(), set[Any]()
        start, keep, first = np.int32(0), np.float32(0), np.zeros((), np.bool_)
        kept = jnp.bfloat16 if self._narrow else jnp.float32
        for piece, cut in (pair for cuts in self.cuts for pair in cuts):
            place = self._places[piece.leaf]
            held = place.held(leaves)
            if (held.shape, cut) in done:
                continue
            done.add((held.shape, cut))
            vector = jax.ShapeDtypeStruct((cut.length,), jnp.float32, sharding=cut.flat)
            anchor = jax.ShapeDtypeStruct((cut.length,), kept, sharding=cut.flat)
            name = f"{self._layout.names[place.number]}[{piece.start}:]"
            yield (
                f"capture {name}",
                _capture.lower(held, anchor, place.row, start, cut=cut, keeps=self._rebases),
            )
            operands = held, vector, vector, place.row, start, keep, first
            kind = {"cut": cut, "method": self._sync.adoption, "narrow": self._narrow}
            yield f"adopt {name}", _adopt.lower(*operands, **kind)
            if self._rebases and (cut.length, cut.flat) not in done:  # where nothing was captured
                done.add((cut.length, cut.flat))
                yield f"widen {name}", _widen.lower(anchor)

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
        afterwards: on a CPU the device may share its memory.
        """
        new = tuple(placed(vector, piece, cut) for piece, cut in self.cuts[fragment])
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
                    *(place.held(leaves), anchor, place.row, np.int32(piece.start)),
                    cut=cut,
                    keeps=self._rebases,
                )
            )
            for (piece, cut), anchor in zip(self.cuts[fragment], anchors, strict=True)
            for place in [self._places[piece.leaf]]
        ]
        gradients, locals_ = zip(*made, strict=True)
        return DeviceVector(self._fragments[fragment], gradients), locals_

    def _write(self, fragment: int, base: Any, new: Any, *, first: bool) -> tuple[jax.Array, ...]:
        """Adopt piece by piece; returns the anchors."""
        leaves, anchors = self._leaves(), list[jax.Array]()
        self.params = None  # a donated leaf must have no other holder
        for (piece, cut), before, vector in zip(self.cuts[fragment], base, new, strict=True):
            place = self._places[piece.leaf]
            lay = leaves[place.number].sharding
            held, anchor = in_turn(
                _adopt(
                    *(place.held(leaves), before, vector, place.row, np.int32(piece.start)),
                    *(np.float32(self._sync.blend_alpha), np.bool_(first)),
                    cut=cut,
                    method=self._sync.adoption,
                    narrow=self._narrow,
                )
            )
            leaves[place.number] = lying(held, lay)
            anchors.append(anchor)
        self.params = self._layout.params(leaves)
        return tuple(anchors)
