"""Whether the broker answers, as the bus tells it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.service.logs import broker_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(slots=True)
class Link:
    """Hears what becomes of the connection; ``away_since_s`` is None while the broker answers.

    ``tell`` hears of every event too.
    """

    away_since_s: float | None = None
    clock_s: Callable[[], float] = time.time
    tell: Callable[[str, Mapping[str, str]], None] = broker_event

    def heard(self, event: str, fields: Mapping[str, str]) -> None:
        """Take an event of the bus."""
        if event == "disconnected" and self.away_since_s is None:
            self.away_since_s = self.clock_s()
        elif event == "reconnected":
            self.away_since_s = None
        self.tell(event, fields)

    def away_s(self, now_s: float) -> float | None:
        """Return for how long the broker has been away; None while it is not."""
        return None if self.away_since_s is None else max(0.0, now_s - self.away_since_s)
