"""Read the end of a service's log, for the line that says why it stopped or where it listens."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 65_536


def size_of(log: Path) -> int:
    """Return the length of a log: where the next line will begin."""
    return log.stat().st_size if log.exists() else 0


def last_sentence(log: Path, offset: int) -> str:
    """Return the last error that a process wrote from ``offset`` on, or an empty string.

    Prefers the line that services print for an expected error over the end of a traceback, and
    leaves out the borders of exception groups.
    """
    lines = [line.strip(" |+-") for line in _tail(log, offset) if not line.startswith("{")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(filter(None, (*reversed(errors), *reversed(lines))), "")


def last_event(log: Path, offset: int, event: str) -> dict[str, Any]:
    """Return the newest structured line about ``event`` from ``offset`` on; empty without one."""
    found: dict[str, Any] = {}
    for line in _tail(log, offset):
        if line.startswith("{") and f'"{event}"' in line:
            with contextlib.suppress(ValueError):
                fields = cast("dict[str, Any]", json.loads(line))
                found = fields if fields.get("event") == event else found
    return found


def _tail(log: Path, offset: int) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - MOST_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()
