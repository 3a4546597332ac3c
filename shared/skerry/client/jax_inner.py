"""The state of an optax optimizer, or of any tree of JAX arrays, as it is saved and read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from skerry.client.inner_state import Arrays, Copying, StateKind, portions_of, shapes_in
from skerry.models import mesh as meshes
from skerry.models.base import path_name


def kind_of(template: Any) -> StateKind:
    """Return what a saver has to know; ``template`` is a tree of the state's shapes and dtypes."""

    def copying() -> Copying:
        whenever = jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays))
        ahead = {
            names: whenever.lower({name: like[name] for name in names}).compile()
            for names in portions_of(shapes)
        }

        def copy(arrays: Arrays) -> Arrays:
            copied: Arrays
            try:
                copied = ahead[tuple(arrays)](arrays)
            except (KeyError, TypeError, ValueError):  # it lies elsewhere than on the first device
                copied = whenever(arrays)
            return {name: copied[name] for name in arrays}  # sorted, as jit returns it

        return copy

    like = flat(template)
    shapes = shapes_in(like)
    return StateKind(flat, shapes_in, copying, dict, shapes)


def flat(state: Any) -> dict[str, Any]:
    """Name every array of a state, in flattening order."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def restored(places: Any, tensors: Mapping[str, NDArray[Any]]) -> Any:
    """Return the state that was saved as ``tensors``.

    Each lies where a tree says: of shardings, or of arrays in whose place they come. They are
    copied, tensor by tensor and to each device only its own part: what a step may write
    into must be the device's own memory.
    """
    named, tree = jax.tree_util.tree_flatten_with_path(places)
    leaves = [_placed(tensors[path_name(path)], place) for path, place in named]
    return jax.tree.unflatten(tree, leaves)


def _placed(tensor: NDArray[Any], place: Any) -> jax.Array:
    if isinstance(place, jax.Array):
        if not place.committed:  # it goes wherever the others are
            return jnp.array(tensor)
        place = place.sharding
    return meshes.put(tensor, place)
