"""Equal leaves held as one array, so that a program is as long for many layers as for a few.

``Stacks`` are what a model names in its ``stacks``: leaves of one shape, by the name of the array
that may hold them, in order along its first dimension.
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
    """Return parameters by name with stacks in the place of the leaves that they hold."""
    if not stacks:
        return params
    held = {name for names in stacks.values() for name in names}
    alone = {name: leaf for name, leaf in params.items() if name not in held}
    return alone | {
        stack: jnp.stack([params[name] for name in names]) for stack, names in stacks.items()
    }


def places_of(places: Mapping[str, NamedSharding], stacks: Stacks) -> dict[str, NamedSharding]:
    """Return where leaves and stacks lie: each row of a stack as the leaf that it is."""
    rows = {
        stack: NamedSharding(places[names[0]].mesh, PartitionSpec(None, *places[names[0]].spec))
        for stack, names in stacks.items()
    }
    return {**places, **rows}


def row_place(place: Sharding) -> Sharding:
    """Return where each row of a stack lies, whose first dimension is never split."""
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
