"""A report: one page that loads nothing, its figures as SVG, and every table as CSV.

The same answer gives the same bytes with the same matplotlib.
"""
# pyright: basic
# matplotlib's own types are partly unknown

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from skerry.errors import ConfigError
from skerry_tools.plan.figures import Answer, Chart, LineChart

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
    """Write ``report.html``, and each figure and table beside it; return the page.

    ConfigError for a folder that cannot be written.
    """
    charts = answer.charts()
    drawn = {chart.name: _draw(chart) for chart in charts}
    head = ("", "value", "unit", "kind", "convention")
    rows: dict[str, list[tuple[object, ...]]] = {chart.name: _rows(chart) for chart in charts}
    for table in answer.tables:
        flat = ((name, f.value, f.unit, f.kind.value, f.convention) for name, f in table.flat())
        rows[table.name] = [head, *flat]
    page = Template((resources.files("skerry_tools.plan") / "report.html").read_text("utf-8"))
    files = {f"{name}.svg": svg for name, svg in drawn.items()}
    files |= {f"{name}.csv": _csv(found) for name, found in rows.items()}
    files["report.html"] = page.substitute(
        title=escape(answer.title),
        lead=escape(answer.text[0]),
        figures="\n".join(f"<figure>{svg[svg.index('<svg') :]}</figure>" for svg in drawn.values()),
        text=escape("\n".join(answer.text[1:])),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{folder} cannot be written ({error.strerror}): name another folder."
        raise ConfigError(msg, path=str(folder)) from error
    return folder / "report.html"


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _rows(chart: Chart) -> list[tuple[object, ...]]:
    """Return what a chart is drawn from."""
    if isinstance(chart, LineChart):
        found: list[tuple[object, ...]] = [("series", chart.across, "share", "published")]
        for name, points in chart.series.items():
            known = dict(chart.published.get(name, ()))
            found += [(name, x, y, known.get(x, "")) for x, y in points]
        return found
    head = ("lane", "begin_s", "end_s", "use")
    return [head, *((name, *span) for name, spans in chart.lanes.items() for span in spans)]


def _draw(chart: Chart) -> str:
    """Return a chart as SVG without a time, so that it is the same again."""
    with mpl.rc_context({"svg.hashsalt": f"skerry {chart.name}", "svg.fonttype": "none"}):
        canvas = Canvas(figsize=SIZE, layout="constrained")
        axes: Any = canvas.add_subplot()
        axes.set_title(chart.title)
        (_lines if isinstance(chart, LineChart) else _lanes)(axes, chart)
        if axes.get_legend_handles_labels()[0]:
            canvas.legend(loc="outside right upper", frameon=False)
        text = io.StringIO()
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _lines(axes: Any, chart: Any) -> None:
    for index, (name, points) in enumerate(chart.series.items()):
        axes.plot(*zip(*points, strict=True), label=name, color=f"C{index}")
        if chart.published.get(name):
            axes.plot(*zip(*chart.published[name], strict=True), "o", color=f"C{index}")
    axes.set_xscale("log" if chart.log else "linear")
    axes.set_xlabel(chart.across)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=True, alpha=0.3)


def _lanes(axes: Any, chart: Any) -> None:
    uses = sorted({use for spans in chart.lanes.values() for _, _, use in spans})
    for index, use in enumerate(uses):
        for place, spans in enumerate(chart.lanes.values()):
            bars = [(begin, end - begin) for begin, end, own in spans if own == use]
            label = use if place == 0 else None
            axes.broken_barh(bars, (place - 0.4, 0.8), color=f"C{index}", label=label)
    axes.set_yticks(range(len(chart.lanes)), list(chart.lanes))
    axes.plot(chart.marks, [-0.7] * len(chart.marks), "|", color="black")
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start")
