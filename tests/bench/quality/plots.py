"""Plots of an experiment's results, as SVG that is the same whenever the results are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "quality"

from matplotlib import pyplot as plt  # noqa: E402 - the backend is chosen before
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from .cells import SMALL  # noqa: E402
from .samples import Estimate, estimate  # noqa: E402
from .store import Found  # noqa: E402
from .tables import Findings  # noqa: E402

WIDTH_IN = 7.0
HEIGHT_IN = 4.0
HOLLOW = "one seed"
ONE_SEED: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "linestyle": "none",
    "markerfacecolor": "none",
}
STYLES = ("-", "--", "-.", ":")


def plot(findings: Findings, folder: Path) -> list[Path]:
    """Draw what there is of an experiment; returns the files, none if nothing can be drawn."""
    experiment = findings.experiment
    folder.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    if any(findings.difference(cell) for cell in experiment.cells if cell.plotted):
        made.append(_save(_differences(findings), folder / f"{experiment.name}.svg"))
    if experiment.curves and findings.runs:
        made.append(_save(_curves(findings), folder / f"{experiment.name}-curves.svg"))
    return made


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    return path


def _differences(findings: Findings) -> Figure:
    """Draw differences in per cent with their intervals, over x, a colour for each series.

    Those of one seed have no interval, and are hollow.
    """
    figure, axes = plt.subplots(figsize=(WIDTH_IN, HEIGHT_IN))
    experiment = findings.experiment
    places: dict[str, int] = {}
    lines: dict[str, list[tuple[int, Estimate]]] = {}
    for cell in experiment.cells:
        labels = dict(cell.labels)
        difference = findings.difference(cell)
        if not cell.plotted or cell.key in experiment.ladder:
            continue
        place = places.setdefault(labels[experiment.x], len(places))
        if difference is not None:
            rest = [v for k, v in cell.labels if k not in {experiment.x, experiment.series}]
            series = " ".join([labels.get(experiment.series, ""), *rest]).strip() or "helpers"
            lines.setdefault(series, []).append((place, difference))
    for number, (series, points) in enumerate(lines.items()):
        shift = 0.5 * (number / max(1, len(lines) - 1) - 0.5) if len(lines) > 1 else 0.0
        _points(axes, [(place + shift, found) for place, found in points], f"C{number}", series)
    if any(found.half is None for points in lines.values() for _, found in points):
        axes.plot([], [], **ONE_SEED, color="grey", label=HOLLOW)
    axes.axhline(0.0, color="grey", linewidth=0.8)
    axes.set_xticks(list(places.values()), list(places))
    axes.set_xlabel(experiment.x)
    beside = "equal fleets of as many steps" if experiment.at_equal_steps else "the baseline"
    axes.set_ylabel(f"loss against {beside}, %")
    _legend(axes)
    return figure


def _points(axes: Axes, points: Sequence[tuple[float, Estimate]], colour: str, series: str) -> None:
    """Draw the points of a series, which is in the legend once."""
    several = [(x, found.mean, found.half) for x, found in points if found.half is not None]
    single = [(x, found.mean) for x, found in points if found.half is None]
    if several:
        xs, means, halves = zip(*several, strict=True)
        axes.errorbar(
            xs, means, yerr=halves, fmt="o", capsize=3, markersize=4, color=colour, label=series
        )
    if single:
        xs, means = zip(*single, strict=True)
        label = "_" if several else series
        axes.plot(xs, means, **ONE_SEED, color=colour, label=label)


def _curves(findings: Findings) -> Figure:
    """Draw held-out losses on the way, means over seeds: a colour per series, a line per x."""
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 1.4 * HEIGHT_IN))
    experiment = findings.experiment
    by_time = not experiment.series
    colours: dict[str, str] = {}
    styles: dict[str, str] = {}
    for cell in experiment.cells:
        labels, runs = dict(cell.labels), list(findings.of(cell).values())
        if not runs or cell.size.name != SMALL.name:
            continue
        xs = _columns(runs, "at_s" if by_time else "tokens")
        ys = _columns(runs, "loss")
        shade, line = labels.get(experiment.series, labels[experiment.x]), labels[experiment.x]
        axes.plot(
            [estimate(column).mean for column in xs],
            [estimate(column).mean for column in ys],
            color=colours.setdefault(shade, f"C{len(colours)}"),
            linestyle=styles.setdefault(line, STYLES[len(styles) % len(STYLES)]),
            label=" ".join(v for k, v in cell.labels if k != "model"),
            linewidth=1.0,
        )
    axes.set_xlabel("virtual s" if by_time else "tokens merged")
    axes.set_ylabel("held-out loss, nats")
    low, high = axes.get_ylim()
    axes.set_ylim(low, low + 0.4 * (high - low))
    _legend(axes)
    return figure


def _columns(runs: Sequence[Found], name: str) -> list[tuple[float, ...]]:
    """Return one quantity at each evaluation, of all runs that come to it."""
    return list(zip(*(run.curve(name) for run in runs), strict=False))


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        entries = sorted(zip(labels, handles, strict=True), key=lambda entry: entry[0] == HOLLOW)
        labels, handles = map(list, zip(*entries, strict=True))
        axes.legend(handles, labels, fontsize="x-small", ncols=2)
