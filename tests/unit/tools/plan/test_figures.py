"""Figures say their unit and where they come from, and never hold what is no number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given as over
from hypothesis import strategies as st

from skerry_tools.plan.figures import Figure, Grid, Kind, Sheet, derived, given, shown


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="say None"):
        Figure(value, "s")


def test_what_follows_from_an_extrapolated_figure_is_extrapolated() -> None:
    far = Figure(1.0, "s", Kind.EXTRAPOLATED)
    assert derived(2.0, "s", "", given(1.0, "s"), far).kind is Kind.EXTRAPOLATED
    assert derived(2.0, "s", "", given(1.0, "s")).kind is Kind.DERIVED


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (8e9, "bit/s", "8.00 Gbit/s"),
        (999.0, "bit/s", "999 bit/s"),
        (1000.0, "B", "1.00 kB"),
        (12e9, "param", "12.0 Gparam"),
        (0.982, "share", "98.2 %"),
        (0.25, "s", "250 ms"),
        (86400.0 * 3, "s", "3.00 d"),
        (1234567.0, "USD", "1,234,567 USD"),
        (2.0, "step", "2 steps"),
        (1.0, "step", "1 step"),
        (12.5, "x", "12.50 x"),
        (0.0, "bit/s", "0 bit/s"),
    ],
)
def test_a_number_is_shown_as_people_write_it(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


@over(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["s", "B", "1", "x"]))
def test_every_number_can_be_shown(value: float, unit: str) -> None:
    assert shown(value, unit)


def test_a_figure_that_does_not_exist_is_none_in_text_and_null_for_machines() -> None:
    absent = Figure(None, "step", Kind.DERIVED, "why")
    assert absent.text == "none"
    assert absent.json() == {"value": None, "unit": "step", "kind": "derived", "convention": "why"}


def test_a_sheet_shows_each_figure_with_its_kind_and_convention() -> None:
    sheet = Sheet("link", "Link", {"up_rate": given(5e9, "bit/s", "1e9 bits")})
    assert sheet.lines() == ["Link", "  up rate  =5.00 Gbit/s  1e9 bits"]


def test_a_grid_shows_a_dash_where_a_row_lacks_a_figure() -> None:
    grid = Grid("g", "G", {"a": {"x": Figure(1.0, "1")}, "b": {"y": Figure(2.0, "1")}}, ("note",))
    assert [line.split() for line in grid.lines()[1:]] == [
        ["x", "y"],
        ["a", "1", "-"],
        ["b", "-", "2"],
        ["note"],
    ]
