"""How many parameters are trained and how large the fragments are, without building the model.

Numpy, which fragments are cut with, is imported only where a model's tensors are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.errors import ConfigError
from skerry.models.sizes import leaf_specs_of, sizes_of

if TYPE_CHECKING:
    from skerry.algorithm.fragments import LeafSpec
    from skerry_tools.plan.sites import Request


@dataclass(frozen=True, slots=True)
class Size:
    """A model as a plan sees it; ``leaves`` are empty where only a count was given."""

    parameters: float
    layers: int
    leaves: tuple[LeafSpec, ...] = ()

    def largest_fragment(self, fragments: int) -> float:
        """Return the parameters of the largest of so many fragments, padding included."""
        if not self.leaves:
            return math.ceil(self.parameters / fragments)
        from skerry.algorithm.fragments import plan

        return max(part.padded_size for part in plan(self.leaves, fragments).fragments)


def size_of(request: Request) -> Size:
    """Return the size of what is trained: of plan.parameters, else of [model].

    Raises ConfigError for a factory of the user's own without plan.parameters.
    """
    table = request.scene.plan
    if table.parameters is not None:
        if request.run.sync.fragments > table.parameters:
            msg = (
                f"sync.fragments is {request.run.sync.fragments} but the model has "
                f"{table.parameters:.0f} parameters: lower it."
            )
            raise ConfigError(msg, path="sync.fragments")
        return Size(table.parameters, table.layers)
    model = request.run.model
    if model.factory:
        msg = "plan.parameters is missing: a factory's model is not built here; say --params 12e9."
        raise ConfigError(msg, path="plan.parameters")
    sizes = sizes_of(model)
    leaves = leaf_specs_of(sizes)
    return Size(sum(leaf.size for leaf in leaves), sizes.layers, leaves)
