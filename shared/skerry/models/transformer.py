"""A decoder-only transformer in plain JAX.

RMSNorm (arXiv 1910.07467), rotary positions (2104.09864), gated MLP (SwiGLU, 2002.05202), grouped
query attention (2305.13245), tied embeddings. Layers are a Python loop over leaves of their own:
stacked leaves under ``lax.scan`` compile faster, but then "one tensor" of the radial-directional
merge would span all layers. A dozen layers compile in seconds either way.

Activations between blocks are rows ``[batch * seq, d]``: where a weight's gradient sums over two
axes, batch and position, XLA on a CPU takes twice as long for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.models.sizes import Sizes

INIT_STD = 0.02
OWN_SCORE = 5.12
"""Bound on a fresh model's score for the token that it has just read: d_model times the standard
deviation of the table, which is tied. It is the value at a width of 256."""
ROPE_BASE = 10_000.0


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale ``[..., d]`` to unit root mean square in float32, then by ``gain``; keeps the dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * inverse).astype(x.dtype) * gain.astype(x.dtype).reshape(
        (1,) * (x.ndim - 1) + (-1,)
    )


@lru_cache(maxsize=8)
def _angles(seq: int, half: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines f32 [1, seq, 1, half]; one array, so that a program has it once."""
    frequency = ROPE_BASE ** (-np.arange(half) / half)
    angle = (np.arange(seq)[:, None] * frequency[None, :])[None, :, None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(x: jax.Array) -> jax.Array:
    """Apply rotary positions to ``[batch, seq, heads, head_dim]``, in float32."""
    cos, sin = _angles(x.shape[1], x.shape[-1] // 2)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Transformer:
    """The built-in model; master parameters are float32, arithmetic is done in ``compute``."""

    sizes: Sizes
    compute: Any = jnp.float32
    embeddings: tuple[str, ...] = ("embed",)

    @property
    def vocab(self) -> int:
        return self.sizes.vocab

    def init(self, key: jax.Array) -> Any:
        """Return fresh parameters: normal weights, residual outputs shrunk with depth."""
        s = self.sizes
        keys = jax.random.split(key, s.layers + 1)
        blocks = {f"{i:03d}": self._init_block(keys[i]) for i in range(s.layers)}
        std = min(INIT_STD, OWN_SCORE / s.d_model)
        table = std * jax.random.normal(keys[-1], (s.vocab, s.d_model), jnp.float32)
        return {"blocks": blocks, "embed": table, "norm": jnp.ones((s.d_model,), jnp.float32)}

    def _init_block(self, key: jax.Array) -> dict[str, jax.Array]:
        s = self.sizes
        block: dict[str, jax.Array] = {}
        for part, (name, shape) in zip(
            jax.random.split(key, len(s.matrices)), s.matrices.items(), strict=True
        ):
            std = shape[0] ** -0.5
            if name in {"out", "shrink"}:
                std *= (2 * s.layers) ** -0.5
            block[name] = std * jax.random.normal(part, shape, jnp.float32)
        ones = jnp.ones((s.d_model,), jnp.float32)
        return block | {"norm_attention": ones, "norm_mlp": ones}

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Score what follows each of ``tokens`` int32 [batch, seq]: f32 [batch, seq, vocab]."""
        batch, seq = tokens.shape
        table = params["embed"].astype(self.compute)
        x = table[tokens.reshape(-1)] * jnp.asarray(self.sizes.d_model**0.5, self.compute)
        for _, block in sorted(params["blocks"].items()):
            x = x + self._attention(block, rms_norm(x, block["norm_attention"]), batch)
            x = x + self._mlp(block, rms_norm(x, block["norm_mlp"]))
        final = rms_norm(x, params["norm"])
        scores = jnp.einsum("nd,vd->nv", final, table, preferred_element_type=jnp.float32)
        return scores.reshape(batch, seq, -1)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the mean next-token loss in nats over int32 [batch, seq + 1], a float32 scalar."""
        scores = self.logits(params, tokens[:, :-1])
        picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - picked)

    def _attention(self, block: dict[str, jax.Array], x: jax.Array, batch: int) -> jax.Array:
        s = self.sizes
        query = self._project(x, block["query"]).reshape(batch, -1, s.heads, s.head_dim)
        key = self._project(x, block["key"]).reshape(batch, -1, s.kv_heads, s.head_dim)
        value = self._project(x, block["value"]).reshape(batch, -1, s.kv_heads, s.head_dim)
        with jax.numpy_dtype_promotion("standard"):  # jax's own attention mixes in float32
            mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self._project(mixed.reshape(x.shape), block["out"])

    def _mlp(self, block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(self._project(x, block["gate"]))
        return self._project(gate * self._project(x, block["up"]), block["shrink"])

    def _project(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight.astype(self.compute)
