"""The arithmetic of a merge in numba: decode, weight, add and step within a core's cache.

Equal to ``merge_numpy`` bit by bit (no fused multiply-add, same order), except for sums of squares,
where LLVM picks the order; they agree to f64 rounding and are the same on every run of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.blocks import HALF, QUARTER
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.merge_numpy import OuterGradient, Spans
from skerry.algorithm.planes import Planes, as_blocks
from skerry.algorithm.quantise_numba import (
    array,
    compiled,
    dequantise,
    f32,
    f64,
    four,
    i1,
    i32,
    i64,
    power_of,
    sum_of_squares,
    ternary_of,
    u8,
    u16,
)
from skerry.algorithm.schemes import SCHEMES

F32s = NDArray[np.float32]
I64s = NDArray[np.int64]
U16s = NDArray[np.uint16]
U8s = NDArray[np.uint8]
I32s = NDArray[np.int32]
F64s = NDArray[np.float64]
T = TypeVar("T")
Four = tuple[T, T, T, T]

WAYS = 4
"""Contributions that one pass adds; more of them take more passes over the output."""
_BF16, _INT8, _INT4 = (np.int32(SCHEMES[name].id) for name in ("bf16", "int8", "int4"))
ACCUMULATED = frozenset({"f32", "bf16", "int8", "int4", "e3m0", "int2"})
"""Schemes that ``accumulate`` adds as they are; others are decoded first."""
_E3M0, _INT2 = (np.int32(SCHEMES[name].id) for name in ("e3m0", "int2"))
_N0, _N2, _N6 = np.int32(0), np.int32(2), np.int32(6)
_N4, _N15, _N16, _N28 = np.int32(4), np.int32(15), np.int32(16), np.int32(28)
_S0, _S4, _S12 = np.int16(0), np.int16(4), np.int16(12)
_SIGN, _HIGH = np.int32(0x80), np.int32(0xF0)
_ZERO, _ONE = np.float32(0), np.float32(1)
_CODES, _SCALES = array(u8, 2), array(u16, 1)
_FOUR_CODES, _FOUR_SCALES = four(_CODES), four(_SCALES)


@compiled(_CODES, _SCALES, i64, i32, f32, array(f32, 2, written=True))
def _add_coarse(
    codes: U8s, scales: U16s, b: int, scheme: np.int32, weight: np.float32, out: F32s
) -> None:
    """Like ``_add``, for e3m0 and int2."""
    scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
    if scheme == _E3M0:
        for i in range(HALF):
            byte = np.int32(codes[b, i])
            out[b, i] += weight * (scale * power_of(byte))
            out[b, i + HALF] += weight * (scale * power_of(np.int32(byte >> _N4)))
        return
    for i in range(QUARTER):
        byte = np.int32(codes[b, i])
        out[b, i] += weight * (scale * ternary_of(byte))
        out[b, i + QUARTER] += weight * (scale * ternary_of(np.int32(byte >> _N2)))
        out[b, i + 2 * QUARTER] += weight * (scale * ternary_of(np.int32(byte >> _N4)))
        out[b, i + 3 * QUARTER] += weight * (scale * ternary_of(np.int32(byte >> _N6)))


@compiled(_CODES, _SCALES, i64, i32, f32, array(f32, 2, written=True))
def _add(codes: U8s, scales: U16s, b: int, scheme: np.int32, weight: np.float32, out: F32s) -> None:
    """Add ``weight * decoded`` of block ``b`` to that of ``out``."""
    if scheme == _INT4:
        scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
        for i in range(HALF):
            byte = np.int32(np.int8(codes[b, i]))
            out[b, i] += weight * (scale * np.float32(np.int32(np.int32(byte << _N28) >> _N28)))
            out[b, i + HALF] += weight * (scale * np.float32(np.int32(byte >> _N4)))
    elif scheme == _INT8:
        scale = np.int32(np.int32(scales[b]) << _N16).view(np.float32)
        for i in range(HALF):
            upper, lower = np.int32(codes[b, i]), np.int32(codes[b, i + HALF])
            first = ((upper & _N15) << _N4) | (lower & _N15)
            second = (upper & _HIGH) | (lower >> _N4)
            out[b, i] += weight * (scale * np.float32(np.int32((first ^ _SIGN) - _SIGN)))
            out[b, i + HALF] += weight * (scale * np.float32(np.int32((second ^ _SIGN) - _SIGN)))
    elif scheme in (_E3M0, _INT2):
        _add_coarse(codes, scales, b, scheme, weight, out)
    elif scheme == _BF16:
        words = codes[b].view(np.uint16)
        for i in range(BLOCK):
            out[b, i] += weight * np.int32(np.int32(words[i]) << _N16).view(np.float32)
    else:
        values = codes[b].view(np.float32)
        for i in range(BLOCK):
            out[b, i] += weight * values[i]


@compiled(_FOUR_CODES, _FOUR_SCALES, i64, array(f32, 1), array(f32, 2, written=True))
def _write_four_int4(
    codes: Four[U8s], scales: Four[U16s], b: int, weights: F32s, out: F32s
) -> None:
    """Write the weighted sum of four int4 blocks to block ``b`` of ``out``."""
    c0, c1, c2, c3 = codes
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    k0 = np.int32(np.int32(scales[0][b]) << _N16).view(np.float32)
    k1 = np.int32(np.int32(scales[1][b]) << _N16).view(np.float32)
    k2 = np.int32(np.int32(scales[2][b]) << _N16).view(np.float32)
    k3 = np.int32(np.int32(scales[3][b]) << _N16).view(np.float32)
    for i in range(HALF):
        v0, v1 = np.int32(np.int8(c0[b, i])), np.int32(np.int8(c1[b, i]))
        v2, v3 = np.int32(np.int8(c2[b, i])), np.int32(np.int8(c3[b, i]))
        low = _ZERO + w0 * (k0 * np.float32(np.int32(np.int32(v0 << _N28) >> _N28)))
        low += w1 * (k1 * np.float32(np.int32(np.int32(v1 << _N28) >> _N28)))
        low += w2 * (k2 * np.float32(np.int32(np.int32(v2 << _N28) >> _N28)))
        low += w3 * (k3 * np.float32(np.int32(np.int32(v3 << _N28) >> _N28)))
        high = _ZERO + w0 * (k0 * np.float32(np.int32(v0 >> _N4)))
        high += w1 * (k1 * np.float32(np.int32(v1 >> _N4)))
        high += w2 * (k2 * np.float32(np.int32(v2 >> _N4)))
        high += w3 * (k3 * np.float32(np.int32(v3 >> _N4)))
        out[b, i] = low
        out[b, i + HALF] = high


@compiled(
    *(array(i32, 1), _FOUR_CODES, _FOUR_SCALES, i64, array(f32, 2), i1),
    *(array(i64, 1), array(i64, 1), array(f32, 2, written=True), array(f64, 1, written=True)),
)
def _accumulate(  # noqa: PLR0913, PLR0917 - compiled for positions
    schemes: I32s, codes: Four[U8s], scales: Four[U16s], count: int, weights: F32s, fresh: bool,  # noqa: FBT001 - as above
    starts: I64s, stops: I64s, out: F32s, squares: F64s,
) -> None:  # fmt: skip
    """Add up to four contributions into the spans of ``out``; ``weights`` is (spans, 4)."""
    four_int4 = fresh and count == WAYS and (schemes == _INT4).all()
    for s in range(starts.size):
        total = 0.0
        for b in range(starts[s], stops[s]):
            if four_int4:
                _write_four_int4(codes, scales, b, weights[s], out)
            else:
                if fresh:
                    out[b] = _ZERO
                for m in range(count):
                    _add(codes[m], scales[m], b, schemes[m], weights[s, m], out)
            total += sum_of_squares(out, b)
        squares[s] = total


@compiled(
    *(array(f32, 2, written=True), array(f32, 1), array(i64, 1), array(i64, 1), array(f32, 2)),
    *(array(f32, 2), array(f32, 2, written=True), f32, f32),
)
def _step_momentum(  # noqa: PLR0913, PLR0917 - as above
    out: F32s, gains: F32s, starts: I64s, stops: I64s, master: F32s,
    momentum: F32s, fresh: F32s, rate: np.float32, decay: np.float32,
) -> None:  # fmt: skip
    for s in range(starts.size):
        gain = gains[s]
        for b in range(starts[s], stops[s]):
            for i in range(BLOCK):
                gradient = gain * out[b, i]
                trace = gradient + decay * momentum[b, i]
                fresh[b, i] = trace
                out[b, i] = master[b, i] + rate * (gradient + decay * trace)


@compiled(
    *(array(f32, 2, written=True), array(f32, 1), array(i64, 1), array(i64, 1)),
    *(array(f32, 2), f32),
)
def _step_plain(
    out: F32s, gains: F32s, starts: I64s, stops: I64s, master: F32s, rate: np.float32
) -> None:
    for s in range(starts.size):
        gain = gains[s]
        for b in range(starts[s], stops[s]):
            for i in range(BLOCK):
                out[b, i] = master[b, i] + rate * (gain * out[b, i])


@compiled(array(f32, 2), array(i64, 1), array(i64, 1), array(f64, 1, written=True))
def _segment_squares(x: F32s, starts: I64s, stops: I64s, squares: F64s) -> None:
    for s in range(starts.size):
        total = 0.0
        for b in range(starts[s], stops[s]):
            total += sum_of_squares(x, b)
        squares[s] = total


def segment_squares(x: F32s, spans: Spans) -> F64s:
    """Sum the squares of f32 (blocks*256,) over each span, in f64."""
    squares = np.zeros(spans.starts.size)
    _segment_squares(as_blocks(x), spans.starts, spans.stops, squares)
    return squares


@compiled(_CODES, i64)
def _squared_int4(codes: U8s, b: int) -> np.int16:
    """Sum of squares of the codes of block ``b``; i16 holds it, and LLVM takes twice as many."""
    total = _S0
    for i in range(HALF):
        byte = np.int16(np.int8(codes[b, i]))
        low, high = np.int16(np.int16(byte << _S12) >> _S12), np.int16(byte >> _S4)
        total = np.int16(total + np.int16(np.int16(low * low) + np.int16(high * high)))
    return total


@compiled(_CODES, i64)
def _squared_int8(codes: U8s, b: int) -> np.int32:
    """Sum of squares of the codes of block ``b``, which an i32 holds."""
    total = _N0
    for i in range(HALF):
        upper, lower = np.int32(codes[b, i]), np.int32(codes[b, i + HALF])
        first = np.int32(((((upper & _N15) << _N4) | (lower & _N15)) ^ _SIGN) - _SIGN)
        second = np.int32((((upper & _HIGH) | (lower >> _N4)) ^ _SIGN) - _SIGN)
        total = np.int32(total + np.int32(first * first + second * second))
    return total


@compiled(_CODES, _SCALES, i32, array(i64, 1), array(i64, 1), array(f64, 1, written=True))
def _decoded_squares(
    codes: U8s, scales: U16s, scheme: np.int32, starts: I64s, stops: I64s, squares: F64s
) -> None:
    row = np.empty((1, BLOCK), np.float32)
    for s in range(starts.size):
        total = 0.0
        for b in range(starts[s], stops[s]):
            if scheme in (_INT4, _INT8):
                scale = np.float64(np.int32(np.int32(scales[b]) << _N16).view(np.float32))
                found = _squared_int4(codes, b) if scheme == _INT4 else _squared_int8(codes, b)
                total += scale * scale * np.float64(found)
            else:
                row[0] = _ZERO
                _add(codes[b : b + 1], scales[b : b + 1], 0, scheme, _ONE, row)
                total += sum_of_squares(row, 0)
        squares[s] = total


def decoded_squares(item: OuterGradient, spans: Spans) -> F64s:
    """Like ``merge_numpy.decoded_squares``; int4 and int8 are summed without decoding."""
    form, squares = _compiled_form(item), np.zeros(spans.starts.size)
    _decoded_squares(*form.planes, np.int32(SCHEMES[form.scheme].id), *spans, squares)
    return squares


def accumulate(
    contributions: Sequence[OuterGradient], coefficients: F32s, spans: Spans, out: F32s
) -> F64s:
    """Like ``merge_numpy.accumulate``, four contributions at a time."""
    contributions = [_compiled_form(item) for item in contributions]
    squares = np.zeros(spans.starts.size)
    for first in range(0, len(contributions), WAYS):
        group = list(contributions[first : first + WAYS])
        slots = [*group, *[group[0]] * (WAYS - len(group))]
        weights = np.zeros((spans.starts.size, WAYS), np.float32)
        weights[:, : len(group)] = coefficients[first : first + len(group)].T
        _accumulate(
            np.array([SCHEMES[c.scheme].id for c in slots], np.int32),
            cast("Four[U8s]", tuple(c.planes.codes for c in slots)),
            cast("Four[U16s]", tuple(c.planes.scales for c in slots)),
            len(group),
            weights,
            first == 0,
            *spans,
            as_blocks(out),
            squares,
        )
    return squares


@compiled(array(f32, 2), array(f64, 1), i64, array(f32, 1, written=True))
def _trimmed(values: F32s, weights: F64s, dropped: int, out: F32s) -> None:
    count = values.shape[0]
    order = np.empty(count, np.int64)
    for column in range(values.shape[1]):
        for row in range(count):  # a stable insertion sort
            place = row
            while place > 0 and values[order[place - 1], column] > values[row, column]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = row
        total = mean = 0.0
        for place in range(dropped, count - dropped):
            row = order[place]
            mean += weights[row] * np.float64(values[row, column])
            total += weights[row]
        out[column] = mean / total


def trimmed(values: F32s, weights: F64s, dropped: int, out: F32s) -> None:
    """Like ``merge_numpy.trimmed``."""
    _trimmed(values, weights, dropped, out)


def _compiled_form(item: OuterGradient) -> OuterGradient:
    """Return the contribution, decoded to f32 if its scheme has no kernel."""
    if item.scheme in ACCUMULATED:
        return item
    rows = as_blocks(dequantise(item.scheme, item.planes))
    return OuterGradient("f32", Planes(rows.view(np.uint8), item.planes.scales[:0]))


def step(
    out: F32s,
    gains: F32s,
    spans: Spans,
    master: F32s,
    momentum: F32s | None,
    *,
    lr: float,
    decay: float,
    into: F32s | None = None,
) -> F32s | None:
    """Like ``merge_numpy.step``."""
    rate = np.float32(-lr)
    if momentum is None:
        _step_plain(as_blocks(out), gains, *spans, as_blocks(master), rate)
        return None
    fresh = np.empty_like(momentum) if into is None else into
    rows, traces, updated = as_blocks(master), as_blocks(momentum), as_blocks(fresh)
    beta = np.float32(decay)
    _step_momentum(as_blocks(out), gains, *spans, rows, traces, updated, rate, beta)
    return fresh
