"""Serve all figures at ``/metrics`` to Prometheus; send by OTLP what only the monitor knows.

Services send their own metrics: in one backend a second copy would count double.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate

from opentelemetry.metrics import Observation
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skerry.telemetry import instruments
from skerry.telemetry.metrics import (
    ALL,
    MONITOR,
    Figure,
    Metric,
    MetricKind,
    Point,
    Spread,
    prometheus_name,
)

Bucket = tuple[str, float] | tuple[str, float, Exemplar]
EVERY_S = 1.0
OWN = tuple(m for m in ALL if m.source == (MONITOR,) and m.kind is not MetricKind.HISTOGRAM)
"""Metrics that no other service reports."""


async def export(figures: Callable[[], Iterable[Figure]]) -> None:
    """Offer the monitor's OWN figures to OpenTelemetry, for ever; be idle where it is off.

    They are copied every EVERY_S, since the thread that sends would see them change.
    """
    if not instruments.on():
        await asyncio.Event().wait()
    latest: dict[Metric, list[Observation]] = {}

    def read(metric: Metric, _options: object) -> list[Observation]:
        return latest.get(metric, [])

    for metric in OWN:
        instruments.observe(metric, partial(read, metric))
    while True:
        found: dict[Metric, list[Observation]] = defaultdict(list)
        for figure in figures():
            if isinstance(figure, Point) and figure.metric in OWN:
                labels = dict(zip(figure.metric.attributes, figure.labels, strict=True))
                found[figure.metric].append(Observation(float(figure.value), labels))
        latest = found
        await asyncio.sleep(EVERY_S)


def metrics_route(current: Callable[[], Iterable[Figure]]) -> Route:
    """Return ``/metrics`` over whatever ``current`` returns at each request.

    In OpenMetrics where the scraper takes it: there rounds come with the id of their trace.
    """

    async def scrape(request: Request) -> Response:
        text, kind = exposition(current(), request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    return Route("/metrics", scrape)


class _Families(Collector):
    """One family of series per metric; of two with the same labels the first one counts."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._by_metric: dict[Metric, dict[tuple[str, ...], Figure]] = {}
        for figure in figures:
            self._by_metric.setdefault(figure.metric, {}).setdefault(figure.labels, figure)

    def collect(self) -> list[Family]:
        return [_family(metric, found.values()) for metric, found in self._by_metric.items()]


def exposition(figures: Iterable[Figure], accept: str = "") -> tuple[bytes, str]:
    """Return the text of a scrape and its content type, in the best format that is accepted."""
    encode, kind = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(figures))
    return encode(registry), kind


def _family(metric: Metric, figures: Iterable[Figure]) -> Family:
    named = prometheus_name(metric), metric.description
    spreads = HistogramMetricFamily(*named, labels=metric.attributes)
    made = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    values = made(*named, labels=metric.attributes)
    for figure in figures:
        if isinstance(figure, Spread):
            spreads.add_metric(figure.labels, _buckets(figure), figure.total)
        else:
            values.add_metric(figure.labels, float(figure.value))
    return spreads if metric.kind is MetricKind.HISTOGRAM else values


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
