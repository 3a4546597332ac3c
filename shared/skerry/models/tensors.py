"""The tensors of a decoder by name, with their shapes and initial values; without JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError
from skerry.models.arch import MOST_PARAMETERS, Arch, Layer
from skerry.models.names import averaged, unit_of
from skerry.settings.models import ModelConfig

TABLE_STD = 0.02
HEAD_SCORE = 0.5
"""Standard deviation of a fresh model's scores if the head is a matrix of its own."""
OWN_SCORE = 5.12
"""Bound on a fresh model's score for the token that it has just read: the width times the standard
deviation of a tied table. It is the value at a width of 256."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's shape and initial values: normal noise of ``std`` around ``mean``."""

    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@lru_cache(maxsize=64)
def tensors_of(arch: Arch) -> Mapping[str, Tensor]:
    """Return every tensor of a decoder, sorted by name; ModelError if they are absurdly many.

    Matrices begin with a standard deviation of one over the square root of their input width; those
    that write to the residual stream have less, by depth.
    """
    found = dict(sorted(_tensors(arch)))
    total = sum(tensor.size for tensor in found.values())
    if total > MOST_PARAMETERS:
        msg = f"The model's config.json describes {total} parameters, more than any machine holds."
        raise ModelError(msg, path="model.config")
    return MappingProxyType(found)


def leaf_specs_of(arch: Arch) -> tuple[LeafSpec, ...]:
    """Return the tensors of a decoder as ``models.base.specs_of`` names them."""
    return tuple(
        LeafSpec(name, tensor.shape, averaged(name), unit=unit_of(name, tensor.shape))
        for name, tensor in tensors_of(arch).items()
    )


def active_parameters(arch: Arch) -> float:
    """Return the number of parameters that a token is multiplied by.

    Counts the head but no other embeddings, and only the experts that it is routed to.
    """
    routed = arch.experts.chosen / arch.experts.count if arch.experts else 1.0
    active = sum(
        leaf.size * (routed if leaf.unit else 1)
        for leaf in leaf_specs_of(arch)
        if len(leaf.shape) > 1 and "embed_tokens" not in leaf.name
    )
    return active + (arch.vocab * arch.width if arch.tied else 0)


def flops_per_token(arch: Arch, seq_len: int) -> float:
    """Return the FLOPs that a training step must spend on a token: 6 N and attention.

    N are the active parameters. Attention is causal: half of all scores.
    """
    scores = sum(6 * arch.heads * layer.head_dim * seq_len for layer in arch.layers)
    return 6.0 * active_parameters(arch) + scores


def token_flops(config: ModelConfig, arch: Arch, seq_len: int) -> float:
    """Return ``flops_per_token`` for a config's model, whose frozen weights need no gradient."""
    return flops_per_token(arch, seq_len) * (4 / 6 if config.lora_rank else 1)


def _tensors(arch: Arch) -> Iterator[tuple[str, Tensor]]:
    width, std = arch.width, min(TABLE_STD, OWN_SCORE / arch.width)
    scaled = arch.tied or arch.scaled_embedding
    table = Tensor((arch.vocab, width), std if scaled else std * width**0.5)
    yield "model.embed_tokens.weight", table
    yield "model.norm.weight", _gain(arch, width)
    if not arch.tied:
        yield "lm_head.weight", Tensor((arch.vocab, width), HEAD_SCORE * width**-0.5)
    if arch.per_layer:
        packed = len(arch.layers) * arch.per_layer
        yield "model.embed_tokens_per_layer.weight", Tensor((arch.per_layer_vocab, packed), std)
        yield "model.per_layer_model_projection.weight", _matrix(packed, width)
        yield "model.per_layer_projection_norm.weight", _gain(arch, arch.per_layer)
    for number, layer in enumerate(arch.layers):
        for name, tensor in _block(arch, layer):
            yield f"model.layers.{number}.{name}", tensor


def _block(arch: Arch, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    if arch.sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if arch.sandwich and layer.experts:
        norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        norms += ["pre_feedforward_layernorm_2"]
    if arch.per_layer:
        norms += ["post_per_layer_input_norm"]
        yield "per_layer_input_gate.weight", _matrix(arch.per_layer, arch.width)
        yield "per_layer_projection.weight", _matrix(arch.width, arch.per_layer)
    for name in norms:
        yield f"{name}.weight", _gain(arch, arch.width)
    if arch.value_norm:
        yield "layer_scalar", Tensor((1,), mean=1.0)
    yield from _attention(arch, layer)
    if layer.mlp:
        yield from _mlp(arch, layer)
    if layer.experts:
        yield from _experts(arch, layer)


def _attention(arch: Arch, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    wide, narrow = arch.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    outs = {"q_proj": wide}
    if layer.source is None:
        outs |= {"k_proj": narrow} | ({"v_proj": narrow} if layer.values else {})
    for name, out in outs.items():
        yield f"self_attn.{name}.weight", _matrix(out, arch.width)
        if arch.qkv_bias:
            yield f"self_attn.{name}.bias", Tensor((out,))
    yield "self_attn.o_proj.weight", _matrix(arch.width, wide, _shrink(arch))
    if arch.out_bias:
        yield "self_attn.o_proj.bias", Tensor((arch.width,))
    if arch.qk_norm:
        for name in ("q_norm", "k_norm")[: 2 if layer.source is None else 1]:
            yield f"self_attn.{name}.weight", _gain(arch, layer.head_dim)


def _mlp(arch: Arch, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    shapes = {"gate_proj": (layer.mlp, arch.width), "up_proj": (layer.mlp, arch.width)}
    shapes["down_proj"] = arch.width, layer.mlp
    for name, (out, into) in shapes.items():
        shrink = _shrink(arch) if name == "down_proj" else 1.0
        yield f"mlp.{name}.weight", _matrix(out, into, shrink)
        if arch.mlp_bias:
            yield f"mlp.{name}.bias", Tensor((out,))


def _experts(arch: Arch, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    experts = arch.experts
    assert experts is not None  # a layer has them only where the arch does
    own = "mlp." if not layer.mlp else ""
    count, inner, width = experts.count, experts.width, arch.width
    up, down = width**-0.5, inner**-0.5 * _shrink(arch)
    yield f"{own}experts.gate_up_proj", Tensor((count, 2 * inner, width), up)
    yield f"{own}experts.down_proj", Tensor((count, width, inner), down)
    if own:
        yield "mlp.gate.weight", Tensor((count, width), TABLE_STD)
        return
    yield "router.proj.weight", Tensor((count, width), up)
    yield "router.scale", Tensor((width,), mean=1.0)
    yield "router.per_expert_scale", Tensor((count,), mean=1.0)


def _matrix(out: int, into: int, shrink: float = 1.0) -> Tensor:
    return Tensor((out, into), shrink * into**-0.5)


def _gain(arch: Arch, size: int) -> Tensor:
    return Tensor((size,), mean=1.0 - arch.gain_offset)


def _shrink(arch: Arch) -> float:
    return 1.0 / math.sqrt(2 * len(arch.layers))
