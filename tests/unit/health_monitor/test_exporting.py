"""What only the monitor knows is sent by OTLP, and what others send themselves is not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from skerry.telemetry import instruments, metrics
from skerry.telemetry.instruments import Attributes, Observer
from skerry.telemetry.metrics import Metric
from skerry.telemetry.points import Figure, Point
from skerry_health_monitor.metrics.exporting import OWN, Exporting

FIGURES: list[Figure] = [
    Point(metrics.GOODPUT, 0.75, ("run",)),
    Point(metrics.LEARNERS, 2, ("run", "alive")),
    Point(metrics.LEARNERS, 1, ("run", "gone")),
    Point(metrics.TOKENS, 512, ("run", "a")),
]


class Taken:
    """Keeps the observers."""

    def __init__(self) -> None:
        self.observers: dict[str, Observer] = {}
        self.all_here = asyncio.Event()

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None:
        raise NotImplementedError

    def observe(self, metric: Metric, observer: Observer) -> None:
        self.observers[metric.name] = observer
        if len(self.observers) == len(OWN):
            self.all_here.set()


@pytest.fixture
def taken() -> Iterator[Taken]:
    sink = Taken()
    instruments.install(sink)
    yield sink
    instruments.install(None)


async def test_figures_are_read_as_they_were_when_the_monitor_last_looked(taken: Taken) -> None:
    exporting = asyncio.ensure_future(Exporting(lambda: FIGURES).run())
    await taken.all_here.wait()
    await asyncio.sleep(0)
    assert taken.observers["skerry.goodput.ratio"]() == [(0.75, {"run": "run"})]
    assert taken.observers["skerry.learners"]() == [
        (2.0, {"run": "run", "state": "alive"}),
        (1.0, {"run": "run", "state": "gone"}),
    ]
    assert "skerry.tokens" not in taken.observers, "a learner sends its own"
    exporting.cancel()


async def test_where_nobody_takes_metrics_nothing_is_looked_at() -> None:
    def figures() -> list[Figure]:
        raise AssertionError

    exporting = asyncio.ensure_future(Exporting(figures).run())
    await asyncio.sleep(0)
    assert not exporting.done()
    exporting.cancel()
