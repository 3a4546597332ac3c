"""The arithmetic of a merge in numpy: the reference that ``merge_numba`` equals bit by bit.

Work is cut into chunks that stay in cache, so memory stays at the output plus a few chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, Fragment
from skerry.algorithm.planes import Planes
from skerry.algorithm.quantise_numpy import dequantise

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class OuterGradient:
    """One outer gradient as it travelled; ``norms`` are L2 norms of the decoded slices, or ().

    ``reach`` is the part of its tokens that reached each slice, or () where all of them did.
    ``cut`` is the share of its length that a merge leaves out.
    """

    scheme: str
    planes: Planes
    norms: tuple[float, ...] = ()
    reach: tuple[float, ...] = ()
    cut: float = 0.0


class Spans(NamedTuple):
    """Block ranges ``[starts[i], stops[i])`` of a padded vector, i64 each."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def only(self, chosen: NDArray[np.bool_]) -> Spans:
        """Return the spans where ``chosen`` is true."""
        return Spans(self.starts[chosen], self.stops[chosen])


def spans_of(fragment: Fragment) -> Spans:
    """Return one span per slice of ``fragment``."""
    offsets = np.asarray(fragment.offsets, np.int64) // BLOCK
    return Spans(offsets[:-1], offsets[1:])


def whole(x: NDArray[np.float32]) -> Spans:
    return Spans(np.zeros(1, np.int64), np.full(1, x.size // BLOCK, np.int64))


def segment_squares(x: NDArray[np.float32], spans: Spans) -> NDArray[np.float64]:
    """Sum the squares of f32 (blocks*256,) over each span, in f64."""
    squares = np.zeros(spans.starts.size)
    for index, part in _parts(spans):
        squares[index] += np.square(x[part], dtype=np.float64).sum()
    return squares


def decoded_squares(item: OuterGradient, spans: Spans) -> NDArray[np.float64]:
    """Sum the squares of what an outer gradient decodes to over each span, in f64."""
    squares = np.zeros(spans.starts.size)
    for index, part in _parts(spans):
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        value = dequantise(item.scheme, item.planes.part(blocks))
        squares[index] += np.square(value, dtype=np.float64).sum()
    return squares


def accumulate(
    contributions: Sequence[OuterGradient],
    coefficients: NDArray[np.float32],
    spans: Spans,
    out: NDArray[np.float32],
) -> NDArray[np.float64]:
    """Write ``sum_m coefficients[m, s] * decoded_m`` into the spans of ``out``.

    The sum runs over contributions in their order, in f32, each product rounded on its own. Returns
    the sum of squares of what was written, per span, in f64.
    """
    for index, part in _parts(spans):
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        out[part] = 0
        for number, (scheme, planes) in enumerate((c.scheme, c.planes) for c in contributions):
            value = dequantise(scheme, planes.part(blocks))
            value *= coefficients[number, index]
            out[part] += value
    return segment_squares(out, spans)


def trimmed(
    values: NDArray[np.float32],
    weights: NDArray[np.float64],
    dropped: int,
    out: NDArray[np.float32],
) -> None:
    """Write the weighted mean of each column of ``values`` f32 (m, n) into ``out`` f32 (n,).

    Leaves out a column's ``dropped`` largest and smallest values; sums ascend, in f64.
    """
    order = np.argsort(values, axis=0, kind="stable")[dropped : len(values) - dropped]
    kept, shares = np.take_along_axis(values, order, axis=0).astype(np.float64), weights[order]
    total, mean = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    for value, share in zip(kept, shares, strict=True):
        mean += share * value
        total += share
    out[:] = mean / total


def step(
    out: NDArray[np.float32],
    gains: NDArray[np.float32],
    spans: Spans,
    master: NDArray[np.float32],
    momentum: NDArray[np.float32] | None,
    *,
    lr: float,
    decay: float,
    into: NDArray[np.float32] | None = None,
) -> NDArray[np.float32] | None:
    """Turn ``out`` from a direction into new parameters; returns the new momentum.

    The momentum goes into ``into`` if given, which may be ``momentum`` itself.

    With ``g = gain * out``: ``t' = g + decay * t`` and ``p' = p - lr * (g + decay * t')``, which is
    Nesterov momentum as in ``optax.sgd(nesterov=True)``; without momentum ``p' = p - lr * g``.
    Every operation is one f32 rounding, in this order.
    """
    rate, beta = np.float32(-lr), np.float32(decay)
    fresh = np.empty_like(momentum) if into is None and momentum is not None else into
    for index, part in _parts(spans):
        gradient = gains[index] * out[part]
        update = gradient
        if momentum is not None and fresh is not None:
            fresh[part] = gradient + beta * momentum[part]
            update = gradient + beta * fresh[part]
        out[part] = master[part] + rate * update
    return None if momentum is None else fresh


def _parts(spans: Spans) -> Iterator[tuple[int, slice]]:
    """Yield (span, slice of elements), no slice longer than a chunk."""
    for index, (start, stop) in enumerate(zip(*spans, strict=True)):
        for first in range(int(start), int(stop), _CHUNK):
            yield index, slice(first * BLOCK, min(first + _CHUNK, int(stop)) * BLOCK)
