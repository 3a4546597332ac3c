"""Figures are shown with their unit and origin, and what is no number is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry_tools.plan.answer import Answer, Figure, FigureTable, shown


def answered(table: FigureTable) -> Answer:
    return Answer("It works.", [table], ["far"], "a paper", {"x": "published"})


def printed(table: FigureTable, capsys: pytest.CaptureFixture[str]) -> list[str]:
    answered(table).print()
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        answered(FigureTable("t", "T", {"x": Figure(value, "s")})).json()


def test_figures_are_printed_with_origin_and_convention_and_mind_and_source_follow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {"up_rate": Figure(5e9, "bit/s", "1e9 [bits]"), "none": Figure(None, "s")}
    lines = printed(FigureTable("link", "Link", rows, "input", notes=("note",)), capsys)
    assert lines[:6] == [
        "It works.",
        "",
        "Link",
        "up rate =5.00 Gbit/s 1e9 [bits]",
        "none =none",
        "note",
    ]
    assert lines[6:12] == ["", "Mind", "far", "", "Source: a paper", "x: published"]


def test_rows_of_sites_that_are_alike_are_one_and_what_a_row_lacks_is_a_dash(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {
        "a": {"x": Figure(1.0, "1")},
        "b": {"y": Figure(2.0, "1")},
        "c": {"y": Figure(2.0, "1")},
    }
    lines = printed(FigureTable("g", "G", rows, "extrapolated"), capsys)
    assert lines[3:6] == ["x y", "a ?1 -", "b (and 1 alike) - ?2"]
