"""Rotary positions (arXiv 2104.09864), also as Llama 3 and YaRN (2309.00071) stretch them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.models.arch import Rope

Angles: TypeAlias = tuple[Any, Any]
"""Cosines and sines f32 [batch or 1, seq, 1, half]."""


def angles(rope: Rope, head_dim: int, seq: int, positions: jax.Array | None = None) -> Angles:
    """Return the angles of ``positions`` int32 [batch, seq], by default 0 to ``seq`` - 1."""
    if positions is None:
        return _counted(rope, head_dim, seq)
    turn = jnp.asarray(frequencies(rope, head_dim), jnp.float32)
    angle = positions.astype(jnp.float32)[:, :, None, None] * turn[None, None, None]
    gain = jnp.float32(rope.gain)
    return gain * jnp.cos(angle), gain * jnp.sin(angle)


def frequencies(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    """Return the angle that each pair of a head's dimensions turns by per position."""
    half = head_dim // 2
    turned = int(rope.share * head_dim // 2)
    angle = np.zeros(half)
    angle[:turned] = rope.theta ** (-np.arange(turned) * 2.0 / head_dim)
    if rope.kind == "yarn":
        return angle * (1 - yarn_share(rope, half) * (1 - 1 / rope.factor))
    if rope.kind != "llama3":
        return angle / rope.factor
    length = 2 * math.pi / angle
    share = (rope.original / length - rope.low) / (rope.high - rope.low)
    return angle * (np.clip(share, 0, 1) + (1 - np.clip(share, 0, 1)) / rope.factor)


def yarn_share(rope: Rope, half: int) -> NDArray[np.float64]:
    """Return the degree to which YaRN divides each pair's frequency: 0 not at all, 1 by factor."""

    def pair_of(turns: float) -> float:
        return half * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_of(rope.high), pair_of(rope.low)
    if rope.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    pairs: NDArray[np.float64] = np.arange(half, dtype=np.float64)
    return np.clip((pairs - first) / (last - first if last != first else 1e-3), 0.0, 1.0)


@lru_cache(maxsize=16)
def _counted(rope: Rope, head_dim: int, seq: int) -> Angles:
    """Return cosines and sines f32 [1, seq, 1, half], cached so that a program holds one copy."""
    angle = (np.arange(seq)[:, None] * frequencies(rope, head_dim))[None, :, None, :]
    cos, sin = rope.gain * np.cos(angle), rope.gain * np.sin(angle)
    return cos.astype(np.float32), sin.astype(np.float32)


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Turn ``[batch, seq, heads, head_dim]`` by its positions, in float32."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
