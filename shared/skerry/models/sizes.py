"""Sizes and tensors of the built-in transformer, without JAX."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.settings.models import ModelConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that make one transformer; ``sizes_of`` checks that they fit."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    vocab: int = 256

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of one block by name, in the order in which their weights are drawn."""
        width, kv_width = self.d_model, self.kv_heads * self.head_dim
        return {
            "gate": (width, self.d_ff),
            "key": (width, kv_width),
            "out": (width, width),
            "query": (width, width),
            "shrink": (self.d_ff, width),
            "up": (width, self.d_ff),
            "value": (width, kv_width),
        }


PRESETS: Mapping[str, Sizes] = MappingProxyType(
    {
        "nano": Sizes(layers=4, d_model=128, heads=4, kv_heads=2, d_ff=352),
        "micro": Sizes(layers=6, d_model=256, heads=8, kv_heads=4, d_ff=704),
        "small": Sizes(layers=12, d_model=768, heads=12, kv_heads=4, d_ff=2048),
        "base": Sizes(layers=24, d_model=1024, heads=16, kv_heads=4, d_ff=2816),
    }
)


def sizes_of(config: ModelConfig) -> Sizes:
    """Return the preset with its overrides; ModelError when the heads do not divide."""
    fields = ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab")
    given = {name: getattr(config, name) for name in fields if getattr(config, name) is not None}
    sizes = replace(PRESETS[config.preset], **given)
    if sizes.d_model % sizes.heads or sizes.head_dim % 2:
        msg = (
            f"model.d_model = {sizes.d_model} does not split into {sizes.heads} heads"
            " of even width: make it a multiple of twice model.heads."
        )
        raise ModelError(msg, path="model.d_model")
    if sizes.heads % sizes.kv_heads:
        msg = f"model.kv_heads = {sizes.kv_heads} does not divide model.heads = {sizes.heads}."
        raise ModelError(msg + " Choose a divisor.", path="model.kv_heads")
    return sizes


def leaf_specs_of(sizes: Sizes) -> tuple[LeafSpec, ...]:
    """Return the tensors of the built-in transformer, as ``models.base.specs_of`` names them."""
    gain = (sizes.d_model,)
    block = {**sizes.matrices, "norm_attention": gain, "norm_mlp": gain}
    blocks = [
        LeafSpec(f"blocks.{layer:03d}.{name}", block[name])
        for layer in range(sizes.layers)
        for name in sorted(block)
    ]
    embed = LeafSpec("embed", (sizes.vocab, sizes.d_model), embedding=True)
    return (*blocks, embed, LeafSpec("norm", gain))
