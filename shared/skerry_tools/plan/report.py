"""A report: every table as CSV and every chart as SVG, in one folder.

The same answer gives the same bytes with the same matplotlib.
"""
# pyright: basic
# matplotlib's own types are partly unknown

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skerry.errors import ConfigError
from skerry_tools.plan.figures import Answer, LineChart

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas
    from matplotlib.ticker import PercentFormatter
except ImportError as error:
    NEEDED = (
        "A report needs matplotlib, which is not installed: run `pip install 'skerry[report]'`."
    )
    raise ConfigError(NEEDED, path="report") from error

SIZE = (9.0, 4.5)


def write(answer: Answer, folder: Path) -> Path:
    """Write the answer's text, tables and charts; return the folder.

    ConfigError for a folder that cannot be written.
    """
    files = {"answer.txt": "\n".join(answer.text) + "\n"}
    for chart in answer.charts():
        files |= {f"{chart.name}.csv": _csv(_rows(chart)), f"{chart.name}.svg": _drawn(chart)}
    head = ("", "value", "unit", "kind", "convention")
    for table in answer.tables:
        rows = ((name, f.value, f.unit, f.kind.value, f.convention) for name, f in table.flat())
        files[f"{table.name}.csv"] = _csv([head, *rows])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{folder} cannot be written ({error.strerror}): name another folder."
        raise ConfigError(msg, path=str(folder)) from error
    return folder


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rows(chart: LineChart) -> list[tuple[object, ...]]:
    """Return what a chart is drawn from."""
    found: list[tuple[object, ...]] = [("series", chart.across, "share", "published")]
    for name, points in chart.series.items():
        known = dict(chart.published.get(name, ()))
        found += [(name, x, y, known.get(x, "")) for x, y in points]
    return found


def _drawn(chart: LineChart) -> str:
    """Return a chart as SVG without a time, so that it is the same again."""
    with mpl.rc_context({"svg.hashsalt": f"skerry {chart.name}", "svg.fonttype": "none"}):
        canvas = Canvas(figsize=SIZE, layout="constrained")
        axes: Any = canvas.add_subplot()
        for index, (name, points) in enumerate(chart.series.items()):
            axes.plot(*zip(*points, strict=True), label=name, color=f"C{index}")
            if chart.published.get(name):
                axes.plot(*zip(*chart.published[name], strict=True), "o", color=f"C{index}")
        axes.set(title=chart.title, xlabel=chart.across, ylim=(0, 1.02))
        axes.set_xscale("log" if chart.log else "linear")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=True, alpha=0.3)
        canvas.legend(loc="outside right upper", frameon=False)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
