"""Equal leaves held as one array, so that a program does not grow with the number of layers.

``Stacks`` is the type of a model's ``stacks``: for the name of an array, the leaves of one shape
that it may hold, in order along its first dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Stacks: TypeAlias = Mapping[str, tuple[str, ...]]
NO_STACKS: Stacks = MappingProxyType({})


def stacked(params: Mapping[str, Any], stacks: Stacks) -> Any:
    """Return parameters by name, with stacks replacing the leaves that they hold."""
    if not stacks:
        return params
    held = {name for names in stacks.values() for name in names}
    alone = {name: leaf for name, leaf in params.items() if name not in held}
    return alone | {
        stack: jnp.stack([params[name] for name in names]) for stack, names in stacks.items()
    }


def places_of(places: Mapping[str, NamedSharding], stacks: Stacks) -> dict[str, NamedSharding]:
    """Return the shardings of leaves and stacks: each row of a stack is sharded as its leaf."""
    rows = {
        stack: NamedSharding(places[names[0]].mesh, PartitionSpec(None, *places[names[0]].spec))
        for stack, names in stacks.items()
    }
    return {**places, **rows}


def row_place(place: Sharding) -> Sharding:
    """Return the sharding of each row of a stack, whose first dimension is never split."""
    if not isinstance(place, NamedSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))


def rows_of(stacks: Stacks) -> dict[str, tuple[str, int]]:
    """Return the stack of each leaf that is in one, and its row there."""
    return {
        name: (stack, number)
        for stack, names in stacks.items()
        for number, name in enumerate(names)
    }
