"""Values of metrics at one moment, in no format yet."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from skerry.telemetry.metrics import RUN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from skerry.telemetry.metrics import Metric


@dataclass(frozen=True, slots=True)
class Point:
    """One number; ``labels`` are the values of the metric's attributes, in their order."""

    metric: Metric
    value: float
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One value out of a histogram's bucket, the trace it came from, and when it was."""

    value: float
    trace_id: str
    at_s: float


@dataclass(slots=True)
class Spread:
    """One histogram; ``counts`` has a number per bucket, that of all larger values at its end.

    ``examples`` is the newest one of each bucket, by its index, where one is known.
    """

    metric: Metric
    labels: tuple[str, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    examples: dict[int, Example] = field(default_factory=dict[int, Example])

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.metric.buckets) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, value: float, *, trace_id: str = "", at_s: float = 0.0) -> None:
        """Count one value; buckets hold their upper bound. What is no number is left out."""
        if not isfinite(value):
            return
        bucket = bisect_left(self.metric.buckets, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.examples[bucket] = Example(value, trace_id, at_s)


Figure = Point | Spread


def flat(figures: Iterable[Figure]) -> dict[str, float]:
    """Return each number by ``name{key=value,...}``, a histogram by its count and its sum.

    The run is left out: what these are written to names it once.
    """
    return dict(_named(figures))


def _named(figures: Iterable[Figure]) -> Iterator[tuple[str, float]]:
    for figure in figures:
        metric = figure.metric
        pairs = zip(metric.attributes, figure.labels, strict=True)
        labels = ",".join(f"{key}={value}" for key, value in pairs if key != RUN)
        name = f"{metric.name}{{{labels}}}" if labels else metric.name
        if isinstance(figure, Point):
            yield name, figure.value
        else:
            yield f"{name}.count", figure.count
            yield f"{name}.sum", figure.total
