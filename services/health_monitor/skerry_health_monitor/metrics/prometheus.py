"""The metrics in Prometheus' words: what ``/metrics`` answers."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.routing import Route

from skerry.telemetry.metrics import MetricKind, prometheus_name
from skerry.telemetry.points import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric as Family
    from starlette.requests import Request

    from skerry.telemetry.metrics import Metric
    from skerry.telemetry.points import Figure, Point


Bucket = tuple[str, float] | tuple[str, float, Exemplar]


def metrics_route(current: Callable[[], Iterable[Figure]]) -> Route:
    """Return ``/metrics`` over whatever ``current`` returns at each request.

    In OpenMetrics where the scraper takes it: there rounds come with the id of their trace.
    """

    async def scrape(request: Request) -> Response:
        text, kind = exposition(current(), request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    return Route("/metrics", scrape)


def exposition(figures: Iterable[Figure], accept: str = "") -> tuple[bytes, str]:
    """Return the text of a scrape and its content type, in the best format that is accepted."""
    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(figures))
    return encode(registry), kind


class _Collected(Collector):
    """Figures as families, one per metric; of two with the same labels the first one counts."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        by_metric: dict[Metric, dict[tuple[str, ...], Figure]] = {}
        for figure in figures:
            by_metric.setdefault(figure.metric, {}).setdefault(figure.labels, figure)
        self._by_metric = by_metric

    def describe(self) -> Iterator[Family]:
        return iter(())

    def collect(self) -> Iterator[Family]:
        for metric, figures in self._by_metric.items():
            yield _family(metric, figures.values())


def _family(metric: Metric, figures: Iterable[Figure]) -> Family:
    name, keys = prometheus_name(metric), list(metric.attributes)
    if metric.kind is MetricKind.HISTOGRAM:
        spread = HistogramMetricFamily(name, metric.description, labels=keys)
        for figure in figures:
            if isinstance(figure, Spread):
                spread.add_metric(figure.labels, _buckets(figure), figure.total)
        return spread
    made = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = made(name, metric.description, labels=keys)
    for figure in figures:
        if not isinstance(figure, Spread):
            family.add_metric(figure.labels, _value(figure))
    return family


def _value(point: Point) -> float:
    return float(point.value)


def _buckets(spread: Spread) -> list[Bucket]:
    """Return cumulative counts by upper bound, with the newest example of each bucket."""
    bounds = [*map(str, spread.metric.buckets), "+Inf"]
    found: list[Bucket] = []
    for index, (bound, count) in enumerate(zip(bounds, accumulate(spread.counts), strict=True)):
        example = spread.examples.get(index)
        if example is None:
            found.append((bound, count))
        else:
            trace = Exemplar({"trace_id": example.trace_id}, example.value, example.at_s)
            found.append((bound, count, trace))
    return found
