"""The table of metrics follows its naming rules, and its page is made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skerry.telemetry.metrics import (
    ALL,
    RUN,
    SERVER,
    Metric,
    MetricKind,
    Point,
    Spread,
    flat,
    of,
    prometheus_name,
)
from tests.support.metrics_page import markdown

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
SERVICES = {"learner", "syncer", "checkpointer", "evaluator", "health-monitor"}
UNITS = re.compile(r"s|By|1|\{[a-z]+\}")


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run python -m tests.support.metrics_page > docs/metrics.md"
    )


def test_no_two_metrics_share_a_name_in_either_spelling() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)
    assert len({prometheus_name(metric) for metric in ALL}) == len(ALL)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_each_metric_has_a_name_of_ours_a_unit_a_source_and_an_owner(metric: Metric) -> None:
    assert re.fullmatch(r"skerry(\.[a-z][a-z_]*)+", metric.name)
    assert UNITS.fullmatch(metric.unit)
    assert metric.source
    assert set(metric.source) <= SERVICES
    assert metric.attributes[0] in {RUN, SERVER}
    assert metric.description.endswith(".")


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_unit_is_never_in_an_opentelemetry_name_and_a_ratio_always(metric: Metric) -> None:
    words = re.split(r"[._]", metric.name)
    assert not {"seconds", "bytes", "total", "s"} & set(words)
    assert (metric.unit == "1") == (words[-1] == "ratio")


def test_every_service_reports_something() -> None:
    assert all(of(service) for service in SERVICES)


@pytest.mark.parametrize(
    ("name", "kind", "unit", "spelt"),
    [
        ("skerry.a.duration", MetricKind.HISTOGRAM, "s", "skerry_a_duration_seconds"),
        ("skerry.a.io", MetricKind.COUNTER, "By", "skerry_a_io_bytes_total"),
        ("skerry.a.seconds", MetricKind.GAUGE, "s", "skerry_a_seconds"),
        ("skerry.a.ratio", MetricKind.GAUGE, "1", "skerry_a_ratio"),
        ("skerry.a.share", MetricKind.GAUGE, "1", "skerry_a_share_ratio"),
        ("skerry.a.total", MetricKind.COUNTER, "{thing}", "skerry_a_total"),
        ("skerry.a_b.c", MetricKind.GAUGE, "{thing}", "skerry_a_b_c"),
    ],
)
def test_prometheus_names_follow_opentelemetrys_rule(
    name: str, kind: MetricKind, unit: str, spelt: str
) -> None:
    assert prometheus_name(Metric(name, kind, unit, "", (), ())) == spelt


def test_flat_names_leave_the_run_out_and_give_a_histogram_by_count_and_sum() -> None:
    metric = Metric("skerry.x", MetricKind.GAUGE, "s", "", ("run", "learner"), ())
    spread = Spread(Metric("skerry.y", MetricKind.HISTOGRAM, "s", "", ("run",), (), (1.0,)), ("r",))
    spread.add(0.5)
    spread.add(2.0)
    assert flat([Point(metric, 2.0, ("r", "a")), spread]) == {
        "skerry.x{learner=a}": 2.0,
        "skerry.y.count": 2,
        "skerry.y.sum": 2.5,
    }
