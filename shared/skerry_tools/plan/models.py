"""How many parameters are trained and how large the fragments are, without building the model.

Numpy, which fragments are cut with, is imported only where a model's tensors are looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.algorithm.fragments import LeafSpec
    from skerry.settings.models import ModelConfig
    from skerry_tools.plan.sites import Request

SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "nano": {"layers": 4, "d_model": 128, "heads": 4, "kv_heads": 2, "d_ff": 352},
        "micro": {"layers": 6, "d_model": 256, "heads": 8, "kv_heads": 4, "d_ff": 704},
        "small": {"layers": 12, "d_model": 768, "heads": 12, "kv_heads": 4, "d_ff": 2048},
        "base": {"layers": 24, "d_model": 1024, "heads": 16, "kv_heads": 4, "d_ff": 2816},
    }
)
"""The presets of ``skerry.models.factory``, which cannot be asked without JAX; a test keeps
them equal."""
VOCAB = 256


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
    leaves = leaves_of(model)
    return Size(sum(leaf.size for leaf in leaves), _sizes(model)["layers"], leaves)


def leaves_of(model: ModelConfig) -> tuple[LeafSpec, ...]:
    """Return the tensors of the built-in transformer, as the learner names them."""
    from skerry.algorithm.fragments import LeafSpec

    s = _sizes(model)
    width, kv_width = s["d_model"], s["kv_heads"] * (s["d_model"] // s["heads"])
    shapes: dict[str, tuple[int, ...]] = {
        "gate": (width, s["d_ff"]),
        "key": (width, kv_width),
        "norm_attention": (width,),
        "norm_mlp": (width,),
        "out": (width, width),
        "query": (width, width),
        "shrink": (s["d_ff"], width),
        "up": (width, s["d_ff"]),
        "value": (width, kv_width),
    }
    blocks = [
        LeafSpec(f"blocks/{layer:03d}/{name}", shape)
        for layer in range(s["layers"])
        for name, shape in shapes.items()
    ]
    embed = LeafSpec("embed", (s["vocab"], width), embedding=True)
    return (*blocks, embed, LeafSpec("norm", (width,)))


def _sizes(model: ModelConfig) -> dict[str, int]:
    fields = ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab")
    own = {name: getattr(model, name) for name in fields if getattr(model, name) is not None}
    return {**SIZES[model.preset], "vocab": VOCAB, **own}
