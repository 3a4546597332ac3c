"""Alert rules and the dashboard do what their tests say, and name metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.status import alert_table
from skerry.telemetry.metrics import ALL, MONITOR, Metric, MetricKind, of, prometheus_name
from tests.support.processes import call

NAME = re.compile(r"\bskerry_[a-z0-9_]+")
LABELS = re.compile(r"(skerry_[a-z0-9_]+)\{([^}]*)\}")
KEY = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus adds itself."""


def series(metric: Metric) -> set[str]:
    """Return the names under which Prometheus stores a metric."""
    name = prometheus_name(metric)
    return {f"{name}{s}" for s in ("_bucket", "_sum", "_count")} if metric.buckets else {name}


KNOWN = {name: metric for metric in ALL for name in series(metric)}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable.get("definition", "")
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["expr"]


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / "infra" / "grafana" / "skerry.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def rules(root: Path) -> str:
    return (root / "infra" / "prometheus" / "rules.yml").read_text()


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: it is part of Debian's package prometheus")
    return found


@pytest.mark.parametrize(
    "check",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_finds_nothing_wrong(root: Path, promtool: str, check: tuple[str, ...]) -> None:
    done = call(promtool, *check, cwd=root / "infra" / "prometheus")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_those_of_the_table(rules: str) -> None:
    assert rules == alert_table.rules()


def test_every_alert_has_a_test_that_fires_it_and_one_in_which_it_is_silent(
    root: Path, rules: str
) -> None:
    tests = (root / "infra" / "prometheus" / "rules_test.yml").read_text()
    alerts = set(re.findall(r"- alert: (\w+)", rules))
    assert len(alerts) > 5
    fired = set(re.findall(r"- alertname: (\w+)\n\s+eval_time: \w+\n\s+exp_alerts", tests))
    assert fired == alerts
    assert set(re.findall(r"\{alertname: (\w+)", tests)) >= alerts


def test_every_alert_says_what_is_wrong_and_what_to_do(rules: str) -> None:
    for text in rules.split("- alert: ")[1:]:
        assert 'summary: "' in text, text.split("\n")[0]
        assert 'fix: "' in text, text.split("\n")[0]


def test_rules_and_dashboard_name_metrics_that_exist(rules: str, dashboard: dict[str, Any]) -> None:
    for text in (rules, *expressions(dashboard)):
        assert set(NAME.findall(text)) <= KNOWN.keys()


def test_rules_and_dashboard_ask_for_labels_that_their_metric_has(
    rules: str, dashboard: dict[str, Any]
) -> None:
    asked = [pair for text in (rules, *expressions(dashboard)) for pair in LABELS.findall(text)]
    assert len(asked) > 50
    for name, filters in asked:
        assert set(KEY.findall(filters)) <= {*KNOWN[name].attributes, *ADDED}, name


def test_what_is_scraped_from_the_monitor_is_not_mixed_with_what_services_send(
    rules: str, dashboard: dict[str, Any]
) -> None:
    for text in (rules, *expressions(dashboard)):
        for name, filters in LABELS.findall(text):
            if MONITOR in KNOWN[name].source and "label_values" not in text:
                assert 'job="' in filters, name


def test_the_dashboard_shows_every_metric_of_the_monitor(dashboard: dict[str, Any]) -> None:
    shown = {KNOWN[name] for text in expressions(dashboard) for name in NAME.findall(text)}
    assert {metric.name for metric in set(of(MONITOR)) - shown} == set()


def test_counters_are_shown_as_rates(dashboard: dict[str, Any]) -> None:
    for text in expressions(dashboard):
        for name in NAME.findall(text):
            if KNOWN[name].kind is MetricKind.COUNTER:
                assert "rate(" in text or "increase(" in text, text


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
