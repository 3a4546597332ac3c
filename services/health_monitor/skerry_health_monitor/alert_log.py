"""Which alerts hold, since when, and which have held: what happened overnight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from skerry.status.alert_table import Alert, Severity

log = structlog.get_logger()

MOST_PAST = 60


@dataclass(frozen=True, slots=True)
class HeldAlert:
    """An alert and when it began; ``until_s`` is None while it holds. Seconds since the epoch.

    No other alert has its ``number``, not even one of an earlier start of the monitor: a page that
    reconnects would take one for the other.
    """

    number: int
    alert: Alert
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class AlertLog:
    """The alerts of one run, as long as this monitor lives; ``numbered`` is the newest number."""

    active: dict[str, HeldAlert] = field(default_factory=dict[str, HeldAlert])
    past: deque[HeldAlert] = field(default_factory=lambda: deque[HeldAlert](maxlen=MOST_PAST))
    numbered: int = 0

    def update(self, now: Iterable[Alert], now_s: float) -> bool:
        """Take what holds now; say whether any began, ended or has another severity."""
        before, self.active = self.active, {}
        changed = False
        for alert in now:
            held = before.pop(alert.key, None)
            if held is None:
                # By the clock, so that a monitor that is started again goes on above.
                self.numbered = max(self.numbered + 1, int(now_s * 1000))
                self.active[alert.key] = HeldAlert(self.numbered, alert, now_s)
            else:
                self.active[alert.key] = HeldAlert(held.number, alert, held.since_s)
            changed |= held is None or held.alert.severity is not alert.severity
            if held is None or alert.severity.rank > held.alert.severity.rank:
                (log.info if alert.severity is Severity.INFO else log.warning)(
                    "alert" if held is None else "alert_worse",
                    key=alert.key,
                    severity=alert.severity.value,
                    text=alert.text,
                )
        for over in before.values():
            log.info("alert_over", key=over.alert.key, lasted_s=round(now_s - over.since_s, 1))
            if over.alert.severity is not Severity.INFO:
                self.past.append(HeldAlert(over.number, over.alert, over.since_s, now_s))
        return changed or bool(before)
