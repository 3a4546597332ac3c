"""What only the monitor knows is sent by OTLP, and what others send themselves is not."""

from __future__ import annotations

import asyncio

from skerry.telemetry import metrics
from skerry.telemetry.metrics import Figure, Point
from skerry_health_monitor.metrics.exporting import export
from tests.support.telemetry import Collected

FIGURES: list[Figure] = [
    Point(metrics.GOODPUT, 0.75, ("run",)),
    Point(metrics.LEARNERS, 2, ("run", "alive")),
    Point(metrics.LEARNERS, 1, ("run", "gone")),
    Point(metrics.TOKENS, 512, ("run", "a")),
]


async def test_figures_are_read_as_they_were_when_the_monitor_last_looked(
    collected: Collected,
) -> None:
    running = asyncio.ensure_future(export(lambda: FIGURES))
    await asyncio.sleep(0)
    found = collected.metrics()
    of = {"run": "run"}
    assert found["skerry.goodput.ratio"] == [(of, 0.75)]
    assert found["skerry.learners"] == [
        (of | {"state": "alive"}, 2.0),
        (of | {"state": "gone"}, 1.0),
    ]
    assert "skerry.tokens" not in found, "a learner sends its own"
    running.cancel()


async def test_without_an_exporter_nothing_is_looked_at() -> None:
    def figures() -> list[Figure]:
        raise AssertionError

    exporting = asyncio.ensure_future(export(figures))
    await asyncio.sleep(0)
    assert not exporting.done()
    exporting.cancel()
