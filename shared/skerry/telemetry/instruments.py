"""Telling metrics: nothing at all until ``skerry.telemetry.sdk`` takes them.

``record`` is for what happens, ``observe`` for what is: a function that is asked now and then, in
a thread of its own, and costs whoever changes the value nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from skerry.telemetry.metrics import Metric

Attributes = Mapping[str, str]
Observation = tuple[float, Attributes]
Observer = Callable[[], Iterable[Observation]]


class Meters(Protocol):
    """Who takes metrics, from any thread, and never waits for anything."""

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None: ...
    def observe(self, metric: Metric, observer: Observer) -> None: ...


class _State:
    """What this process does with its metrics."""

    meters: Meters | None = None


_state = _State()


def install(meters: Meters | None) -> None:
    """Have metrics taken by ``meters``; None: by nobody."""
    _state.meters = meters


def on() -> bool:
    """Tell whether anybody takes metrics."""
    return _state.meters is not None


def record(metric: Metric, value: float, attributes: Attributes) -> None:
    """Add to a counter, note a gauge, or count a histogram's value, in the metric's own unit."""
    if _state.meters is not None:
        _state.meters.record(metric, value, attributes)


def observe(metric: Metric, observer: Observer) -> None:
    """Have a counter's total or a gauge read off ``observer`` whenever metrics are sent."""
    if _state.meters is not None:
        _state.meters.observe(metric, observer)
