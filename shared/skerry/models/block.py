"""One block of a decoder: attention, then an MLP or experts.

RMSNorm (arXiv 1910.07467), gated MLP (2002.05202), grouped queries (2305.13245), experts
(2101.03961). Blocks pass rows ``[batch * seq, d]``: XLA on a CPU takes twice as long for a weight's
gradient that sums over two axes, batch and position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from skerry.models import experts
from skerry.models.arch import Arch, Kind, Layer
from skerry.models.attention import attention
from skerry.models.positions import Angles, rotate

Params: TypeAlias = Mapping[str, jax.Array]

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}
SAVED = ("attention", "mlp")
"""Activations that a block can keep for its gradient: the inputs of o_proj and of down_proj."""


class KeysValues(NamedTuple):
    """Keys and values of one layer: [batch, seq, kv_heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Text:
    """The inputs that all blocks of a pass share; ``angles``: cosines, sines by kind of layer."""

    batch: int = field(metadata={"static": True})
    seq: int = field(metadata={"static": True})
    angles: Mapping[Kind, Angles]
    segments: jax.Array | None = None
    counted: jax.Array | None = None


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply rows [n, in] with a matrix [out, in], as it lies in memory."""
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((1,), (1,)), ((), ())))


def biased(p: Params, name: str, x: jax.Array) -> jax.Array:
    """Project rows by a layer's weight, with its adapter and its bias if it has them."""
    out = project(x, p[f"{name}.weight"])
    if f"{name}.lora_A.weight" in p:
        out = out + project(project(x, p[f"{name}.lora_A.weight"]), p[f"{name}.lora_B.weight"])
    bias = p.get(f"{name}.bias")
    return out if bias is None else out + bias.astype(x.dtype)


def normed(arch: Arch, x: jax.Array, gain: jax.Array | None) -> jax.Array:
    """Scale ``[..., d]`` to unit root mean square in float32, then by a gain; keeps dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(mean + jnp.float32(arch.eps))
    if gain is not None:
        shape = (1,) * (x.ndim - 1) + (-1,)
        wide = wide * (gain + arch.gain_offset if arch.gain_offset else gain).reshape(shape)
    return wide.astype(x.dtype)


@dataclass(frozen=True, slots=True, weakref_slot=True)  # jax.checkpoint refers to it weakly
class Block:
    """The block of a layer; ``fused`` asks for cuDNN's attention."""

    arch: Arch
    layer: Layer
    fused: bool = False

    def __call__(
        self,
        text: Text,
        p: Params,
        x: jax.Array,
        shared: KeysValues | None,
        extra: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues, experts.Routed | None]:
        """Add one block to rows [n, d]; ``extra`` [n, e] are this layer's own token embeddings."""
        arch = self.arch
        mixed, held = self._attention(text, p, self._named(p, "input_layernorm", x), shared)
        after = "post_attention_layernorm"
        x = x + (self._named(p, after, mixed) if arch.sandwich else mixed)
        before = "pre_feedforward_layernorm" if arch.sandwich else after
        out, where = self._feed_forward(text, p, x, self._named(p, before, x))
        x = x + (self._named(p, "post_feedforward_layernorm", out) if arch.sandwich else out)
        if extra is not None:
            gate = self._activate(project(x, p["per_layer_input_gate.weight"])) * extra
            added = project(gate, p["per_layer_projection.weight"])
            x = x + self._named(p, "post_per_layer_input_norm", added)
        if "layer_scalar" in p:  # a constant of the checkpoint, not a parameter
            x = x * jax.lax.stop_gradient(p["layer_scalar"]).astype(x.dtype)
        return x, held, where

    def _attention(
        self, text: Text, p: Params, x: jax.Array, shared: KeysValues | None
    ) -> tuple[jax.Array, KeysValues]:
        arch, layer, angles = self.arch, self.layer, text.angles[self.layer.kind]
        shape = text.batch, text.seq, -1, layer.head_dim
        query = biased(p, "self_attn.q_proj", x).reshape(shape)
        if arch.qk_norm:
            query = self._named(p, "self_attn.q_norm", query)
        if shared is None:
            key = biased(p, "self_attn.k_proj", x).reshape(shape)
            value = key
            if layer.values:
                value = biased(p, "self_attn.v_proj", x).reshape(shape)
            if arch.qk_norm:
                key = self._named(p, "self_attn.k_norm", key)
            if arch.value_norm:
                value = normed(self.arch, value, None)
            shared = KeysValues(rotate(key, angles), value)
        mixed = attention(
            rotate(query, angles),
            shared.keys,
            shared.values,
            scale=arch.scale(layer),
            window=arch.window if layer.kind == "sliding_attention" else None,
            cap=arch.score_cap,
            segments=text.segments,
            fused=self.fused,
        )
        mixed = checkpoint_name(mixed.reshape(x.shape[0], -1), "attention")
        return biased(p, "self_attn.o_proj", mixed), shared

    def _feed_forward(
        self, text: Text, p: Params, x: jax.Array, rows: jax.Array
    ) -> tuple[jax.Array, experts.Routed | None]:
        """Return what MLP and experts add for ``rows``, which are x normed.

        Gemma 4's experts have a norm of their own for x.
        """
        if not self.layer.experts:
            return self._mlp(p, rows), None
        if not self.layer.mlp:
            scores = router_scores(rows, p["mlp.gate.weight"])
            return self._experts(text, p, "mlp.experts", rows, scores)
        dense = self._named(p, "post_feedforward_layernorm_1", self._mlp(p, rows))
        plain = normed(self.arch, x, None) * p["router.scale"].astype(x.dtype)
        plain = plain * jnp.asarray(x.shape[1] ** -0.5, x.dtype)
        scores = router_scores(plain, p["router.proj.weight"])
        own = self._named(p, "pre_feedforward_layernorm_2", x)
        sparse, where = self._experts(text, p, "experts", own, scores)
        return dense + self._named(p, "post_feedforward_layernorm_2", sparse), where

    def _experts(
        self, text: Text, p: Params, name: str, x: jax.Array, scores: jax.Array
    ) -> tuple[jax.Array, experts.Routed]:
        assert self.arch.experts is not None  # a layer has them only where the arch does
        choice, where = experts.choose(scores, self.arch.experts, text.counted)
        if "router.per_expert_scale" in p:
            scale = p["router.per_expert_scale"][choice.experts]
            choice = choice._replace(weights=choice.weights * scale)
        stacks = p[f"{name}.gate_up_proj"], p[f"{name}.down_proj"]
        return experts.mix(x, choice, *stacks, self._activate), where

    def _mlp(self, p: Params, x: jax.Array) -> jax.Array:
        gate = self._activate(biased(p, "mlp.gate_proj", x))
        inner = checkpoint_name(gate * biased(p, "mlp.up_proj", x), "mlp")
        return biased(p, "mlp.down_proj", inner)

    def _named(self, p: Params, name: str, x: jax.Array) -> jax.Array:
        return normed(self.arch, x, p[f"{name}.weight"])

    def _activate(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.arch.activation](x)


def router_scores(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the experts' scores, f32 [n, experts], so that rounding does not decide ties."""
    return project(x.astype(jnp.float32), weight)
