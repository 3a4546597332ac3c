"""Report what is refused, however much of it is sent: one line a second, with counts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.errors import WireError
from skerry.protocol import messages
from skerry.protocol.records import read

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.log.base import Record

T = TypeVar("T", bound=messages.Record)

log = structlog.get_logger()

EVERY_S = 1.0


@dataclass(slots=True)
class Rejections:
    """Counts what was refused by cause, and logs ``event`` at most once a second.

    A line says the newest refusal in full, and how many there were since the line before.
    """

    event: str
    monotonic_s: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter[str])
    logged_s: float = float("-inf")

    def note(self, cause: str, **about: object) -> None:
        """Note one refusal; ``about`` are the fields of its line."""
        self.counts[cause] += 1
        now = self.monotonic_s()
        if now - self.logged_s >= EVERY_S:
            log.warning(self.event, cause=cause, counts=dict(self.counts), **about)
            self.counts.clear()
            self.logged_s = now


UNREADABLE = Rejections("messages_refused")
"""Messages of the log that this process refused at the door, over all of its readers."""


def refuse(error: Exception, subject: str, sequence: int) -> None:
    """Note that a message was refused, whatever reading it raised."""
    cause = error.cause if isinstance(error, WireError) else type(error).__name__
    UNREADABLE.note(cause, subject=subject[:200], sequence=sequence, detail=str(error)[:200])


def readable(kind: type[T], record: Record, run: str, plan_digest: int | None = None) -> T | None:
    """Return the record in a stored message, or None for one that is refused, which is reported.

    Whatever reading raises: no message ends a reader.
    """
    try:
        return read(kind, record, run=run, plan_digest=plan_digest)
    except Exception as error:  # noqa: BLE001 - what a hostile message raises is not foreseen
        refuse(error, record.subject, record.sequence)
        return None
