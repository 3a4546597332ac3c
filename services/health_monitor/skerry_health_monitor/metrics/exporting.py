"""What only the monitor knows, sent by OTLP too: goodput, who is alive, lag, ages, the broker.

What services tell of themselves they send themselves: twice in one backend it would count double.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from opentelemetry.metrics import Observation

from skerry.telemetry import instruments
from skerry.telemetry.metrics import ALL, MONITOR, MetricKind
from skerry.telemetry.points import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from skerry.telemetry.instruments import Observer
    from skerry.telemetry.metrics import Metric
    from skerry.telemetry.points import Figure

EVERY_S = 1.0
OWN = tuple(m for m in ALL if m.source == (MONITOR,) and m.kind is not MetricKind.HISTOGRAM)
"""Metrics that no other service reports."""


class Exporting:
    """Looks at all figures now and then, where the monitor's state may be read; sent from there.

    The thread that sends would see that state change under its eyes.
    """

    def __init__(self, figures: Callable[[], Iterable[Figure]]) -> None:
        self._figures = figures
        self._latest: dict[str, list[Observation]] = {}

    async def run(self) -> None:
        """Look for ever; where no backend takes metrics, be idle."""
        if not instruments.on():
            await asyncio.Event().wait()
        for metric in OWN:
            instruments.observe(metric, self._reader(metric))
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """Keep what there is to tell now."""
        latest: dict[str, list[Observation]] = {}
        for figure in self._figures():
            if isinstance(figure, Point) and figure.metric in OWN:
                labels = dict(zip(figure.metric.attributes, figure.labels, strict=True))
                latest.setdefault(figure.metric.name, []).append(
                    Observation(float(figure.value), labels)
                )
        self._latest = latest

    def _reader(self, metric: Metric) -> Observer:
        return lambda _options: self._latest.get(metric.name, [])
