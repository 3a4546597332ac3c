"""Record metrics with OpenTelemetry's API: nothing until ``skerry.telemetry.export`` starts.

``record`` is for events. ``observe`` is for current values: it calls back at each collection, in a
thread of its own, at no cost to the code that changes the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import chain

from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation

from skerry.telemetry.metrics import Metric, MetricKind

Observer = Callable[[CallbackOptions], Iterable[Observation]]
OFF = NoOpMeter("skerry")
_meter: list[Meter] = [OFF]
"""The meter of this process."""
_observers: dict[str, list[Observer]] = {}
"""The observers of each metric, by its name, that are called at each collection."""


def install(meter: Meter) -> None:
    """Record metrics with ``meter`` from now on; ``OFF`` drops them."""
    _recorder.cache_clear()
    _observers.clear()
    _meter[0] = meter


def on() -> bool:
    """Return True if metrics are exported."""
    return _meter[0] is not OFF


def record(metric: Metric, value: float, attributes: Mapping[str, str]) -> None:
    """Add to a counter, set a gauge, or count a histogram's value, in the metric's own unit.

    Inside ``tracing.within`` the span is the value's exemplar.
    """
    if on():
        _recorder(_meter[0], metric)(value, attributes)


def observe(metric: Metric, observer: Observer) -> None:
    """Read a counter's total or a gauge from ``observer`` at each collection.

    Where several observe a metric with the same attributes, the newest counts.
    """
    if not on():
        return
    observers = _observers.setdefault(metric.name, [])
    observers.append(observer)
    if len(observers) > 1:  # a meter has each metric once
        return
    meter, counts = _meter[0], metric.kind is MetricKind.COUNTER
    create = meter.create_observable_counter if counts else meter.create_observable_gauge

    def all_of_them(options: CallbackOptions) -> Iterable[Observation]:
        return chain.from_iterable(each(options) for each in observers)

    create(metric.name, [all_of_them], metric.unit, metric.description)


@cache
def _recorder(meter: Meter, metric: Metric) -> Callable[..., None]:
    """Return the function that records a metric, made on first use."""
    described = metric.name, metric.unit, metric.description
    match metric.kind:
        case MetricKind.COUNTER:
            return meter.create_counter(*described).add
        case MetricKind.GAUGE:
            return meter.create_gauge(*described).set
        case MetricKind.HISTOGRAM:
            bounds = metric.buckets or None
            return meter.create_histogram(
                *described, explicit_bucket_boundaries_advisory=bounds
            ).record
