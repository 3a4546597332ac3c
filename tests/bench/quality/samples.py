"""Means over seeds, with the confidence intervals that so few seeds allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom."""
NORMAL_95 = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of ``n`` values; ``half`` is half its 95 % confidence interval, None of one value."""

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float:
        """The lower end of the interval, or of all numbers if there is no interval."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return math.inf if self.half is None else self.mean + self.half

    def text(self, digits: int, *, sign: bool = False) -> str:
        """Write it as ``mean ± half``."""
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if self.half is None else f"{mean} ± {self.half:.{digits}f}"


def t_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    if degrees < 1:
        msg = f"There is no quantile for {degrees} degrees of freedom: two values are needed."
        raise ValueError(msg)
    return T_95[degrees - 1] if degrees <= len(T_95) else NORMAL_95


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value or more, and its 95 % confidence interval."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(mean, None, n)
    return Estimate(mean, t_95(n - 1) * statistics.stdev(values) / math.sqrt(n), n)


def excess(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Return by how many per cent our losses exceed theirs, over the seeds that both have.

    Each seed is a pair: its initial parameters and the order of its data are the same in both, so
    that what seeds differ by drops out. None if they share no seed.
    """
    pairs = excesses(ours, theirs)
    return estimate(pairs) if pairs else None


def excesses(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return by how many per cent our loss exceeds theirs, for each seed that both have."""
    return [100.0 * (ours[s] / theirs[s] - 1.0) for s in sorted(ours.keys() & theirs.keys())]


def pooled(samples: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """Return the standard deviation that samples of two values or more have in common.

    With it, how many samples those are; None if there are none.
    """
    told = [(len(values) - 1, statistics.variance(values)) for values in samples if len(values) > 1]
    degrees = sum(n for n, _ in told)
    if not degrees:
        return None
    return math.sqrt(sum(n * variance for n, variance in told) / degrees), len(told)


def first_below(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Return the first x at which the line through the points comes down to ``target``.

    None if it never does. ``xs`` rises.
    """
    before: tuple[float, float] | None = None
    for x, y in zip(xs, ys, strict=True):
        if y <= target:
            if before is None or before[1] == y:
                return x
            share = (before[1] - target) / (before[1] - y)
            return before[0] + share * (x - before[0])
        before = (x, y)
    return None


def at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Return the height at ``x`` of the line through the points; that of the nearest end beyond."""
    for (x0, y0), (x1, y1) in zip(
        zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False
    ):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y0
    return ys[0] if x < xs[0] else ys[-1]
