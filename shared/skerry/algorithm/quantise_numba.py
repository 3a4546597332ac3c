"""Quantisation in numba: one pass, the GIL released, equal to ``quantise_numpy`` bit by bit.

A scheme without kernels here is left to ``quantise_numpy``.

Loops are written so that LLVM vectorises them: fixed trip counts of half a block, integer maxima
(float maxima would need fast-math to ignore NaN), int32 casts between f32 and codes. Kernels are
compiled when this module is imported and cached on disk where numba finds a writable folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from skerry.algorithm import quantise_numpy as reference
from skerry.algorithm.blocks import (
    BF16_MAX,
    FINE_SHIFT,
    FINEST,
    HALF,
    INF_BITS,
    MAGNITUDE,
    POWER_BASE,
    POWER_UP,
    QUARTER,
    SCALE_FLOOR,
    ZERO_PEAK,
    step,
)
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import (
    Planes,
    allocate,
    as_blocks,
    check_joined,
    check_planes,
    diverged,
)
from skerry.algorithm.schemes import scheme_of

F32s = NDArray[np.float32]
U32s = NDArray[np.uint32]
I32s = NDArray[np.int32]
U16s = NDArray[np.uint16]
U8s = NDArray[np.uint8]
PackBlock = Callable[[F32s, int, np.float32, I32s, U8s], None]
Decoder = Callable[[U8s, U16s, F32s], None]

F = TypeVar("F", bound="Callable[..., object]")

u8, u16, u32, i32, i64 = types.uint8, types.uint16, types.uint32, types.int32, types.int64
f32, f64, i1 = types.float32, types.float64, types.boolean

_MAGNITUDE, _INF, _ZERO_PEAK, _FLOOR, _POWER_UP, _POWER_BASE, _FINE_SHIFT, _FINEST = (
    np.int32(n)
    for n in (
        *(MAGNITUDE, INF_BITS, ZERO_PEAK, SCALE_FLOOR),
        *(POWER_UP, POWER_BASE, FINE_SHIFT, FINEST),
    )
)
_BF16_MAX = np.uint32(BF16_MAX)
_ROUND_UP, _BIAS = np.int32(0xFFFF), np.int32(127)
_ROUND = np.float32(12_582_912.0)
"""1.5 * 2**23: adding and subtracting it rounds a small f32 to an integer, half to even."""
_N0, _N1, _N2, _N3, _N4, _N6, _N7, _N8 = (np.int32(n) for n in (0, 1, 2, 3, 4, 6, 7, 8))
_N15, _N16, _N23, _N28, _N30 = (np.int32(n) for n in (15, 16, 23, 28, 30))


def array(scalar: types.Type, dims: int, *, written: bool = False) -> types.Type:
    """Return numba's type of a C-contiguous array; one that is only read may be read-only."""
    return types.Array(scalar, dims, "C", readonly=not written)


def four(item: types.Type) -> types.Type:
    """Return numba's type of a tuple of four."""
    return types.UniTuple(item, 4)


def compiled(*signature: types.Type, fastmath: bool | set[str] = False) -> Callable[[F], F]:
    """Compile a function for these argument types, without the GIL, cached on disk.

    Where no cache folder is writable (a read-only image) it is compiled at every start instead.
    """

    def decorate(function: F) -> F:
        # Numba numbers kernels that share a name: if two processes compile one factory's kernels at
        # the same time, one would load the wrong kernel.
        made_of = [str(cell.cell_contents) for cell in function.__closure__ or ()]
        function.__qualname__ = "-".join([function.__qualname__, *made_of])
        try:
            kernel = njit(signature, cache=True, nogil=True, fastmath=fastmath)(function)
        except (RuntimeError, OSError) as error:
            if isinstance(error, RuntimeError) and "cannot cache" not in str(error):
                raise
            kernel = njit(signature, nogil=True, fastmath=fastmath)(function)
        return cast("F", kernel)

    return decorate


_ENCODER = (
    *(array(f32, 2), array(i32, 2), f32, i32),
    *(array(u8, 2, written=True), array(u16, 1, written=True)),
)


@compiled(array(i32, 2), i64)
def _peak(bits: I32s, b: int) -> np.int32:
    peak = _N0
    for i in range(BLOCK):
        peak = max(peak, bits[b, i] & _MAGNITUDE)
    return peak


@compiled(i32, f32, i32)
def _scale(peak: np.int32, step: np.float32, ceiling: np.int32) -> np.int32:
    """Bf16 bits of the scale for a peak's f32 bits, as in ``blocks``."""
    if peak <= _ZERO_PEAK:
        return _N0
    raw = np.float32(np.int32(peak).view(np.float32) * step).view(np.int32)
    return min(max((raw + _ROUND_UP) >> _N16, _FLOOR), ceiling)


@compiled(array(f32, 2), i64, i32, i32)
def _ternary_scale(x: F32s, b: int, peak: np.int32, ceiling: np.int32) -> np.int32:
    """Bf16 bits of the scale of block ``b``, as in ``blocks``."""
    if peak <= _ZERO_PEAK:
        return _N0
    shift = min(_FINE_SHIFT - (peak >> _N23), _FINEST)
    per_unit = np.int32((_BIAS + shift) << _N23).view(np.float32)
    unit = np.int32((_BIAS - shift) << _N23).view(np.float32)
    total, present = _N0, _N0
    for i in range(BLOCK):
        magnitude = np.int32(abs(x[b, i]) * per_unit)
        total = np.int32(total + magnitude)
        present = np.int32(present + (_N1 if magnitude > _N0 else _N0))
    top = np.int32(np.int32(peak).view(np.float32) * per_unit)
    level = np.int32((_N3 * total) // (_N2 * max(present, _N1)))
    level = min(max(level, np.int32((top + _N2) // _N3)), top)
    raw = np.float32(np.float32(level) * unit).view(np.int32)
    return min(max((raw + _ROUND_UP) >> _N16, _FLOOR), ceiling)


@compiled(i32)
def _reciprocal(scale: np.int32) -> np.float32:
    return (
        np.float32(0) if scale == _N0 else np.float32(1) / np.int32(scale << _N16).view(np.float32)
    )


def _packer(low: int) -> PackBlock:
    """Return a kernel that writes the codes of an integer scheme's block.

    ``low`` is how many bits lie below the high nibble: a constant, so that LLVM unrolls the loops.
    """
    shift, parts, width = np.int32(low), 8 // low if low else 0, BLOCK * low // 8
    mask = np.int32(2**low - 1)

    @compiled(array(f32, 2), i64, f32, array(i32, 1, written=True), array(u8, 2, written=True))
    def pack(x: F32s, b: int, inverse: np.float32, spare: I32s, codes: U8s) -> None:
        for i in range(BLOCK):
            spare[i] = np.int32((x[b, i] * inverse + _ROUND) - _ROUND)
        for i in range(HALF):
            first, second = spare[i] >> shift, spare[i + HALF] >> shift
            codes[b, i] = np.uint8((first & _N15) | ((second & _N15) << _N4))
        for i in range(width):
            packed = _N0
            for number in range(parts):
                packed |= (spare[i + width * number] & mask) << (shift * np.int32(number))
            codes[b, HALF + i] = np.uint8(packed)

    return pack


_pack_int4, _pack_int5, _pack_int6, _pack_int8 = (_packer(low) for low in (0, 1, 2, 4))


@compiled(
    *(array(f32, 2), i64, f32, i32, array(i32, 1, written=True), array(u8, 2, written=True)),
)
def pack_integers(
    x: F32s, b: int, inverse: np.float32, low: np.int32, spare: I32s, codes: U8s
) -> None:
    """Write the codes of block ``b``, packed to ``codes`` and unpacked to ``spare`` (256,)."""
    if low == _N0:
        _pack_int4(x, b, inverse, spare, codes)
    elif low == _N1:
        _pack_int5(x, b, inverse, spare, codes)
    elif low == _N2:
        _pack_int6(x, b, inverse, spare, codes)
    else:
        _pack_int8(x, b, inverse, spare, codes)


@compiled(*_ENCODER)
def _quantise_integers(
    x: F32s, bits: I32s, step: np.float32, ceiling: np.int32, codes: U8s, scales: U16s
) -> bool:
    low, spare = np.int32(codes.shape[1] // 32 - 4), np.empty(BLOCK, np.int32)
    for b in range(x.shape[0]):
        peak = _peak(bits, b)
        if peak >= _INF:
            return False
        scale = scales[b] = _scale(peak, step, ceiling)
        pack_integers(x, b, _reciprocal(scale), low, spare, codes)
    return True


@compiled(f32)
def _power(y: np.float32) -> np.int32:
    """Sign and exponent in four bits, as in ``blocks``."""
    bits = np.float32(y).view(np.int32)
    raised = np.int32(((bits & _MAGNITUDE) + _POWER_UP) >> _N23)
    power = min(max(np.int32(raised - _POWER_BASE), _N0), _N7)
    return np.int32(power | ((bits >> _N28) & _N8)) if power > _N0 else _N0


@compiled(*_ENCODER)
def _quantise_e3m0(
    x: F32s, bits: I32s, step: np.float32, ceiling: np.int32, codes: U8s, scales: U16s
) -> bool:
    for b in range(x.shape[0]):
        peak = _peak(bits, b)
        if peak >= _INF:
            return False
        scale = scales[b] = _scale(peak, step, ceiling)
        inverse = _reciprocal(scale)
        for i in range(HALF):
            first, second = _power(x[b, i] * inverse), _power(x[b, i + HALF] * inverse)
            codes[b, i] = np.uint8(first | (second << _N4))
    return True


@compiled(i32, i32)
def _ternary(bits: np.int32, half: np.int32) -> np.int32:
    """Sign and magnitude in two bits, of the f32 with these bits."""
    return np.int32(((bits >> _N30) & _N2) | _N1) if (bits & _MAGNITUDE) > half else _N0


@compiled(*_ENCODER)
def _quantise_int2(
    x: F32s, bits: I32s, _step: np.float32, ceiling: np.int32, codes: U8s, scales: U16s
) -> bool:
    for b in range(x.shape[0]):
        peak = _peak(bits, b)
        if peak >= _INF:
            return False
        scale = scales[b] = _ternary_scale(x, b, peak, ceiling)
        half = np.int32((scale << _N16) - (_N1 << _N23)) if scale > _N0 else _MAGNITUDE
        for i in range(QUARTER):
            first = _ternary(bits[b, i], half)
            second = _ternary(bits[b, i + QUARTER], half)
            third = _ternary(bits[b, i + 2 * QUARTER], half)
            fourth = _ternary(bits[b, i + 3 * QUARTER], half)
            low, high = first | (second << _N2), third | (fourth << _N2)
            codes[b, i] = np.uint8(low | (high << _N4))
    return True


@compiled(array(u32, 2), array(u16, 2, written=True))
def _quantise_bf16(bits: U32s, words: U16s) -> bool:
    one, half, sixteen = np.uint32(1), np.uint32(0x7FFF), np.uint32(16)
    sign, magnitude = np.uint32(0x8000), np.uint32(0x7FFF_FFFF)
    for b in range(bits.shape[0]):
        peak = np.uint32(0)
        for i in range(BLOCK):
            raw = bits[b, i]
            low = raw & magnitude
            peak = max(peak, low)
            word = (low + half + ((low >> sixteen) & one)) >> sixteen
            words[b, i] = np.uint16(min(word, _BF16_MAX) | ((raw >> sixteen) & sign))
        if peak >= np.uint32(INF_BITS):
            return False
    return True


@compiled(array(f32, 2), array(i32, 2), array(f32, 2, written=True))
def _quantise_f32(x: F32s, bits: I32s, out: F32s) -> bool:
    for b in range(x.shape[0]):
        if _peak(bits, b) >= _INF:
            return False
        for i in range(BLOCK):
            out[b, i] = x[b, i]
    return True


@compiled(array(u8, 2), array(u16, 1), array(f32, 2, written=True))
def _dequantise_int4(codes: U8s, scales: U16s, out: F32s) -> None:
    for b in range(codes.shape[0]):
        scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
        for i in range(HALF):
            byte = np.int32(np.int8(codes[b, i]))
            out[b, i] = scale * np.float32(np.int32(np.int32(byte << _N28) >> _N28))
            out[b, i + HALF] = scale * np.float32(np.int32(byte >> _N4))


def _integer_decoder(low: int) -> Decoder:
    shift, parts, width = np.int32(low), 8 // low, BLOCK * low // 8
    mask = np.int32(2**low - 1)

    @compiled(array(u8, 2), array(u16, 1), array(f32, 2, written=True))
    def decode(codes: U8s, scales: U16s, out: F32s) -> None:
        spare = np.empty(BLOCK, np.int32)
        for b in range(codes.shape[0]):
            scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
            for i in range(width):
                byte = np.int32(codes[b, HALF + i])
                for number in range(parts):
                    spare[i + width * number] = (byte >> (shift * np.int32(number))) & mask
            for i in range(HALF):
                byte = np.int32(np.int8(codes[b, i]))
                first = np.int32(np.int32(byte << _N28) >> _N28) << shift
                second = np.int32(byte >> _N4) << shift
                out[b, i] = scale * np.float32(np.int32(first | spare[i]))
                out[b, i + HALF] = scale * np.float32(np.int32(second | spare[i + HALF]))

    return decode


@compiled(i32)
def power_of(code: np.int32) -> np.float32:
    """Return the multiple of its scale that the low four bits stand for in e3m0."""
    power = np.int32(np.int32(_N1 << (code & _N7)) >> _N1)
    return np.float32(-power if code & _N8 else power)


@compiled(i32)
def ternary_of(code: np.int32) -> np.float32:
    """Return the multiple of its scale that the low two bits stand for in int2."""
    return np.float32(np.int32(code & _N1) * np.int32(_N1 - (code & _N2)))


@compiled(array(u8, 2), array(u16, 1), array(f32, 2, written=True))
def _dequantise_e3m0(codes: U8s, scales: U16s, out: F32s) -> None:
    for b in range(codes.shape[0]):
        scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
        for i in range(HALF):
            byte = np.int32(codes[b, i])
            out[b, i] = scale * power_of(byte)
            out[b, i + HALF] = scale * power_of(np.int32(byte >> _N4))


@compiled(array(u8, 2), array(u16, 1), array(f32, 2, written=True))
def _dequantise_int2(codes: U8s, scales: U16s, out: F32s) -> None:
    for b in range(codes.shape[0]):
        scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
        for i in range(QUARTER):
            byte = np.int32(codes[b, i])
            out[b, i] = scale * ternary_of(byte)
            out[b, i + QUARTER] = scale * ternary_of(np.int32(byte >> _N2))
            out[b, i + 2 * QUARTER] = scale * ternary_of(np.int32(byte >> _N4))
            out[b, i + 3 * QUARTER] = scale * ternary_of(np.int32(byte >> _N6))


@compiled(array(u16, 2), array(u32, 2, written=True))
def _dequantise_bf16(words: U16s, out: U32s) -> None:
    for b in range(words.shape[0]):
        for i in range(BLOCK):
            out[b, i] = np.uint32(words[b, i]) << np.uint32(16)


@compiled(array(u8, 1), array(u8, 1), array(u32, 1, written=True))
def _join_two(high: U8s, low: U8s, out: U32s) -> None:
    for i in range(out.shape[0]):
        out[i] = (np.uint32(high[i]) << np.uint32(24)) | (np.uint32(low[i]) << np.uint32(16))


@compiled(array(u16, 2, written=True), array(i32, 2, written=True), i64)
def _add_to(words: U16s, bits: I32s, b: int) -> np.int32:
    """Add block ``b`` of a change, as integers, to G in bf16; return the peak of the sum.

    ``bits`` becomes the new G. A float array over the same memory would keep LLVM from vectorising
    this.
    """
    half, most, top = np.int32(0x7FFF), np.int32(BF16_MAX), _N0
    for i in range(BLOCK):
        whole = np.int32(np.int32(words[b, i]) << _N16).view(np.float32)
        raw = np.float32(np.int32(bits[b, i]).view(np.float32) + whole).view(np.int32)
        size = np.int32(raw & _MAGNITUDE)
        top = max(top, size)
        word = min(np.int32(size + half + ((size >> _N16) & _N1)) >> _N16, most)
        rounded = np.int32(np.int32(word << _N16) | (raw & ~_MAGNITUDE))
        words[b, i] = np.uint16((rounded >> _N16) & np.int32(0xFFFF))
        bits[b, i] = rounded
    return top


@compiled(
    *(array(u16, 2, written=True), array(f32, 2), f32, i32, array(u8, 2, written=True)),
    *(array(u16, 1, written=True), array(f32, 2, written=True), array(i32, 2, written=True)),
)
def _step_towards(
    words: U16s, master: F32s, step: np.float32, ceiling: np.int32,
    codes: U8s, scales: U16s, out: F32s, bits: I32s,
) -> bool:  # fmt: skip
    """See ``step_towards``; ``bits`` is ``out`` as integers."""
    low, spare, top = np.int32(codes.shape[1] // 32 - 4), np.empty(BLOCK, np.int32), _N0
    for b in range(words.shape[0]):
        peak = _N0
        for i in range(BLOCK):
            whole = np.int32(np.int32(words[b, i]) << _N16).view(np.float32)
            change = np.float32(master[b, i] - whole)
            peak = max(peak, np.int32(change.view(np.int32) & _MAGNITUDE))
            out[b, i] = change
        if peak >= _INF:
            return False
        scale = scales[b] = _scale(peak, step, ceiling)
        pack_integers(out, b, _reciprocal(scale), low, spare, codes)
        wide = np.int32(np.int32(scale) << _N16).view(np.float32)
        for i in range(BLOCK):
            bits[b, i] = np.float32(wide * np.float32(spare[i])).view(np.int32)
        top = max(top, _add_to(words, bits, b))
    return bool(top < _INF)


@compiled(array(u16, 2, written=True), array(i32, 2, written=True))
def _advance(words: U16s, bits: I32s) -> bool:
    """See ``advance``; ``bits`` is the change as integers."""
    top = _N0
    for b in range(words.shape[0]):
        top = max(top, _add_to(words, bits, b))
    return bool(top < _INF)


@compiled(array(u16, 2), array(f32, 2), i64, array(f32, 1, written=True))
def _changes(words: U16s, master: F32s, every: int, shares: F32s) -> None:
    for number in range(shares.shape[0]):
        b, moved, whole = number * every, _N0, _N0
        for i in range(BLOCK):
            held = np.int32(np.int32(words[b, i]) << _N16).view(np.float32)
            change = np.float32(master[b, i] - held)
            moved = max(moved, np.int32(change.view(np.int32) & _MAGNITUDE))
            whole = max(whole, np.int32(np.float32(master[b, i]).view(np.int32) & _MAGNITUDE))
        most, peak = np.int32(moved).view(np.float32), np.int32(whole).view(np.float32)
        shares[number] = np.float32(most > np.float32(0) or peak > np.float32(0))
        if most < peak:
            shares[number] = most / peak


_KERNELS = {
    "int8": (_quantise_integers, _integer_decoder(4)),
    "int6": (_quantise_integers, _integer_decoder(2)),
    "int5": (_quantise_integers, _integer_decoder(1)),
    "int4": (_quantise_integers, _dequantise_int4),
    "e3m0": (_quantise_e3m0, _dequantise_e3m0),
    "int2": (_quantise_int2, _dequantise_int2),
}
COMPILED = frozenset({"f32", "bf16", *_KERNELS})
"""The schemes that have kernels."""


@compiled(array(f32, 2), i64, fastmath={"reassoc", "contract"})
def sum_of_squares(rows: F32s, b: int) -> float:
    """Sum of squares of ``rows[b]`` in f64; LLVM picks the order of the sum."""
    total = 0.0
    for i in range(BLOCK):
        value = np.float64(rows[b, i])
        total += value * value
    return total


def quantise(scheme: str, x: NDArray[np.float32]) -> Planes:
    """Quantise a padded vector f32 (blocks*256,); raises Diverged if anything is not finite."""
    kind = scheme_of(scheme)
    if scheme not in COMPILED:
        return reference.quantise(scheme, x)
    rows = as_blocks(x)
    planes = allocate(scheme, rows.shape[0])
    codes, scales = planes
    if scheme == "f32":
        finite = _quantise_f32(rows, rows.view(np.int32), codes.view(np.float32))
    elif scheme == "bf16":
        finite = _quantise_bf16(rows.view(np.uint32), codes.view(np.uint16))
    else:
        encode, ceiling = _KERNELS[scheme][0], np.int32(kind.scale_ceiling)
        finite = encode(rows, rows.view(np.int32), step(kind), ceiling, codes, scales)
    if not finite:
        raise diverged()
    return planes


def dequantise(
    scheme: str, planes: Planes, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Decode planes to f32 (blocks*256,), into ``out`` if given; ValueError on wrong shapes."""
    check_planes(scheme, planes, out)
    if scheme not in COMPILED:
        return reference.dequantise(scheme, planes, out)
    vector = np.empty(planes.codes.shape[0] * BLOCK, np.float32) if out is None else out
    rows = as_blocks(vector)
    if scheme == "f32":
        rows.view(np.uint8)[:] = planes.codes
    elif scheme == "bf16":
        _dequantise_bf16(planes.codes.view(np.uint16), rows.view(np.uint32))
    else:
        _KERNELS[scheme][1](planes.codes, planes.scales, rows)
    return vector


def step_towards(
    global_scheme: str, delta_scheme: str, held: Planes, master: F32s, delta: Planes, out: F32s
) -> None:
    """Like ``quantise_numpy.step_towards``, in one pass where G is held in bf16."""
    kind = scheme_of(delta_scheme)
    if global_scheme != "bf16" or not kind.for_delta:
        reference.step_towards(global_scheme, delta_scheme, held, master, delta, out)
        return
    check_planes(global_scheme, held, out)
    check_planes(delta_scheme, delta, out)
    words, rows, given = held.codes.view(np.uint16), as_blocks(out), as_blocks(master)
    codes, scales, ceiling = delta.codes, delta.scales, np.int32(kind.scale_ceiling)
    if not _step_towards(
        words, given, step(kind), ceiling, codes, scales, rows, rows.view(np.int32)
    ):
        raise diverged()


def advance(scheme: str, held: Planes, change: F32s) -> None:
    """Like ``quantise_numpy.advance``, in one pass where G is held in bf16."""
    if scheme != "bf16":
        reference.advance(scheme, held, change)
        return
    check_planes(scheme, held, change)
    if not _advance(held.codes.view(np.uint16), as_blocks(change).view(np.int32)):
        raise diverged()


def changes(global_scheme: str, held: Planes, master: F32s, every: int) -> F32s:
    """Like ``quantise_numpy.changes``, in one pass where G is held in bf16."""
    if global_scheme != "bf16":
        return reference.changes(global_scheme, held, master, every)
    check_planes(global_scheme, held, master)
    shares = np.empty(-(-held.codes.shape[0] // every), np.float32)
    _changes(held.codes.view(np.uint16), as_blocks(master), every, shares)
    return shares


def join(planes: Sequence[U8s], out: F32s) -> None:
    """Put f32 (n,) together from its byte planes u8 (n,), the highest first.

    Bytes that are not given are zero. Raises ValueError if a plane is of another length.
    """
    check_joined(planes, out)
    if len(planes) == 2:
        _join_two(planes[0], planes[1], out.view(np.uint32))
    else:
        reference.join(planes, out)
