"""Numbers, times and texts as people read them."""

from __future__ import annotations

import math

import pytest

from skerry.status.format import clip, clock, duration, finite, number, rounded, size


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "?"), (0, "0:00"), (62.9, "1:02"), (3723, "1:02:03")]
)
def test_times(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


def test_text_of_others_is_bounded_and_printable() -> None:
    assert clip("a\x1b[31mb" + "x" * 100, 8) == "a\N{REPLACEMENT CHARACTER}[31mbx…"


def test_durations_for_people() -> None:
    assert [duration(s) for s in (0.25, 12, 200, 8000, 200_000)] == [
        *("0.2 s", "12 s", "3 min", "2 h", "2 d")
    ]


def test_absurd_numbers_are_shown_by_their_magnitude() -> None:
    assert [number(value) for value in (None, 1234.0, 1.7e308)] == ["-", "1,234", "2e+308"]
    assert size(1.7e308) == "2e+296 TB"


def test_what_is_no_number_is_none() -> None:
    assert [finite(value) for value in (1.5, math.nan, math.inf)] == [1.5, None, None]
    assert [rounded(value) for value in (1 / 3, math.nan, None)] == [0.333333, None, None]
