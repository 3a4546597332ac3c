"""Which alerts hold, since when, and which have held: what happened overnight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from skerry.bus.alerts import Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.bus.alerts import Alert

log = structlog.get_logger()

MOST_PAST = 60


@dataclass(frozen=True, slots=True)
class Held:
    """An alert and when it began; ``until_s`` is None while it holds. Seconds since the epoch."""

    number: int
    alert: Alert
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class Book:
    """The alerts of one run, as long as this monitor lives."""

    active: dict[str, Held] = field(default_factory=dict[str, Held])
    past: deque[Held] = field(default_factory=lambda: deque[Held](maxlen=MOST_PAST))
    numbered: int = 0

    def update(self, now: Iterable[Alert], now_s: float) -> bool:
        """Take what holds now; say whether any began, ended or reads differently."""
        before, self.active = self.active, {}
        for alert in now:
            held = before.pop(alert.key, None)
            if held is None:
                self.numbered += 1
                (log.info if alert.severity is Severity.INFO else log.warning)(
                    "alert", key=alert.key, severity=alert.severity.value, text=alert.text
                )
            number, since_s = (
                (self.numbered, now_s) if held is None else (held.number, held.since_s)
            )
            self.active[alert.key] = Held(number, alert, since_s)
        for over in before.values():
            log.info("alert_over", key=over.alert.key, lasted_s=round(now_s - over.since_s, 1))
            if over.alert.severity is not Severity.INFO:
                self.past.append(Held(over.number, over.alert, over.since_s, now_s))
        return bool(before) or any(held.since_s == now_s for held in self.active.values())
