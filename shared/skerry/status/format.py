"""Numbers, times and other people's text as every viewer shows them."""

from __future__ import annotations

import math

NOT_PRINTABLE = "\N{REPLACEMENT CHARACTER}"
MOST_COUNT = 1e15
"""Larger counts are shown by their order of magnitude: 300 digits are not read."""


def clip(text: str, most: int = 64) -> str:
    """Return text that others chose, bounded and without control characters."""
    if len(text) <= most and text.isprintable():
        return text
    return printable(text[:most]).replace("\n", NOT_PRINTABLE) + "…" * (len(text) > most)


def printable(text: str) -> str:
    """Return text that others chose without control characters other than line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else NOT_PRINTABLE for c in text)


def duration(seconds: float) -> str:
    """Return seconds in their largest unit: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    for unit, size_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def clock(seconds: float | None) -> str:
    """Return seconds as 1:02 or 1:02:03, or ? where they are unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Return bytes in powers of 1000: 999 B, 1.5 kB, 2.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{number(count, '.1f')} TB"


def number(value: float | None, spec: str = ",.0f") -> str:
    """Return a number in that format, - for none, and by its magnitude where it is absurd."""
    if value is None:
        return "-"
    return format(value, spec) if abs(value) < MOST_COUNT else f"{value:.0e}"


def loss(value: float | None) -> str:
    """Return a loss with three decimals, - for none."""
    return number(value, ".3f")


def finite(value: float) -> float | None:
    """Return the value, None for NaN and infinities."""
    return value if math.isfinite(value) else None


def rounded(value: float | None) -> float | None:
    """Return a number with six significant digits; None for None, NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
