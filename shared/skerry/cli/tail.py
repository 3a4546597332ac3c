"""The end of a service's log, for the one line that says why it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 65_536


def last_sentence(log: Path, offset: int) -> str:
    """Return the error that a process wrote last behind ``offset``, or an empty string.

    Prefers the line that services print for an expected error over the end of a traceback.
    """
    lines = [line for line in _tail(log, offset) if line.strip() and not line.startswith("{")]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (told or lines or [""])[-1].strip()


def _tail(log: Path, offset: int) -> list[str]:
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(offset, log.stat().st_size - MOST_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()
