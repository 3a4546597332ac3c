"""Properties of a tensor by its name, for JAX and torch learners alike; without either library.

Names and shapes are those of Hugging Face's transformers in memory: ``[out, in]`` matrices, and
the experts of a layer stacked into one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

Axes = tuple[str | None, ...]

AVERAGED = re.compile(
    r"(?:^|\.)(?:embed|embed_tokens|embed_tokens_per_layer|lm_head|wte|wpe)(?:\.|$)"
    r"|\.mlp\.gate\.(?:weight|bias)$|\.router\."
)
"""Embeddings, output heads and routers, which merges average and never merge by direction."""

EXPERTS = re.compile(r"(?:^|\.)experts\.(?:gate_up_proj|down_proj)$")
"""Stacks whose first axis counts experts."""

CONSTANT = re.compile(r"(?:^|\.)layer_scalar$")
"""Tensors of a checkpoint that no gradient reaches, and that torch keeps as buffers: leaves like
others, so that the log and every export have them."""

AXES: Mapping[str, Axes] = {
    r".*(embed_tokens|embed_tokens_per_layer|lm_head)\.weight": ("vocab", "embed"),
    r".*\.q_proj\.weight": ("heads", "embed"),
    r".*\.[kv]_proj\.weight": ("kv_heads", "embed"),
    r".*\.o_proj\.weight": ("embed", "heads"),
    r".*\.(gate|up)_proj\.weight": ("mlp", "embed"),
    r".*\.down_proj\.weight": ("embed", "mlp"),
    r".*\.q_proj\.bias": ("heads",),
    r".*\.[kv]_proj\.bias": ("kv_heads",),
    r".*\.(gate|up)_proj\.bias": ("mlp",),
    r".*experts\.gate_up_proj": ("experts", "mlp", "embed"),
    r".*experts\.down_proj": ("experts", "embed", "mlp"),
    r".*(mlp\.gate|router\.proj)\.weight": (None, "embed"),
    r".*per_layer_input_gate\.weight": (None, "embed"),
    r".*per_layer_projection\.weight": ("embed", None),
    r".*per_layer_model_projection\.weight": (None, "embed"),
}
"""The logical axes of every matrix, by the whole name; all other tensors are small."""


def averaged(name: str) -> bool:
    """Return True if every merge averages the tensor."""
    return AVERAGED.search(name) is not None


def unit_of(name: str, shape: tuple[int, ...]) -> int:
    """Return the elements of one expert of a stack; 0 for any other tensor."""
    return math.prod(shape[1:]) if len(shape) == 3 and EXPERTS.search(name) else 0
