"""Measure how long the broker has been away."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.service.logs import broker_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(slots=True)
class BrokerWatch:
    """How long the broker has been away; ``away_since_s`` is None while it answers.

    Passes every event on to ``report``.
    """

    away_since_s: float | None = None
    clock_s: Callable[[], float] = time.time
    report: Callable[[str, Mapping[str, str]], None] = broker_event

    def on_event(self, event: str, fields: Mapping[str, str]) -> None:
        """Take an event of the bus."""
        if event == "disconnected" and self.away_since_s is None:
            self.away_since_s = self.clock_s()
        elif event == "reconnected":
            self.away_since_s = None
        self.report(event, fields)

    def away_s(self, now_s: float) -> float | None:
        """Return for how long the broker has been away; None while it is not."""
        return None if self.away_since_s is None else max(0.0, now_s - self.away_since_s)
