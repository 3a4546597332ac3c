"""The arithmetic of each quantisation scheme, written once for numpy and for JAX.

Blocks are rows: f32 (blocks, 256) becomes codes u8 (blocks, code_bytes) and scales u16 (blocks,),
bf16 bits. ``xp`` is ``numpy`` or ``jax.numpy``; every backend gives equal bits. Bits are moved by
integer operations wherever a float operation could flush a subnormal, as XLA does.

- ``peak = max |x|`` over a block, taken on the integer bits, so that NaN is seen too.
- ``scale = peak * f32(1/levels)`` as bf16 *rounded up* (the peak is never clipped: no bias), held
  between 2**-120 and the largest bf16 whose largest multiple stays finite. A block whose peak is at
  most 2**-121 has scale 0 and codes 0.
- ``code = rint(x * (f32(1)/scale))``, half to even; decoding is ``f32(scale) * f32(code)``, which
  is exact: 8 bits of significand times at most 7.

Decoupled DiLoCo (arXiv 2604.21428) finds int4 with an absmax scale per 256 as good as bf16 on the
wire. Rounding to nearest is unbiased, and what harms training is bias, not noise.

**e3m0** is the FP4 of Streaming DiLoCo (arXiv 2501.18512): a sign and three bits of exponent, so 0
and ``+-scale * 2**k`` for k = 0..6, with the peak at the top. ``y = x * (f32(1)/scale)`` rounds
down to 2**k below 1.45 * 2**k and up from there on, by adding 0.55 to the significand of y as an
integer and reading the exponent; below 0.725 it becomes 0. A threshold halfway, at 1.5, would
shrink a Gaussian or Laplacian block by 3 % along itself, since a power's cell reaches twice as far
up as down; 1.45 leaves its length within 0.5 % and costs nothing in direction.

**int2** has one level, ``scale`` times -1, 0 or 1, and error feedback. Its scale is 1.5 times the
mean magnitude of the elements that are not zero, at least a third of the peak and at most the peak.
Magnitudes are summed as integers, cut off at 2**-15 of the peak's power of two, so the order of
the sum changes nothing. A value beyond half the scale becomes 1 or -1. The error is 0.190 of a
Gaussian block's energy and 0.271 of a Laplacian block's; the best three levels leave 0.190 and
0.264 (Max 1960), a scale at the peak 0.65 and 0.69. An element's error is at most its magnitude and
two thirds of its block's peak, so a residual is at most twice the largest value to be sent.
"""
# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import SCHEMES, Scheme

Array: TypeAlias = Any
"""A numpy or a JAX array."""
Numpy: TypeAlias = Any
"""The module ``numpy`` or ``jax.numpy``."""
Encoded: TypeAlias = tuple[Array, Array | None]
"""Codes u8 (blocks, code_bytes), and scales u16 (blocks,) of a scheme that has them."""

HALF, QUARTER = BLOCK // 2, BLOCK // 4
INF_BITS, MAGNITUDE = 0x7F80_0000, 0x7FFF_FFFF
SCALE_FLOOR = 0x0380
"""bf16 bits of 2**-120, the smallest scale."""
ZERO_PEAK = 0x0300_0000
"""f32 bits of 2**-121: a block whose peak is at most this is stored as zero."""
BF16_MAX = 0x7F7F
"""bf16 bits of the largest finite value."""
POWER_UP = 0x0046_6666
"""0.55 of an f32's significand: added to 1.45 and more, it carries into the exponent."""
POWER_BASE = 126
"""The exponent field just below that of 1.0, the smallest power of e3m0."""
FINE_SHIFT = 142
"""int2 counts in 2**(e - FINE_SHIFT), e the exponent field of the peak: 2**-15 of its power."""
FINEST = 120
"""The finest unit is 2**-120, so that neither it nor its reciprocal is subnormal."""

_U32 = np.uint32
_U8 = np.uint8
_LOW, _HIGH, _FOUR = _U8(15), _U8(0xF0), _U8(4)


class BlockArithmetic(NamedTuple):
    """One scheme: ``encode(xp, scheme, rows, peak)`` gives codes and scales, or None for these.

    ``decode(xp, codes)`` gives each block whole, or its halves or quarters in order: f32 values, or
    i8 multiples of the scale.
    """

    encode: Callable[[Numpy, Scheme, Array, Array], Encoded]
    decode: Callable[[Numpy, Array], Sequence[Array]]


def peaks(rows: Array) -> Array:
    """Return the f32 bits of each block's largest magnitude, u32 (blocks,)."""
    return (rows.view(np.uint32) & _U32(MAGNITUDE)).max(axis=1)


def widened(bits: Array) -> Array:
    """Return bf16 bits u16 as the f32 that they stand for, of the same shape."""
    return (bits.astype(np.uint32) << _U32(16)).view(np.float32)


def rounded_up(xp: Numpy, scheme: Scheme, scale: Array, peak: Array) -> Array:
    """Return bf16 bits not below ``scale``, within what the scheme allows; 0 for a zero block."""
    raised = (scale.view(np.uint32) + _U32(0xFFFF)) >> _U32(16)
    held = xp.clip(raised, _U32(SCALE_FLOOR), _U32(scheme.scale_ceiling))
    return xp.where(peak <= _U32(ZERO_PEAK), _U32(0), held).astype(np.uint16)


def step(scheme: Scheme) -> np.float32:
    """Return ``f32(1 / levels)``, which turns a peak into a scale."""
    return np.float32(1.0 / scheme.levels)


def _peak_scales(xp: Numpy, scheme: Scheme, peak: Array) -> Array:
    return rounded_up(xp, scheme, peak.view(np.float32) * step(scheme), peak)


def _multiples(xp: Numpy, rows: Array, scales: Array) -> Array:
    """Return ``rows / scale`` as ``rows * (f32(1)/scale)``, 0 where the scale is 0."""
    positive = scales > 0
    wide = xp.where(positive, widened(scales), np.float32(1))
    return rows * xp.where(positive, np.float32(1) / wide, np.float32(0))[:, None]


def _nearest(xp: Numpy, scheme: Scheme, rows: Array, peak: Array) -> tuple[Array, Array]:
    """Return the two's complement of each multiple, u8 (blocks, 256), and the scales."""
    scales = _peak_scales(xp, scheme, peak)
    return xp.rint(_multiples(xp, rows, scales)).astype(np.int8).view(np.uint8), scales


def _nibbles(codes: Array) -> Array:
    """Return the low nibbles of both halves, one byte for two elements."""
    return (codes[:, :HALF] & _LOW) | (codes[:, HALF:] << _FOUR)


def _signed(xp: Numpy, magnitude: Array, sign: Array) -> Array:
    """Return a magnitude up to 64 as i8, negated where ``sign`` is not 0."""
    positive = magnitude.view(np.int8)
    return xp.where(sign > 0, -positive, positive)


def _encode_bf16(xp: Numpy, _scheme: Scheme, rows: Array, _peak: Array) -> Encoded:
    bits = rows.view(np.uint32)
    half = bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))
    words = (half >> _U32(16)).astype(np.uint16)
    sign = words & np.uint16(0x8000)
    return (xp.minimum(words ^ sign, np.uint16(BF16_MAX)) | sign).view(np.uint8), None


def _encode_integers(xp: Numpy, scheme: Scheme, rows: Array, peak: Array) -> Encoded:
    codes, scales = _nearest(xp, scheme, rows, peak)
    low = scheme.low_bits
    high = _nibbles((codes.view(np.int8) >> np.int8(low)).view(np.uint8))
    if not low:
        return high, scales
    width = BLOCK * low // 8
    fine = codes & _U8(2**low - 1)
    packed = fine[:, :width]
    for number in range(1, 8 // low):
        part = fine[:, number * width : (number + 1) * width]
        packed = packed | (part << _U8(number * low))
    return xp.concatenate([high, packed], axis=1), scales


def _decode_integers(low: int, xp: Numpy, codes: Array) -> Sequence[Array]:
    four, high = np.int8(4), codes[:, :HALF]
    halves = (high << _FOUR).view(np.int8) >> four, high.view(np.int8) >> four
    if not low:
        return halves
    mask = _U8(2**low - 1)
    fine = [(codes[:, HALF:] >> _U8(shift)) & mask for shift in range(0, 8, low)]
    coarse = xp.concatenate(halves, axis=1) << np.int8(low)
    return (coarse | xp.concatenate(fine, axis=1).view(np.int8),)


def _encode_e3m0(xp: Numpy, scheme: Scheme, rows: Array, peak: Array) -> Encoded:
    scales = _peak_scales(xp, scheme, peak)
    bits = _multiples(xp, rows, scales).view(np.uint32)
    raised = ((bits & _U32(MAGNITUDE)) + _U32(POWER_UP)) >> _U32(23)
    power = xp.clip(raised, _U32(POWER_BASE), _U32(POWER_BASE + 7)) - _U32(POWER_BASE)
    sign = (bits >> _U32(28)) & _U32(8)
    return _nibbles(xp.where(power > 0, power | sign, power).astype(np.uint8)), scales


def _decode_e3m0(xp: Numpy, codes: Array) -> Sequence[Array]:
    one = _U8(1)
    halves = (codes & _LOW, codes >> _FOUR)
    return [_signed(xp, (one << (h & _U8(7))) >> one, h & _U8(8)) for h in halves]


def _ternary_scales(xp: Numpy, scheme: Scheme, rows: Array, peak: Array) -> Array:
    """Return each int2 block's scale from its values and the f32 bits of its peak.

    It sums integers of at most 26 bits in exact units of 2**-15 of the peak's power of two.
    """
    exponent = (peak >> _U32(23)).view(np.int32)
    shift = xp.minimum(np.int32(FINE_SHIFT) - exponent, np.int32(FINEST))
    per_unit = ((np.int32(127) + shift) << np.int32(23)).view(np.float32)
    unit = ((np.int32(127) - shift) << np.int32(23)).view(np.float32)
    magnitudes = (xp.abs(rows) * per_unit[:, None]).astype(np.int32)
    top = (peak.view(np.float32) * per_unit).astype(np.int32)
    present = xp.maximum((magnitudes > 0).sum(axis=1, dtype=np.int32), np.int32(1))
    level = np.int32(3) * magnitudes.sum(axis=1, dtype=np.int32) // (np.int32(2) * present)
    level = xp.minimum(xp.maximum(level, (top + np.int32(2)) // np.int32(3)), top)
    return rounded_up(xp, scheme, level.astype(np.float32) * unit, peak)


def _encode_int2(xp: Numpy, scheme: Scheme, rows: Array, peak: Array) -> Encoded:
    scales = _ternary_scales(xp, scheme, rows, peak)
    wide = (scales.astype(np.uint32) << _U32(16)) - _U32(1 << 23)
    half = xp.where(scales > 0, wide, _U32(MAGNITUDE))
    bits = rows.view(np.uint32)
    signed = ((bits >> _U32(30)) & _U32(2)) | _U32(1)
    beyond = (bits & _U32(MAGNITUDE)) > half[:, None]
    codes = _nibbles(xp.where(beyond, signed, _U32(0)).astype(np.uint8))
    return codes[:, :QUARTER] | (codes[:, QUARTER:] << _U8(2)), scales


def _decode_int2(xp: Numpy, codes: Array) -> Sequence[Array]:
    quarters = (codes >> _U8(shift) for shift in (0, 2, 4, 6))
    return [_signed(xp, q & _U8(1), q & _U8(2)) for q in quarters]


ARITHMETIC: Mapping[str, BlockArithmetic] = {
    "f32": BlockArithmetic(
        lambda _xp, _scheme, rows, _peak: (rows.view(np.uint8), None),
        lambda _xp, codes: (codes.view(np.float32),),
    ),
    "bf16": BlockArithmetic(_encode_bf16, lambda _xp, codes: (widened(codes.view(np.uint16)),)),
    **{
        name: BlockArithmetic(_encode_integers, partial(_decode_integers, SCHEMES[name].low_bits))
        for name in ("int8", "int6", "int5", "int4")
    },
    "e3m0": BlockArithmetic(_encode_e3m0, _decode_e3m0),
    "int2": BlockArithmetic(_encode_int2, _decode_int2),
}
