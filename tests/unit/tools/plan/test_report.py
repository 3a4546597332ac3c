"""Reports: one page that loads nothing, pictures that are XML, tables that keep their digits."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry_tools.plan.report.page import Part, Report, Rows, write
from skerry_tools.plan.report.svg import Axis, Bar, Series, Span, gantt, lines, tornado

HOSTILE = "<script>alert('&')</script>"
NUMBERS = st.floats(0, 1e9, allow_nan=False)


def report() -> Report:
    series = (Series(HOSTILE, ((1.0, 0.5), (10.0, 0.75)), low=(0.4, 0.7), high=(0.6, 0.8)),)
    pictures = (
        ("lines", lines("goodput", series, Axis("chips", log=True), Axis("goodput", percent=True))),
        ("gantt", gantt("lanes", [("a", [Span(0, 2, 1)])], ("trains", "down"), Axis("s"), (1.0,))),
        ("tornado", tornado("inputs", [Bar("mtbi", 0.5, 0.9)], 0.8, Axis("goodput"))),
    )
    table = Rows("table", ("who", "goodput"), ((HOSTILE, 0.123456789), ("b", 1)))
    return Report("A report", f"It works {HOSTILE}", (Part("One", ("Words",), pictures, (table,)),))


def test_a_page_loads_nothing_and_runs_nothing() -> None:
    page = report().html()
    assert "<script" not in page
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", page)


def test_the_same_report_is_the_same_bytes() -> None:
    assert report().html() == report().html()


def test_every_part_is_also_a_file(tmp_path: Path) -> None:
    written = write(report(), tmp_path / "new")
    names = {path.name for path in written}
    assert names == {"report.html", "lines.svg", "gantt.svg", "tornado.svg", "table.csv"}
    for path in written:
        if path.suffix == ".svg":
            ET.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own
    rows = list(csv.reader((tmp_path / "new" / "table.csv").read_text("utf-8").splitlines()))
    assert rows[1] == [HOSTILE, "0.123456789"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another folder"):
        write(report(), tmp_path / "file")


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6), st.booleans(), st.booleans())
def test_any_values_make_a_picture_without_nan(
    points: list[tuple[float, float]], log_x: bool, log_y: bool
) -> None:
    drawn = lines("t", [Series("s", tuple(points))], Axis("x", log=log_x), Axis("y", log=log_y))
    ET.fromstring(drawn)  # noqa: S314 - our own
    assert "nan" not in drawn.lower()
