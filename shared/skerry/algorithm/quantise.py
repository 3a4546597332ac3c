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

The two coarse schemes, e3m0 and int2, have their own arithmetic, in ``coarse``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm.coarse import (
    QUARTER,
    pack_quarters,
    power_codes,
    powers,
    ternaries,
    ternary_codes,
    ternary_scale,
)
from skerry.algorithm.fragments import BLOCK
from skerry.errors import Diverged, UnknownScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


def check_joined(planes: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
    """Check that byte planes u8 (n,) make up f32 ``out`` (n,); else raises ValueError."""
    if not 0 < len(planes) <= 4 or any(plane.shape != out.shape for plane in planes):
        msg = f"planes of {[plane.size for plane in planes]} bytes do not make {out.size} f32"
        raise ValueError(msg)


def join(planes: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
    """Put f32 (n,) together from its byte planes u8 (n,), the highest first; what lacks is zero.

    Raises ValueError if a plane is of another length.
    """
    check_joined(planes, out)
    words = out.view(np.uint32)
    np.left_shift(planes[0], 24, out=words, dtype=np.uint32)
    for number, plane in enumerate(planes[1:], start=1):
        words |= np.left_shift(plane, 24 - 8 * number, dtype=np.uint32)


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
    if kind.name == "int2":
        out.scales[:] = _round_up(kind, ternary_scale(rows, peak), peak)
        out.codes[:] = pack_quarters(ternary_codes(rows, out.scales))
        return
    out.scales[:] = scale_bits(kind, peak)
    multiples = rows * reciprocal(out.scales)[:, None]
    if kind.name == "e3m0":
        codes = power_codes(multiples)
    else:
        whole: NDArray[np.int8] = np.rint(multiples).astype(np.int8)
        codes = np.clip(whole, -kind.levels, kind.levels).view(np.uint8)
    first, second = codes[:, :HALF], codes[:, HALF:]
    if kind.name == "int8":
        out.codes[:, :HALF] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))
        out.codes[:, HALF:] = (first & np.uint8(15)) | (second << np.uint8(4))
    else:
        out.codes[:] = (first & np.uint8(15)) | (second << np.uint8(4))


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
    if kind.name == "int2":
        return ternaries(codes)
    if kind.name == "e3m0":
        return powers(codes)
    four, mask = np.uint8(4), np.uint8(0xF0)
    if kind.name == "int4":
        return [(codes << four).view(np.int8) >> np.int8(4), codes.view(np.int8) >> np.int8(4)]
    high, low = codes[:, :HALF], codes[:, HALF:]
    first = ((high << four) | (low & np.uint8(15))).view(np.int8)
    return [first, ((high & mask) | (low >> four)).view(np.int8)]


def scale_bits(kind: Scheme, peak: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """Return the bf16 bits of each block's scale from its peak's f32 bits, both (blocks,)."""
    return _round_up(kind, peak.view(np.float32) * kind.step, peak)


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


def peak(scheme: str, planes: Planes) -> float:
    """Return what no magnitude that planes decode to exceeds; infinity if one is not finite.

    Without scales it is the largest magnitude itself, with them what the largest scale allows.
    """
    kind = scheme_of(scheme)
    if scheme == "f32":
        bits = int((planes.codes.view(np.uint32) & MAGNITUDE).max(initial=0))
    else:  # bf16 all the same: its codes, or the scales of all others
        halves = planes.scales if kind.has_scales else planes.codes.view(np.uint16)
        bits = int((halves & np.uint16(MAGNITUDE >> 16)).max(initial=0)) << 16
    if bits >= INF_BITS:
        return math.inf
    return float(np.uint32(bits).view(np.float32)) * max(1, kind.levels)
