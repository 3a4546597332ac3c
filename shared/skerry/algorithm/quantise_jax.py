"""Quantisation on a device: the arithmetic of ``blocks`` under ``jax.jit``.

Every pass over (blocks, 256) is elementwise, and XLA fuses it. Nothing here waits for the device:
callers decide when to copy.
"""
# pyright: basic

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from skerry.algorithm.blocks import ARITHMETIC, INF_BITS, peaks, widened
from skerry.algorithm.fragments import BLOCK, padded
from skerry.algorithm.schemes import scheme_of


class DevicePlanes(NamedTuple):
    """``Planes`` on the device, and whether all of the input was finite (bool scalar)."""

    codes: Array
    scales: Array
    finite: Array


@partial(jax.jit, static_argnames="scheme")
def quantise(scheme: str, x: Array) -> DevicePlanes:
    """Quantise f32 (blocks*256,); codes mean nothing where ``finite`` is false."""
    rows = x.reshape(-1, BLOCK)
    peak = peaks(rows)
    codes, scales = ARITHMETIC[scheme].encode(jnp, scheme_of(scheme), rows, peak)
    held = jnp.zeros((0,), jnp.uint16) if scales is None else scales
    return DevicePlanes(codes, held, jnp.all(peak < np.uint32(INF_BITS)))


@partial(jax.jit, static_argnames="scheme")
def dequantise(scheme: str, codes: Array, scales: Array) -> Array:
    """Decode u8 (blocks, code_bytes) and u16 (blocks,) or (0,) to f32 (blocks*256,)."""
    whole = jnp.concatenate(ARITHMETIC[scheme].decode(jnp, codes), axis=1).astype(jnp.float32)
    return (widened(scales)[:, None] * whole if scheme_of(scheme).has_scales else whole).reshape(-1)


def slice_norms(sizes: tuple[int, ...], x: Array) -> Array:
    """Return the L2 norm of each slice that a padded vector begins with, f32 (slices,)."""
    lengths = [padded(size) for size in sizes]
    if len(set(lengths)) == 1:  # such as a stack of experts, which may be hundreds
        return jax.vmap(_norm)(x[: sum(lengths)].reshape(len(sizes), -1))
    ends = list(accumulate(lengths))
    spans = zip([0, *ends], ends, strict=False)
    return jnp.stack([_norm(x[start:stop]) for start, stop in spans])


@partial(jax.jit, static_argnames=("scheme", "sizes"))
def encode(scheme: str, sizes: tuple[int, ...], x: Array) -> tuple[DevicePlanes, Array]:
    """Quantise slices and measure them in one program: planes, norms f32 (slices,).

    ``norms`` are those of the decoded value, as a contribution's header carries them. Zeros may
    follow the slices: a vector that is spread over devices has whole blocks on each.
    """
    planes = quantise(scheme, x)
    decoded = dequantise(scheme, planes.codes, planes.scales)
    return planes, slice_norms(sizes, decoded)


def _norm(x: Array) -> Array:
    """Return the L2 norm, scaled by the largest magnitude so that no square leaves f32."""
    top = jnp.max(jnp.abs(x))
    safe = jnp.where(top > 0, top, np.float32(1))
    return top * jnp.sqrt(jnp.sum(jnp.square(x / safe)))
