"""Quantisation of padded vectors, block by block: the scheme table and the numpy reference.

Every backend (numpy here, numba in ``kernels``, jax in ``device``) follows the same arithmetic, so
that codes and decoded values are equal to the last bit:

- ``peak = max |x|`` over a block of 256, taken on the integer bits, so that NaN is seen too.
- ``scale = peak * f32(1/levels)`` as bf16 *rounded up* (the peak is never clipped: no bias), held
  between 2**-120 and the largest bf16 whose full code stays finite. A block whose peak is at most
  2**-121 has scale 0 and codes 0: subnormals never enter, since XLA flushes them.
- ``code = rint(x * (f32(1)/scale))``, half to even; decoding is ``f32(scale) * f32(code)``, which
  is exact: 8 bits of significand times at most 7.

int4 with an absmax scale per 256 is what Decoupled DiLoCo (arXiv 2604.21428) finds as good as bf16
on the wire; rounding to nearest is unbiased, and bias is what costs training, not noise.

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
error is 0.190 and 0.272, where an optimal three-level quantiser has 0.190 and 0.264 (Max 1960); an
absmax scale has 0.65 and 0.69. Four levels without a zero, -3, -1, 1, 3, have 0.118 and 0.20, but
take 0.37 bits more after zstd, about what rate-distortion theory asks for that, give every padding
and every parameter that nothing was learnt for a value, and make spiky blocks worse than sending
nothing. Here an element is never further off than it is large, and never more than two thirds of
the peak: so a residual never exceeds twice the largest thing that was to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.core.fragments import BLOCK
from skerry.errors import Diverged, UnknownScheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

HALF = BLOCK // 2
INF_BITS = 0x7F80_0000
MAGNITUDE = 0x7FFF_FFFF
SCALE_FLOOR = 0x0380
"""bf16 bits of 2**-120, the smallest scale."""
ZERO_PEAK = 0x0300_0000
"""f32 bits of 2**-121: at most this, a block is zero."""
BF16_MAX = 0x7F7F
"""bf16 bits of the largest finite value."""
QUARTER = BLOCK // 4
POWER_UP = 0x0046_6666
"""0.55 of an f32's significand: added to 1.45 and more, it carries into the exponent."""
POWER_BASE = 126
"""The exponent field just below that of 1.0, the smallest power of e3m0."""
FINE_SHIFT = 142
"""A block's fine unit is 2**-15 of its peak's power of two: this less its exponent field."""
FINEST = 120
"""The finest unit is 2**-120, so that neither it nor its reciprocal is subnormal."""
_CHUNK = 256
"""Blocks per pass of the reference: 256 KiB of f32, which stays in cache."""


class Planes(NamedTuple):
    """Quantised: ``codes`` u8 (blocks, code_bytes), ``scales`` u16 bf16 bits (blocks,) or (0,)."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a block of 256 f32.

    An element's error is at most ``relative_error`` times its block's largest magnitude, plus
    ``absolute_error``. ``levels`` is the largest multiple of its scale, 0 where there are no
    scales. With ``feedback`` a learner adds what a contribution did not hold to its next one.
    """

    id: int
    name: str
    code_bytes: int
    levels: int
    relative_error: float
    absolute_error: float
    bias: str
    layout: str
    feedback: bool = False

    @property
    def code_bytes_per_block(self) -> int:
        return self.code_bytes

    @property
    def has_scales(self) -> bool:
        return self.levels > 0

    @property
    def scale_ceiling(self) -> int:
        """Bf16 bits of the largest scale whose full code is still a finite f32."""
        return int((np.finfo(np.float32).max / np.float32(self.levels)).view(np.uint32)) >> 16

    @property
    def step(self) -> np.float32:
        """``f32(1 / levels)``: what turns a peak into a scale."""
        return np.float32(1.0 / self.levels)


_NONE = "none: exact"
_NEAREST = "none: round to nearest, half to even, and the scale is never too small to hold the peak"

SCHEMES: Mapping[str, Scheme] = MappingProxyType(
    {
        "f32": Scheme(1, "f32", 4 * BLOCK, 0, 0.0, 0.0, _NONE, "little-endian f32"),
        "bf16": Scheme(
            2,
            "bf16",
            2 * BLOCK,
            0,
            2.0**-8,
            2.0**-134,
            "none: round to nearest even; only beyond 3.39e38 towards zero, to stay finite",
            "little-endian bf16",
        ),
        "int8": Scheme(
            3,
            "int8",
            BLOCK,
            127,
            (1 + 2.0**-7) / 254 + 2.0**-20,
            2.0**-121,
            _NEAREST,
            "128 bytes of high nibbles, 128 of low ones; byte i holds elements i and i+128",
        ),
        "int4": Scheme(
            4,
            "int4",
            HALF,
            7,
            (1 + 2.0**-7) / 14 + 2.0**-20,
            2.0**-121,
            _NEAREST,
            "two's complement; byte i holds element i in its low and i+128 in its high nibble",
        ),
        "e3m0": Scheme(
            5,
            "e3m0",
            HALF,
            64,
            0.275 * (1 + 2.0**-7) + 2.0**-20,
            2.0**-117,
            "below 0.5 % along a Gaussian or Laplacian block, by the choice of where to round up",
            "sign, then exponent; byte i holds element i in its low and i+128 in its high nibble",
        ),
        "int2": Scheme(
            6,
            "int2",
            QUARTER,
            1,
            2 / 3 + 2.0**-15,
            2.0**-121,
            "towards zero, by a fifth along a Gaussian block: error feedback makes up for it",
            "sign, then magnitude; byte i holds elements i, i+64, i+128, i+192, low bits first",
            feedback=True,
        ),
    }
)
"""Every scheme by name; an id is never reused for other bytes."""


def scheme_of(name: str) -> Scheme:
    """Return the scheme called ``name``; raises UnknownScheme."""
    found = SCHEMES.get(name)
    if found is None:
        known = ", ".join(SCHEMES)
        msg = f"there is no quantisation scheme {name!r}; known: {known}"
        raise UnknownScheme(msg)
    return found


def raw_bytes(scheme: str, blocks: int) -> int:
    """Return the size of ``blocks`` blocks before compression: scales, then codes."""
    kind = scheme_of(scheme)
    return blocks * (kind.code_bytes + 2 * kind.has_scales)


def allocate(scheme: str, blocks: int) -> Planes:
    """Return planes for ``blocks`` blocks with undefined contents."""
    kind = scheme_of(scheme)
    codes = np.empty((blocks, kind.code_bytes), np.uint8)
    return Planes(codes, np.empty(blocks if kind.has_scales else 0, np.uint16))


def diverged() -> Diverged:
    """Return the error for a vector that holds NaN or infinity."""
    return Diverged("a vector to be quantised holds NaN or infinity; lower the learning rate")


def as_blocks(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """View a contiguous f32 vector (blocks*256,) as (blocks, 256); else raises ValueError."""
    if x.dtype != np.float32 or x.ndim != 1 or x.size % BLOCK or not x.flags.c_contiguous:
        msg = f"expected contiguous f32 in whole blocks of {BLOCK}, got {x.dtype} {x.shape}"
        raise ValueError(msg)
    return x.reshape(-1, BLOCK)


def check_planes(scheme: str, planes: Planes, out: NDArray[np.float32] | None) -> Scheme:
    """Check shapes and dtypes of ``planes`` (and ``out``) against the scheme; else ValueError."""
    kind = scheme_of(scheme)
    codes, scales = planes
    blocks = codes.shape[0]
    shaped = codes.shape[1:] == (kind.code_bytes,) and scales.shape == (blocks * kind.has_scales,)
    typed = codes.dtype == np.uint8 and scales.dtype == np.uint16
    if not (shaped and typed and codes.flags.c_contiguous and scales.flags.c_contiguous):
        msg = (
            f"codes {codes.dtype} {codes.shape}, scales {scales.dtype} {scales.shape}: no {scheme}"
        )
        raise ValueError(msg)
    if out is not None and as_blocks(out).shape[0] != blocks:
        msg = f"an output of {out.size} elements does not hold {blocks} blocks"
        raise ValueError(msg)
    return kind


def quantise(scheme: str, x: NDArray[np.float32]) -> Planes:
    """Quantise a padded vector f32 (blocks*256,); raises Diverged if anything is not finite."""
    kind = scheme_of(scheme)
    rows = as_blocks(x)
    planes = allocate(scheme, rows.shape[0])
    for first in range(0, rows.shape[0], _CHUNK):
        part = slice(first, first + _CHUNK)
        magnitude = rows[part].view(np.uint32) & np.uint32(MAGNITUDE)
        peak = magnitude.max(axis=1)
        if bool((peak >= INF_BITS).any()):
            raise diverged()
        _quantise_rows(kind, rows[part], peak, Planes(planes.codes[part], planes.scales[part]))
    return planes


def dequantise(
    scheme: str, planes: Planes, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Decode planes to f32 (blocks*256,), into ``out`` if given; ValueError on wrong shapes."""
    kind = check_planes(scheme, planes, out)
    blocks = planes.codes.shape[0]
    vector = np.empty(blocks * BLOCK, np.float32) if out is None else out
    rows = as_blocks(vector)
    for first in range(0, blocks, _CHUNK):
        part = slice(first, first + _CHUNK)
        _dequantise_rows(kind, Planes(planes.codes[part], planes.scales[part]), rows[part])
    return vector


def _quantise_rows(
    kind: Scheme, rows: NDArray[np.float32], peak: NDArray[np.uint32], out: Planes
) -> None:
    if kind.name == "f32":
        out.codes[:] = rows.astype("<f4", copy=False).view(np.uint8)
        return
    if kind.name == "bf16":
        bits = rows.view(np.uint32)
        half = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        words = (half >> np.uint32(16)).astype("<u2")
        sign = words & np.uint16(0x8000)
        out.codes[:] = (np.minimum(words ^ sign, np.uint16(BF16_MAX)) | sign).view(np.uint8)
        return
    out.scales[:] = ternary_scale(rows, peak) if kind.name == "int2" else scale_bits(kind, peak)
    codes = _codes_of(kind, rows, out.scales)
    first, second = codes[:, :HALF], codes[:, HALF:]
    if kind.name == "int8":
        out.codes[:, :HALF] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))
        out.codes[:, HALF:] = (first & np.uint8(15)) | (second << np.uint8(4))
    elif kind.name == "int2":
        pairs = first | (second << np.uint8(4))
        out.codes[:] = pairs[:, :QUARTER] | (pairs[:, QUARTER:] << np.uint8(2))
    else:
        out.codes[:] = (first & np.uint8(15)) | (second << np.uint8(4))


def _codes_of(
    kind: Scheme, rows: NDArray[np.float32], scales: NDArray[np.uint16]
) -> NDArray[np.uint8]:
    """Return the code of each element, u8 (blocks, 256), in the low bits."""
    if kind.name == "int2":
        bits = rows.view(np.uint32)
        beyond = (bits & np.uint32(MAGNITUDE)) > half_scale(scales)[:, None]
        sign = (bits >> np.uint32(30)) & np.uint32(2)
        return np.where(beyond, sign | np.uint32(1), np.uint32(0)).astype(np.uint8)
    y = rows * reciprocal(scales)[:, None]
    if kind.name == "e3m0":
        bits = y.view(np.uint32)
        raised = ((bits & np.uint32(MAGNITUDE)) + np.uint32(POWER_UP)) >> np.uint32(23)
        power = np.clip(raised, POWER_BASE, POWER_BASE + 7) - np.uint32(POWER_BASE)
        sign = (bits >> np.uint32(28)) & np.uint32(8)
        return np.where(power > 0, power | sign, power).astype(np.uint8)
    codes = np.rint(y).astype(np.int8)
    return np.clip(codes, -kind.levels, kind.levels).view(np.uint8)


def _dequantise_rows(kind: Scheme, planes: Planes, out: NDArray[np.float32]) -> None:
    if kind.name == "f32":
        out[:] = planes.codes.view("<f4")
        return
    if kind.name == "bf16":
        out.view(np.uint32)[:] = planes.codes.view("<u2").astype(np.uint32) << np.uint32(16)
        return
    scales = (planes.scales.astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]
    parts = _multiples(kind, planes.codes)
    width = BLOCK // len(parts)
    for number, part in enumerate(parts):
        place = slice(number * width, (number + 1) * width)
        np.multiply(scales, part, out=out[:, place], dtype=np.float32)


def _multiples(kind: Scheme, codes: NDArray[np.uint8]) -> list[NDArray[np.int8]]:
    """Return how many scales each element is, i8: halves or quarters of a block, in order."""
    two, four, mask = np.uint8(2), np.uint8(4), np.uint8(0xF0)
    if kind.name == "int8":
        high, low = codes[:, :HALF], codes[:, HALF:]
        first = ((high << four) | (low & np.uint8(15))).view(np.int8)
        return [first, ((high & mask) | (low >> four)).view(np.int8)]
    if kind.name == "int4":
        return [(codes << four).view(np.int8) >> np.int8(4), codes.view(np.int8) >> np.int8(4)]
    if kind.name == "e3m0":
        parts = [codes & np.uint8(15), codes >> four]
        powers = [(np.uint8(1) << (part & np.uint8(7))) >> np.uint8(1) for part in parts]
        signs = [part & np.uint8(8) for part in parts]
    else:
        parts = [(codes >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)]
        powers = [part & np.uint8(1) for part in parts]
        signs = [part & two for part in parts]
    return [
        np.where(sign > 0, -power.view(np.int8), power.view(np.int8))
        for sign, power in zip(signs, powers, strict=True)
    ]


def scale_bits(kind: Scheme, peak: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Return the bf16 bits of each block's scale from its peak's f32 bits, both (blocks,)."""
    return _round_up(kind, peak.view(np.float32) * kind.step, peak)


def ternary_scale(rows: NDArray[np.float32], peak: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Return the bf16 bits of each int2 block's scale, (blocks,), from the block and its peak.

    1.5 times the mean magnitude of what is not zero, but a third of the peak at least, and the
    peak at most; all by integers of at most 26 bits, in units of 2**-15 of the peak's power of two.
    """
    shift = np.minimum(FINE_SHIFT - (peak >> np.uint32(23)).astype(np.int32), FINEST)
    per_unit = ((127 + shift).astype(np.uint32) << np.uint32(23)).view(np.float32)
    unit = ((127 - shift).astype(np.uint32) << np.uint32(23)).view(np.float32)
    magnitudes = (np.abs(rows) * per_unit[:, None]).astype(np.int32)
    top = (peak.view(np.float32) * per_unit).astype(np.int32)
    present = np.maximum((magnitudes > 0).sum(axis=1, dtype=np.int32), 1)
    level = (3 * magnitudes.sum(axis=1, dtype=np.int32)) // (2 * present)
    level = np.minimum(np.maximum(level, (top + 2) // 3), top)
    return _round_up(SCHEMES["int2"], level.astype(np.float32) * unit, peak)


def half_scale(scales: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """Return the f32 bits of half of each scale; beyond any value where the scale is 0."""
    half = (scales.astype(np.uint32) << np.uint32(16)) - np.uint32(1 << 23)
    return np.where(scales > 0, half, np.uint32(MAGNITUDE))


def _round_up(
    kind: Scheme, scale: NDArray[np.float32], peak: NDArray[np.uint32]
) -> NDArray[np.uint16]:
    """Return bf16 bits not below ``scale``, within what the scheme allows; 0 for a zero block."""
    raised = (scale.view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)
    bits = np.clip(raised, SCALE_FLOOR, kind.scale_ceiling)
    return np.where(peak <= ZERO_PEAK, np.uint32(0), bits).astype(np.uint16)


def reciprocal(scales: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return ``f32(1) / scale`` for each block, 0 where the scale is 0."""
    values = (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)
    zero = np.zeros_like(values)
    return np.divide(np.float32(1), values, out=zero, where=values > 0)


def finite(scheme: str, planes: Planes) -> bool:
    """Tell whether every value decodes to a finite number: infinity and NaN share one exponent."""
    if scheme_of(scheme).has_scales:
        return bool((planes.scales & 0x7F80 != 0x7F80).all())
    if scheme == "bf16":
        return bool((planes.codes.view(np.uint16) & 0x7F80 != 0x7F80).all())
    return bool((planes.codes.view(np.uint32) & 0x7F800000 != 0x7F800000).all())
