"""What the monitor remembers of alerts: since when they hold, and which have held."""

from __future__ import annotations

from structlog.testing import capture_logs

from skerry.status.alert_table import Alert, Severity
from skerry_health_monitor.alert_log import MOST_PAST, AlertLog, HeldAlert

NOW_S = 1_000_000.0


def alert(key: str, severity: Severity = Severity.WARNING) -> Alert:
    return Alert(key, severity, "text", "fix")


def test_an_alert_keeps_its_beginning_and_is_remembered_when_it_is_over() -> None:
    log = AlertLog()
    assert log.update([alert("x")], 10.0)
    assert not log.update([alert("x")], 11.0)
    assert log.active["x"].since_s == 10.0
    assert log.update([], 15.0)
    assert [(held.since_s, held.until_s) for held in log.past] == [(10.0, 15.0)]


def test_an_alert_that_becomes_worse_is_told_again_under_its_number() -> None:
    log = AlertLog()
    severities = (Severity.WARNING, Severity.CRITICAL, Severity.CRITICAL, Severity.WARNING)
    with capture_logs() as logs:
        changed = [log.update([alert("x", told)], 10.0 + n) for n, told in enumerate(severities)]
    assert changed == [True, True, False, True]
    assert [(line["event"], line["severity"]) for line in logs] == [
        ("alert", "warning"),
        ("alert_worse", "critical"),
    ]
    assert log.active["x"] == HeldAlert(10_000, alert("x"), 10.0)


def test_no_two_alerts_have_one_number_though_the_monitor_was_started_again() -> None:
    logs = AlertLog(), AlertLog()
    for log, now_s in zip(logs, (NOW_S, NOW_S + 1), strict=True):
        log.update([alert("x"), alert("y")], now_s)
    numbers = [held.number for log in logs for held in log.active.values()]
    assert numbers == sorted(set(numbers))


def test_what_only_explains_is_not_remembered() -> None:
    log = AlertLog()
    log.update([alert("x", Severity.INFO)], 10.0)
    log.update([], 11.0)
    assert not log.past


def test_the_log_is_bounded() -> None:
    log = AlertLog()
    for number in range(3 * MOST_PAST):
        log.update([alert(f"x{number}")], float(number))
    assert len(log.past) == MOST_PAST
