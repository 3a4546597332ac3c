"""The codec on a device: jnp under ``jax.jit``, with the reference's arithmetic, so equal bits.

Everything is a gather-free elementwise pass over (blocks, 256), which XLA fuses. Bits are moved by
integer operations wherever a float operation could flush a subnormal. Nothing here waits for the
device: callers decide when to copy.
"""
# pyright: basic

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from skerry.algorithm.coarse import FINE_SHIFT, FINEST, POWER_BASE, POWER_UP, QUARTER
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.quantise import (
    BF16_MAX,
    HALF,
    INF_BITS,
    MAGNITUDE,
    SCALE_FLOOR,
    SCHEMES,
    ZERO_PEAK,
    Scheme,
    scheme_of,
)

if TYPE_CHECKING:
    from jax import Array

    from skerry.algorithm.fragments import Fragment


class DevicePlanes(NamedTuple):
    """``Planes`` on the device, and whether all of the input was finite (bool scalar)."""

    codes: Array
    scales: Array
    finite: Array


@partial(jax.jit, static_argnames="scheme")
def quantise(scheme: str, x: Array) -> DevicePlanes:
    """Quantise f32 (blocks*256,); codes mean nothing where ``finite`` is false."""
    kind = scheme_of(scheme)
    rows = x.reshape(-1, BLOCK)
    bits = lax.bitcast_convert_type(rows, jnp.uint32)
    peak = jnp.max(bits & np.uint32(MAGNITUDE), axis=1)
    finite = jnp.all(peak < np.uint32(INF_BITS))
    none = jnp.zeros((0,), jnp.uint16)
    if kind.name == "f32":
        return DevicePlanes(_bytes(bits), none, finite)
    if kind.name == "bf16":
        return DevicePlanes(_bytes(_bf16_words(bits)), none, finite)
    scales = _ternary_scale(rows, peak) if kind.name == "int2" else _scale_bits(kind, peak)
    return DevicePlanes(_pack(kind, _codes(kind, rows, bits, scales)), scales, finite)


@partial(jax.jit, static_argnames="scheme")
def dequantise(scheme: str, codes: Array, scales: Array) -> Array:
    """Decode u8 (blocks, code_bytes) and u16 (blocks,) or (0,) to f32 (blocks*256,)."""
    kind = scheme_of(scheme)
    if kind.name == "f32":
        words = lax.bitcast_convert_type(codes.reshape(-1, BLOCK, 4), jnp.uint32)
        return lax.bitcast_convert_type(words, jnp.float32).reshape(-1)
    if kind.name == "bf16":
        words = lax.bitcast_convert_type(codes.reshape(-1, BLOCK, 2), jnp.uint16)
        return _widen(words).reshape(-1)
    whole = _multiples(kind, codes)
    return (_widen(scales)[:, None] * whole.astype(jnp.float32)).reshape(-1)


@partial(jax.jit, static_argnames=("fragment",))
def slice_norms(fragment: Fragment, x: Array) -> Array:
    """Return the L2 norm of each slice of a padded vector, f32 (slices,)."""
    spans = zip(fragment.offsets[:-1], fragment.offsets[1:], strict=True)
    return jnp.stack([_norm(x[start:stop]) for start, stop in spans])


@partial(jax.jit, static_argnames=("scheme", "fragment"))
def encode(scheme: str, fragment: Fragment, x: Array) -> tuple[DevicePlanes, Array, Array]:
    """Quantise, decode and measure in one program: planes, decoded f32, norms f32 (slices,).

    ``norms`` are those of the decoded value, as a contribution's header carries them.
    """
    planes = quantise(scheme, x)
    decoded = dequantise(scheme, planes.codes, planes.scales)
    return planes, decoded, slice_norms(fragment, decoded)


def _norm(x: Array) -> Array:
    """L2 norm without overflow or underflow of the squares: scaled by the largest magnitude."""
    top = jnp.max(jnp.abs(x))
    safe = jnp.where(top > 0, top, np.float32(1))
    return top * jnp.sqrt(jnp.sum(jnp.square(x / safe)))


def _codes(kind: Scheme, rows: Array, bits: Array, scales: Array) -> Array:
    """Return the code of each element, u8 (blocks, 256), in the low bits."""
    if kind.name == "int2":
        wide = scales.astype(jnp.uint32) << np.uint32(16)
        half = jnp.where(scales > 0, wide - np.uint32(1 << 23), np.uint32(MAGNITUDE))
        beyond = (bits & np.uint32(MAGNITUDE)) > half[:, None]
        signed = ((bits >> np.uint32(30)) & np.uint32(2)) | np.uint32(1)
        return jnp.where(beyond, signed, np.uint32(0)).astype(jnp.uint8)
    y = rows * jnp.where(scales > 0, np.float32(1) / _widen(scales), np.float32(0))[:, None]
    if kind.name == "e3m0":
        image = lax.bitcast_convert_type(y, jnp.uint32)
        raised = ((image & np.uint32(MAGNITUDE)) + np.uint32(POWER_UP)) >> np.uint32(23)
        lowest = np.uint32(POWER_BASE)
        power = jnp.clip(raised, lowest, np.uint32(POWER_BASE + 7)) - lowest
        sign = (image >> np.uint32(28)) & np.uint32(8)
        return jnp.where(power > 0, power | sign, power).astype(jnp.uint8)
    return lax.bitcast_convert_type(jnp.rint(y).astype(jnp.int8), jnp.uint8)


def _ternary_scale(rows: Array, peak: Array) -> Array:
    exponent = lax.bitcast_convert_type(peak >> np.uint32(23), jnp.int32)
    shift = jnp.minimum(np.int32(FINE_SHIFT) - exponent, np.int32(FINEST))
    per_unit = lax.bitcast_convert_type((np.int32(127) + shift) << np.int32(23), jnp.float32)
    unit = lax.bitcast_convert_type((np.int32(127) - shift) << np.int32(23), jnp.float32)
    magnitudes = (jnp.abs(rows) * per_unit[:, None]).astype(jnp.int32)
    top = (lax.bitcast_convert_type(peak, jnp.float32) * per_unit).astype(jnp.int32)
    present = jnp.sum((magnitudes > 0).astype(jnp.int32), axis=1)
    twice = np.int32(2) * jnp.maximum(present, np.int32(1))
    level = lax.div(np.int32(3) * jnp.sum(magnitudes, axis=1), twice)
    third = lax.div(top + np.int32(2), jnp.full_like(top, 3))
    level = jnp.minimum(jnp.maximum(level, third), top)
    return _round_up(SCHEMES["int2"], level.astype(jnp.float32) * unit, peak)


def _scale_bits(kind: Scheme, peak: Array) -> Array:
    return _round_up(kind, lax.bitcast_convert_type(peak, jnp.float32) * kind.step, peak)


def _round_up(kind: Scheme, scale: Array, peak: Array) -> Array:
    raised = (lax.bitcast_convert_type(scale, jnp.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    held = jnp.clip(raised, np.uint32(SCALE_FLOOR), np.uint32(kind.scale_ceiling))
    return jnp.where(peak <= np.uint32(ZERO_PEAK), np.uint32(0), held).astype(jnp.uint16)


def _bf16_words(bits: Array) -> Array:
    low = bits & np.uint32(MAGNITUDE)
    even = (low >> np.uint32(16)) & np.uint32(1)
    words = (low + np.uint32(0x7FFF) + even) >> np.uint32(16)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    return (jnp.minimum(words, np.uint32(BF16_MAX)) | sign).astype(jnp.uint16)


def _widen(words: Array) -> Array:
    """Bf16 bits (u16) to f32 by moving bits."""
    return lax.bitcast_convert_type(words.astype(jnp.uint32) << np.uint32(16), jnp.float32)


def _bytes(words: Array) -> Array:
    """Little-endian bytes of each row, u8 (blocks, bytes)."""
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(words.shape[0], -1)


def _pack(kind: Scheme, codes: Array) -> Array:
    """Return u8 (blocks, code_bytes) from codes u8 (blocks, 256)."""
    two, four, low = np.uint8(2), np.uint8(4), np.uint8(15)
    first, second = codes[:, :HALF], codes[:, HALF:]
    lower = (first & low) | (second << four)
    if kind.name == "int2":
        return lower[:, :QUARTER] | (lower[:, QUARTER:] << two)
    if kind.name != "int8":
        return lower
    return jnp.concatenate([(first >> four) | (second & np.uint8(0xF0)), lower], axis=1)


def _multiples(kind: Scheme, codes: Array) -> Array:
    """Return how many scales each element is, i8 (blocks, 256)."""
    one, four, low, high = np.uint8(1), np.uint8(4), np.uint8(15), np.uint8(0xF0)
    if kind.name == "int2":
        spread = [(codes >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)]
        code = jnp.concatenate(spread, axis=1)
        return _signed(code & one, code & np.uint8(2))
    nibbles = jnp.concatenate([codes & low, codes >> four], axis=1)
    if kind.name == "e3m0":
        power = (one << (nibbles & np.uint8(7))) >> one
        return _signed(power, nibbles & np.uint8(8))
    if kind.name == "int4":
        return lax.bitcast_convert_type((nibbles ^ np.uint8(8)) - np.uint8(8), jnp.int8)
    upper, lower = codes[:, :HALF], codes[:, HALF:]
    first = (upper << four) | (lower & low)
    whole = jnp.concatenate([first, (upper & high) | (lower >> four)], axis=1)
    return lax.bitcast_convert_type(whole, jnp.int8)


def _signed(magnitude: Array, sign: Array) -> Array:
    """Return i8 from a magnitude up to 64, negated where ``sign`` is not 0."""
    positive = lax.bitcast_convert_type(magnitude, jnp.int8)
    return jnp.where(sign > 0, -positive, positive)
