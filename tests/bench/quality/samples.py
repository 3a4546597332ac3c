"""Means over seeds, with the confidence intervals that so few seeds allow."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

LEVEL = 0.95
"""Of every interval, unless said otherwise."""


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

    def among(self, k: int) -> Estimate:
        """Return it with the interval that it has as the lowest of ``k`` that were compared.

        Of ``k`` equal ones the lowest lies below zero by chance: each of them has an interval of
        level 1 - 0.05 / k, so that all of them together hold their means as often as one of 0.95
        does (Bonferroni).
        """
        if self.half is None:
            return self
        wider = student_t(self.n - 1, 1 - (1 - LEVEL) / k) / student_t(self.n - 1)
        return replace(self, half=self.half * wider)

    def text(self, digits: int, *, sign: bool = False) -> str:
        """Write it as ``mean ± half``."""
        mean = f"{self.mean:{'+' if sign else ''}.{digits}f}"
        return mean if self.half is None else f"{mean} ± {self.half:.{digits}f}"


@functools.cache
def student_t(degrees: int, level: float = LEVEL) -> float:
    """Return the two-sided quantile of Student's t: |t| is below it with probability ``level``."""
    if degrees < 1:
        msg = f"There is no quantile for {degrees} degrees of freedom: two values are needed."
        raise ValueError(msg)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < level else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """Return the probability that |t| is below sqrt(degrees) tan(angle).

    The finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    odd = degrees % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value or more, and its 95 % confidence interval."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(mean, None, n)
    return Estimate(mean, student_t(n - 1) * statistics.stdev(values) / math.sqrt(n), n)


def slope(points: Sequence[tuple[float, float]]) -> Estimate | None:
    """Return the slope of the line through (x, y) by least squares, and its 95 % interval.

    None for fewer than three points, or for one x alone.
    """
    n, x = len(points), statistics.fmean(x for x, _ in points) if points else 0.0
    square = sum((at - x) ** 2 for at, _ in points)
    if n < 3 or not square:
        return None
    line = statistics.linear_regression(*zip(*points, strict=True))
    rest = sum((y - line.slope * at - line.intercept) ** 2 for at, y in points)
    half = student_t(n - 2) * math.sqrt(rest / (n - 2) / square)
    return Estimate(line.slope, half, n)


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
