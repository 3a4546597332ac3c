"""Causal attention: cuDNN's fused kernel where it fits, else XLA over chunks of queries.

Grouped queries (arXiv 2305.13245), sliding windows, soft caps and packed sequences. A chunk skips
the keys that it cannot see. For long texts XLA holds the scores of one chunk at a time and computes
them again for the gradient, so memory grows with ``CHUNK * seq``.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import structlog

from skerry.models.memory import CHUNK

log = structlog.get_logger()

MOST_CHUNKS = 16
CPU_CHUNK = 128
"""Queries in a chunk of a short text on a CPU, whose caches can hold their scores."""
HIDDEN = -1e30
"""Score of a key that a query must not see."""
HOPPER, AMPERE = 9.0, 8.0


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    segments: jax.Array | None = None,
    fused: bool = False,
) -> jax.Array:
    """Mix values: query [batch, seq, heads, d]; keys, values [batch, seq, kv_heads, d] -> as query.

    ``window``: a query sees this many tokens, itself the last. ``cap``: a soft bound of scores.
    ``segments`` i32 [batch, seq]: tokens see only their own segment. ``fused`` asks for cuDNN,
    which takes neither cap nor segments.
    """
    if fused and cap is None and segments is None and fits_cudnn(query):
        return _cudnn(query, key, value, scale, window)
    seq, short = query.shape[1], query.shape[1] <= CHUNK
    size = max(CHUNK, -(-seq // MOST_CHUNKS))
    if short and jax.default_backend() == "cpu":
        size = CPU_CHUNK
    if seq <= size:
        return _mixed(Seen(0, scale, window, cap), query, key, value, segments, segments)
    out: list[jax.Array] = []
    for start in range(0, seq, size):
        stop = min(start + size, seq)
        first = 0 if window is None else max(0, start - window + 1)
        seen = slice(first, stop)
        mix = partial(_mixed, Seen(start - first, scale, window, cap))
        own = None if segments is None else segments[:, start:stop]
        others = None if segments is None else segments[:, seen]
        part = query[:, start:stop], key[:, seen], value[:, seen], own, others
        out.append((mix if short else jax.checkpoint(mix))(*part))
    return jnp.concatenate(out, axis=1)


class Seen(NamedTuple):
    """Which keys are visible to queries that begin ``offset`` keys after the first key."""

    offset: int
    scale: float
    window: int | None
    cap: float | None


def _mixed(
    how: Seen,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    own: jax.Array | None,
    others: jax.Array | None,
) -> jax.Array:
    batch, count, heads, dim = query.shape
    seen, groups = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, count, groups, heads // groups, dim)
    # In the product's own order of axes: with any other, XLA on a CPU would transpose all scores.
    scores = jnp.einsum("bqkgd,bskd->bkqgs", grouped, key, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(how.scale)
    if how.cap is not None:
        scores = jnp.tanh(scores / how.cap) * how.cap
    ago = jnp.arange(count)[:, None] + how.offset - jnp.arange(seen)[None, :]
    visible = ago >= 0
    if how.window is not None:
        visible &= ago < how.window
    visible = visible[None, None, :, None]
    if own is not None and others is not None:
        visible = visible & (own[:, :, None] == others[:, None, :])[:, None, :, None]
    shares = jax.nn.softmax(jnp.where(visible, scores, HIDDEN), axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bkqgs,bskd->bqkgd", shares, value)
    return mixed.reshape(batch, count, heads, dim)


def fits_cudnn(query: Any, device: Any = None) -> bool:
    """Return True if cuDNN has a kernel: bfloat16, heads of at most 256, or 128 before Hopper."""
    device = device or jax.devices()[0]
    try:
        capability = float(str(getattr(device, "compute_capability", "")))
    except ValueError:
        return False
    most = 256 if capability >= HOPPER else 128 if capability >= AMPERE else 0
    dim = query.shape[-1]
    return bool(query.dtype == jnp.bfloat16 and dim <= most and dim % 8 == 0)


def _cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, scale: float, window: int | None
) -> jax.Array:
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )


@lru_cache(maxsize=64)
def trusted(heads: int, kv_heads: int, dim: int, window: int | None, dtype: str) -> bool:
    """Return True if the fused kernel fits and agrees with XLA's on one row, gradients too.

    Kernels have been wrong in silence (a window that looks ahead, for one), so each shape is
    compared once when a model is built.
    """
    like = jax.ShapeDtypeStruct((1, 256, heads, dim), jnp.dtype(dtype))
    if not fits_cudnn(like):
        return False
    keys = jax.random.split(jax.random.key(0), 4)
    query, weight = (jax.random.normal(k, like.shape, jnp.bfloat16) for k in keys[:2])
    key, value = (jax.random.normal(k, (1, 256, kv_heads, dim), jnp.bfloat16) for k in keys[2:])
    near = None if window is None else min(window, 100)

    def score(*parts: jax.Array, fused: bool) -> jax.Array:
        mixed = attention(*parts, scale=dim**-0.5, window=near, fused=fused)
        return jnp.sum(mixed.astype(jnp.float32) * weight.astype(jnp.float32))

    try:
        one, other = (
            jax.jit(jax.value_and_grad(partial(score, fused=fused), argnums=(0, 1, 2)))(
                query, key, value
            )
            for fused in (True, False)
        )
        agrees = all(
            bool(jnp.max(jnp.abs(a - b)) <= 0.03 * jnp.max(jnp.abs(b)) + 1e-3)
            for a, b in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True)
        )
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, another is at hand
        log.warning("fused_attention_failed", cause=str(error)[:200], instead="xla")
        return False
    if not agrees:
        log.warning("fused_attention_differs", head_dim=dim, window=window, instead="xla")
    return agrees
