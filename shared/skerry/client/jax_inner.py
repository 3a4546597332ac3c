"""Saves and restores the state of an optax optimizer, or any tree of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.client.inner_file import Shapes
from skerry.client.inner_state import Arrays, Copying, StateKind, portions_of
from skerry.errors import ModelError
from skerry.models import mesh as meshes
from skerry.models.base import path_name
from skerry.models.stacks import NO_STACKS, Stacks, row_place


@partial(jax.tree_util.register_dataclass, data_fields=["stack"], meta_fields=["number"])
@dataclass(frozen=True, slots=True)
class Row:
    """A row of a stack as a tensor of its own; it is cut out only when it is copied or read."""

    stack: Any
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.shape[1:])

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    @property
    def sharding(self) -> Any:
        place = getattr(self.stack, "sharding", None)
        return None if place is None else row_place(place)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: FBT001 - numpy's own signature
        del copy
        return np.asarray(self.stack[self.number], dtype)


def kind_of(template: Any, stacks: Stacks = NO_STACKS) -> StateKind:
    """Return how to save a state; ``template`` is a tree of its shapes and dtypes.

    For a state spread over several processes it also has shardings, or is a state itself. State of
    the ``stacks`` is saved as state of the leaves that they hold.
    """

    def copied(name: str, array: Any) -> jax.Array:
        if not isinstance(array, Row):
            return jnp.copy(array)
        row: jax.Array = array.stack[array.number]
        place = like[name].sharding
        return row if place is None else jax.lax.with_sharding_constraint(row, place)

    def copying() -> Copying:
        whenever = jax.jit(lambda arrays: {name: copied(name, arrays[name]) for name in arrays})
        ahead = {
            names: whenever.lower({name: like[name] for name in names}).compile()
            for names in portions_of(like)
        }

        def copy(arrays: Arrays) -> Arrays:
            copied: Arrays
            try:
                copied = ahead[tuple(arrays)](arrays)
            except (KeyError, TypeError, ValueError):  # it lies elsewhere than on the first device
                copied = whenever(arrays)
            meshes.in_turn(copied)
            return lying_here({name: copied[name] for name in arrays})  # sorted, as jit returns it

        return copy

    like = {name: _described(leaf) for name, leaf in flat(template, stacks).items()}
    named = partial(flat, stacks=stacks)
    return StateKind(named, shapes_here, copying, lying_here, shapes_here(like))


def _described(leaf: Any) -> Any:
    """Return an array's shape, dtype and place, if it has one to stay, without the array."""
    if isinstance(leaf, Row):
        return Row(_described(leaf.stack), leaf.number)
    place = leaf.sharding if getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def flat(state: Any, stacks: Stacks = NO_STACKS) -> dict[str, Any]:
    """Name every array of a state as it is saved, in flattening order; ModelError for others."""
    found = dict[str, Any]()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = path_name(path)
        try:
            saved = _saved(leaf)
        except TypeError as error:
            msg = f"{name} of the optimizer's state is no array but {leaf!r}: keep it elsewhere."
            raise ModelError(msg) from error
        rows = _row_names(name, stacks)
        found |= {row: Row(saved, number) for number, row in enumerate(rows)} or {name: saved}
    return found


def _row_names(name: str, stacks: Stacks) -> list[str]:
    """Return the names of the leaves in a stack of a state; none for any other array."""
    for stack, leaves in stacks.items():
        if name == stack or name.endswith(f".{stack}"):
            return [name.removesuffix(stack) + leaf for leaf in leaves]
    return []


def _saved(leaf: Any) -> Any:
    """Return an array, or its shape, as it is saved: a number as an array, a key as its data."""
    if not hasattr(leaf, "sharding"):
        return jnp.asarray(leaf)
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "sharding") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def shapes_here(arrays: Arrays) -> Shapes:
    """Return the shapes of this process's parts, named as by ``lying_here``."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, array in arrays.items():
        for label, spans in _parts(name, array).items():
            found[label] = tuple(stop - start for start, stop in spans), str(array.dtype)
    return found


def lying_here(arrays: Arrays) -> dict[str, Any]:
    """Return this process's share of arrays, by name: whole arrays, or parts of them."""
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        if _is_here(array):
            found[name] = array
            continue
        held = {
            _label(name, _spans(index, array.shape), array.shape): data
            for index, data in _shards(array)
        }
        found |= {label: held[label] for label in _parts(name, array)}
    return found


def _shards(array: Any) -> list[tuple[tuple[slice, ...], Any]]:
    """Return where each part of an array that is with this process lies in it, and the part."""
    if isinstance(array, Row):  # the first dimension of a stack is never split
        return [(index[1:], Row(part, array.number)) for index, part in _shards(array.stack)]
    return [(shard.index, shard.data) for shard in array.addressable_shards]


Spans: TypeAlias = tuple[tuple[int, int], ...]
"""The start and stop of a part in each dimension."""


def _is_here(array: Any) -> bool:
    place = getattr(array, "sharding", None)
    return place is None or bool(place.is_fully_addressable)


def _parts(name: str, array: Any) -> dict[str, Spans]:
    """Return the parts of an array that this process holds, each once, by label and in order."""
    if _is_here(array):
        return {name: _spans((), array.shape)}
    places = array.sharding.addressable_devices_indices_map(tuple(array.shape)).values()
    spans = sorted({_spans(index, array.shape) for index in places})
    return {_label(name, each, array.shape): each for each in spans}


def _spans(index: tuple[slice, ...], shape: Sequence[int]) -> Spans:
    given = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(part.indices(size)[:2] for part, size in zip(given, shape, strict=True))


def _label(name: str, spans: Spans, shape: Sequence[int]) -> str:
    """Name a part of an array; the whole has the array's name."""
    if spans == _spans((), shape):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in spans)}]"


def restored(like: Any, tensors: Mapping[str, NDArray[Any]], stacks: Stacks = NO_STACKS) -> Any:
    """Return the state that was saved as ``tensors``, named as by ``lying_here``.

    ``like`` is a tree of arrays, or of their shapes, dtypes and shardings, which the result gets.
    Tensors are copied one by one, to each device only its own part: a step may write into the
    result, so it must be the device's own memory.
    """
    named, tree = jax.tree_util.tree_flatten_with_path(like)
    leaves = list[jax.Array]()
    for path, leaf in named:
        name = path_name(path)
        rows = _row_names(name, stacks)
        leaves.append(_placed_rows(rows, leaf, tensors) if rows else _placed(name, leaf, tensors))
    return jax.tree.unflatten(tree, leaves)


def _placed_rows(rows: Sequence[str], like: Any, tensors: Mapping[str, NDArray[Any]]) -> jax.Array:
    shape = tuple(like.shape[1:])

    def part(index: tuple[slice, ...]) -> NDArray[Any]:
        spans = _spans(index[1:], shape)
        return np.stack(
            [
                tensors[name][index[1:]] if name in tensors else tensors[_label(name, spans, shape)]
                for name in rows
            ]
        )

    return meshes.put_parts(tuple(like.shape), like.sharding, part)


def _placed(name: str, like: Any, tensors: Mapping[str, NDArray[Any]]) -> jax.Array:
    leaf = _saved(like)
    if _is_key(like):
        impl = list[Any]()
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), like)
        keys: jax.Array = jax.random.wrap_key_data(_placed(name, leaf, tensors), impl=impl[0])
        return keys
    if not getattr(leaf, "committed", True):  # JAX moves it to where the others are
        return jnp.array(tensors[name])
    if _is_here(leaf):
        return meshes.put(tensors[name], leaf.sharding)
    shape = tuple(leaf.shape)

    def part(index: tuple[slice, ...]) -> NDArray[Any]:
        return tensors[_label(name, _spans(index, shape), shape)]

    return meshes.put_parts(shape, leaf.sharding, part)
