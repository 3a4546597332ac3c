"""Figures have their unit and origin, and never hold what is no number."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry_tools.plan.figures import Figure, FigureKind, FigureTable, shown


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="use None"):
        Figure(value, "s")


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


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["s", "B", "1", "x"]))
def test_every_number_can_be_shown(value: float, unit: str) -> None:
    assert shown(value, unit)


def test_a_table_shows_figures_with_their_origin_and_convention() -> None:
    rate = Figure(5e9, "bit/s", "1e9 bits", FigureKind.INPUT)
    table = FigureTable("link", "Link", {"up_rate": rate, "none": Figure(None, "s", "why")})
    assert table.lines() == [
        "Link",
        "  up rate  =5.00 Gbit/s  1e9 bits",
        "  none     none          why",
    ]
    assert table.json()["none"] == {
        "value": None, "unit": "s", "kind": "derived", "convention": "why",
    }  # fmt: skip


def test_a_table_of_rows_shows_a_dash_where_one_lacks_a_figure_and_joins_those_alike() -> None:
    one, two = Figure(1.0, "1"), Figure(2.0, "1", "", FigureKind.EXTRAPOLATED)
    rows = {"a": {"x": one}, "b": {"y": two}, "c": {"y": two}}
    table = FigureTable("g", "G", rows, ("note",), join_alike=True)
    assert [line.split() for line in table.lines()[-3:]] == [
        ["a", "1", "-"], ["b", "(and", "1", "alike)", "-", "?2"], ["note"],
    ]  # fmt: skip
    assert [name for name, _ in table.flat()] == ["a: x", "b: y", "c: y"]
