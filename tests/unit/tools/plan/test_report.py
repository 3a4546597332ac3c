"""Reports: charts that are XML, tables that keep their digits."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from skerry.errors import ConfigError
from skerry_tools.plan.figures import Answer, Figure, FigureTable, LineChart
from skerry_tools.plan.report import write

HOSTILE = "<script>alert('&')</script>"
LINE, DOT = [(1.0, 0.5), (10.0, 0.7)], [(1.0, 0.6)]
CHARTS = [
    LineChart("lines", HOSTILE, "chips", {HOSTILE: LINE}, {HOSTILE: DOT}),
    LineChart("flat", "t", "K", {"a": [(1.0, 0.0), (2.0, 0.0)]}, log=False),
]
TABLE = FigureTable("table", "T", {HOSTILE: Figure(0.123456789, "s"), "none": Figure(None, "s")})
ANSWER = Answer([f"It works {HOSTILE}", "Words"], {}, [TABLE], lambda: CHARTS)


def test_every_part_is_also_a_file_and_the_same_bytes_again(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write(ANSWER, one)
    write(ANSWER, two)
    names = {path.name for path in one.iterdir()}
    charts = {f"{chart.name}.{kind}" for chart in CHARTS for kind in ("svg", "csv")}
    assert names == {"answer.txt", "table.csv", *charts}
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    for path in one.glob("*.svg"):
        ET.fromstring(path.read_text("utf-8"))  # noqa: S314 - our own
    rows = list(csv.reader((one / "table.csv").read_text("utf-8").splitlines()))
    assert rows[1][:2] == [HOSTILE, "0.123456789"]
    points = list(csv.reader((one / "lines.csv").read_text("utf-8").splitlines()))
    assert points[1:] == [[HOSTILE, "1.0", "0.5", "0.6"], [HOSTILE, "10.0", "0.7", ""]]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another folder"):
        write(ANSWER, tmp_path / "file")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from skerry_tools.__main__ import app\n"
        f"app(['plan', '--scenario', 'four-regions', '--report', {str(tmp_path)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("run `pip install 'skerry[report]'`.")
