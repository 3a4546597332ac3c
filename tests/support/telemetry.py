"""Telemetry that stays in memory: the spans and the metrics that a test's code has emitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from opentelemetry.sdk.metrics import MeterProvider  # noqa: TID251 - a reader for tests
from opentelemetry.sdk.metrics.export import (  # noqa: TID251
    InMemoryMetricReader,
    NumberDataPoint,
)

from skerry.telemetry import instruments, tracing
from skerry.telemetry.metrics import Metric
from skerry.telemetry.spans import FinishedSpan


@dataclass(slots=True)
class Collected:
    """What was emitted while the block ran."""

    spans: list[FinishedSpan] = field(default_factory=list[FinishedSpan])
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def __enter__(self) -> Self:
        tracing.install(self.spans.append)
        provider = MeterProvider([self.reader], shutdown_on_exit=False)
        instruments.install(provider.get_meter("test"))
        return self

    def __exit__(self, *_: object) -> None:
        tracing.install(None)
        instruments.install(instruments.OFF)

    def named(self, operation: str) -> FinishedSpan:
        """Return the one span of an operation."""
        (found,) = [span for span in self.spans if span.operation == operation]
        return found

    def metrics(self) -> dict[str, list[tuple[dict[str, object], float]]]:
        """Return attributes and value of each data point by metric, of a histogram its sum."""
        data = self.reader.get_metrics_data()
        return {
            metric.name: [
                (
                    dict(point.attributes or {}),
                    point.value if isinstance(point, NumberDataPoint) else point.sum,
                )
                for point in metric.data.data_points
            ]
            for resource in (data.resource_metrics if data is not None else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def values(self, metric: Metric) -> list[tuple[dict[str, object], float]]:
        """Return the data points of one metric."""
        return self.metrics().get(metric.name, [])
