"""Merges that a minority of hostile learners cannot move far, whatever they send.

Both work coordinate by coordinate, over the contributions that trained it:

- ``trimmed_mean`` (D. Yin et al., arXiv 1803.01498) drops the largest and the smallest values, a
  quarter of them on each side and one at least, and averages the others by weight;
- ``median_of_means`` (Y. Chen, L. Su, J. Xu, arXiv 1705.05491) averages groups by weight and takes
  the median of their means; there are three groups, or the largest odd number that leaves at least
  two contributions in each if that is more.

Of two contributions neither is outvoted: both rules average them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import backend
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.merge_numpy import OuterGradient, Spans

F32s = NDArray[np.float32]
F64s = NDArray[np.float64]

LEAST = 3
"""The fewest contributions among which one can be outvoted."""
PASS_BLOCKS = 64
"""Blocks in one pass: what 16 contributions decode to stays in cache."""


class Trim(NamedTuple):
    """``groups`` numbers the group that averages each row; ``dropped`` means go on each side."""

    groups: NDArray[np.int64]
    dropped: int


def trim_of(method: str, count: int) -> Trim:
    """Return how a rule treats ``count`` contributions."""
    if count < LEAST:
        return Trim(np.zeros(count, np.int64), 0)
    if method == "trimmed_mean":
        return Trim(np.arange(count), max(1, count // 4))
    groups = max(LEAST, (count // 2 - 1) | 1)
    return Trim(np.arange(count) % groups, groups // 2)


def robust(
    method: str,
    ordered: Sequence[OuterGradient],
    shares: F64s,
    kept: F64s,
    spans: Spans,
    out: F32s,
) -> None:
    """Write the merge by ``method`` into the spans of ``out``, f32 (padded_size,).

    ``shares`` are f64 (contributions, spans), ``kept`` f64 (contributions,) is what each is
    multiplied by. A contribution without a share of a span has no vote in it.
    """
    codec, combine = backend.cpu(), backend.merger().trimmed
    for span, (start, stop) in enumerate(zip(*spans, strict=True)):
        voting = np.flatnonzero(shares[:, span] > 0)
        trim, weights = trim_of(method, voting.size), shares[voting, span]
        for first in range(int(start), int(stop), PASS_BLOCKS):
            blocks = slice(first, min(first + PASS_BLOCKS, int(stop)))
            values = np.empty((voting.size, (blocks.stop - blocks.start) * BLOCK), np.float32)
            for row, number in enumerate(voting.tolist()):
                item = ordered[number]
                codec.dequantise(item.scheme, item.planes.part(blocks), values[row])
                values[row] *= np.float32(kept[number])
            means, sums = _grouped(values, weights, trim.groups)
            combine(means, sums, trim.dropped, out[blocks.start * BLOCK : blocks.stop * BLOCK])


def _grouped(values: F32s, weights: F64s, groups: NDArray[np.int64]) -> tuple[F32s, F64s]:
    """Return the weighted means of the groups f32 (groups, n), and the groups' weights."""
    count = int(groups.max()) + 1
    if count == groups.size:
        return values, weights
    means, sums = np.zeros((count, values.shape[1])), np.zeros(count)
    for row, group in enumerate(groups):
        means[group] += weights[row] * values[row].astype(np.float64)
        sums[group] += weights[row]
    return (means / sums[:, None]).astype(np.float32), sums
