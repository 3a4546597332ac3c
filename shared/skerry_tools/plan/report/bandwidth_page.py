"""Pictures of Streaming DiLoCo's table: utilisation by bandwidth, a picture for each model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry_tools.plan.bandwidths import cells, curves, verdict
from skerry_tools.plan.report.page import Part, Report, Rows
from skerry_tools.plan.report.svg import Axis, Series, lines

if TYPE_CHECKING:
    from skerry.settings.tree import Tree

HEADS = ("model", "method", "utilisation", "needed_gbit_s", "published_gbit_s", "steps_apart")


def report(tree: Tree) -> Report:
    """Return the report of a scenario of this kind; ConfigError where it cannot be read."""
    found = cells(tree)
    pictures = tuple(
        (
            f"utilisation-{model}",
            lines(
                f"{model}: utilisation against bandwidth",
                [Series(method, tuple(points)) for method, points in methods.items()],
                Axis("bandwidth between two islands, bit/s", log=True),
                Axis("share of time in compute", least=0, most=1, percent=True),
            ),
        )
        for model, methods in curves(tree).items()
    )
    rows = tuple(
        (cell.model, cell.method, cell.target, cell.gbit_s, cell.published, cell.steps)
        for cell in found
    )
    source = str(tree.values.get("source", ""))
    return Report(
        title="Bandwidths for a compute utilisation",
        lead=verdict(found),
        parts=(
            Part("Utilisation", (f"Source: {source}",), pictures),
            Part("Cells", tables=(Rows("bandwidths", HEADS, rows),)),
        ),
    )
