"""What a metric is, and how its name is spelt in Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LEARNER = "learner"
SYNCER = "syncer"
CHECKPOINTER = "checkpointer"
EVALUATOR = "evaluator"
MONITOR = "health-monitor"


class Kind(StrEnum):
    """What a metric may do: only grow, go up and down, be what it is, or be spread out."""

    COUNTER = "counter"
    UPDOWNCOUNTER = "updowncounter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``unit`` in UCUM, ``source`` are the services that emit it.

    ``attributes`` are the keys of every data point; ``buckets`` the upper bounds of a histogram,
    in ``unit``, without the last, infinite one.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...]
    source: tuple[str, ...]
    buckets: tuple[float, ...] = ()


UNITS = {"s": "seconds", "By": "bytes"}
"""Units that Prometheus spells out; those in braces are annotations and leave no trace."""


def prometheus_name(metric: Metric) -> str:
    """Return the metric's name in Prometheus, by OpenTelemetry's rule; a histogram's base name.

    Dots become underscores, the unit is spelt out unless the name has it already, a gauge of unit
    ``1`` is a ratio, a counter a total.
    """
    words = metric.name.replace(".", "_").split("_")
    unit = UNITS.get(metric.unit, "")
    if metric.unit == "1" and metric.kind is Kind.GAUGE:
        unit = "ratio"
    if unit and unit not in words:
        words.append(unit)
    if metric.kind is Kind.COUNTER:
        words = [*(word for word in words if word != "total"), "total"]
    return "_".join(words)
