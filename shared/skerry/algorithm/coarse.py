"""The coarse schemes, e3m0 and int2: how their codes are made and what they stand for, in numpy.

**e3m0** is the FP4 of Streaming DiLoCo (arXiv 2501.18512): a sign and three bits of exponent, so 0
and ``+-scale * 2**k`` for k = 0..6, with the peak at the top. ``y = x * (f32(1)/scale)`` goes to
the power of two below 1.45 * 2**k and to the one above from there on, by adding 0.55 to the
significand of y as an integer and reading the exponent; below 0.725 it goes to 0. A value that is
not near 0 is off by at most 38 % of itself, any by at most 28 % of the peak. Halfway, 1.5, would
shrink a Gaussian or Laplacian block by 3 % along itself, since a power's cell reaches twice as far
up as down; 1.45 leaves its length within 0.5 % and costs nothing in direction (cosine 0.981).

**int2** has one level, ``scale`` times -1, 0 or 1, and error feedback: what a contribution did not
hold is added to the learner's next one (``skerry_learner.sync.residual``). Its scale is 1.5 times
the mean magnitude of what is not zero, but from a third of the peak to all of it. Magnitudes are
summed as integers, cut off at 2**-15 of the peak's power of two, so that no order of adding shows.
Whatever lies beyond half a scale becomes one. Of a Gaussian and a Laplacian block's energy the
error is 0.190 and 0.271, where the best three levels leave 0.190 and 0.264 (Max 1960) and a scale
at the peak 0.65 and 0.69. Four levels without a zero (1 and 3.5 times 0.55 of the mean) leave 0.118
and 0.189, but hold 0.4 bits more of entropy; with feedback the small model's continuation of
``tests/unit/wire/test_low_lr_continuation.py`` gained by both what it does by f32, within 0.4 %.
They would give a value to all padding, and spiky blocks an error larger than they are. Here no
element is further off than it is large, nor than two thirds of its block's peak: a residual never
exceeds twice the largest thing that was to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32s = NDArray[np.float32]
    U32s = NDArray[np.uint32]
    U8s = NDArray[np.uint8]
    I8s = NDArray[np.int8]

QUARTER = BLOCK // 4
POWER_UP = 0x0046_6666
"""0.55 of an f32's significand: added to 1.45 and more, it carries into the exponent."""
POWER_BASE = 126
"""The exponent field just below that of 1.0, the smallest power of e3m0."""
FINE_SHIFT = 142
"""A block's fine unit is 2**-15 of its peak's power of two: this less its exponent field."""
FINEST = 120
"""The finest unit is 2**-120, so that neither it nor its reciprocal is subnormal."""
_MAGNITUDE = np.uint32(0x7FFF_FFFF)


def power_codes(y: F32s) -> U8s:
    """Return the e3m0 code of each multiple of a scale, in the low four bits."""
    bits = y.view(np.uint32)
    raised = ((bits & _MAGNITUDE) + np.uint32(POWER_UP)) >> np.uint32(23)
    held: U32s = np.clip(raised, POWER_BASE, POWER_BASE + 7)
    power = held - np.uint32(POWER_BASE)
    sign = (bits >> np.uint32(28)) & np.uint32(8)
    return np.where(power > 0, power | sign, power).astype(np.uint8)


def powers(codes: U8s) -> list[I8s]:
    """Return how many scales each element of e3m0 bytes is, for both halves of a block."""
    parts = [codes & np.uint8(15), codes >> np.uint8(4)]
    one = np.uint8(1)
    return [_signed((one << (p & np.uint8(7))) >> one, p & np.uint8(8)) for p in parts]


def ternary_scale(rows: F32s, peak: U32s) -> F32s:
    """Return each int2 block's scale f32 (blocks,), not yet bf16, from the block and its peak.

    By integers of at most 26 bits and exact products, in units of 2**-15 of the peak's power of
    two; ``peak`` holds f32 bits.
    """
    shift = np.minimum(FINE_SHIFT - (peak >> np.uint32(23)).astype(np.int32), FINEST)
    per_unit = ((127 + shift).astype(np.uint32) << np.uint32(23)).view(np.float32)
    unit = ((127 - shift).astype(np.uint32) << np.uint32(23)).view(np.float32)
    magnitudes = (np.abs(rows) * per_unit[:, None]).astype(np.int32)
    top = (peak.view(np.float32) * per_unit).astype(np.int32)
    present = np.maximum((magnitudes > 0).sum(axis=1, dtype=np.int32), 1)
    level = (3 * magnitudes.sum(axis=1, dtype=np.int32)) // (2 * present)
    level = np.minimum(np.maximum(level, (top + 2) // 3), top)
    scale: F32s = level.astype(np.float32) * unit
    return scale


def ternary_codes(rows: F32s, scales: NDArray[np.uint16]) -> U8s:
    """Return the int2 code of each element, in the low two bits, from bf16 scales (blocks,)."""
    half = (scales.astype(np.uint32) << np.uint32(16)) - np.uint32(1 << 23)
    bits = rows.view(np.uint32)
    beyond = (bits & _MAGNITUDE) > np.where(scales > 0, half, _MAGNITUDE)[:, None]
    sign = (bits >> np.uint32(30)) & np.uint32(2)
    return np.where(beyond, sign | np.uint32(1), np.uint32(0)).astype(np.uint8)


def pack_quarters(codes: U8s) -> U8s:
    """Return four codes a byte, u8 (blocks, 64), from u8 (blocks, 256)."""
    packed = codes[:, :QUARTER].copy()
    for number in (1, 2, 3):
        part = codes[:, number * QUARTER : (number + 1) * QUARTER]
        packed |= part << np.uint8(2 * number)
    return packed


def ternaries(codes: U8s) -> list[I8s]:
    """Return how many scales each element of int2 bytes is, for the quarters of a block."""
    parts = [codes >> np.uint8(shift) for shift in (0, 2, 4, 6)]
    return [_signed(p & np.uint8(1), p & np.uint8(2)) for p in parts]


def _signed(magnitude: U8s, sign: U8s) -> I8s:
    """Return a magnitude up to 64, negated where ``sign`` is not 0."""
    positive = magnitude.view(np.int8)
    return np.where(sign > 0, -positive, positive)
