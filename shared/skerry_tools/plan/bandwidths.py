"""Streaming DiLoCo's table of bandwidths, worked out again and held to what was published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from pydantic import Field

from skerry.errors import ConfigError
from skerry.settings.models import Table
from skerry.settings.tree import Tree
from skerry_tools.plan.figures import Figure, Json, shown
from skerry_tools.plan.quantities import Count, Time
from skerry_tools.plan.utilisation import (
    PAPER_STEP,
    Island,
    Method,
    paper_index,
    paper_nearest,
    required_bits_s,
    utilisation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FP4 = "overlapped-fp4"


class ModelRow(Table):
    """One model of the table, and what was published of it, Gbit/s for each target."""

    parameters: Count = Field(gt=0)
    layers: int = Field(ge=1)
    step_time: Time = Field(gt=0)
    published: dict[str, tuple[float, ...]]


class BandwidthTable(Table):
    """The table ``[bandwidths]`` of a scenario."""

    bits_per_parameter: float = Field(gt=0)
    fp4_share: float = Field(gt=0, le=1)
    h_steps: int = Field(ge=1)
    fragment_layers: int = Field(ge=1)
    overlap_steps: int = Field(ge=0)
    targets: tuple[float, ...]
    models: dict[str, ModelRow]


@dataclass(frozen=True, slots=True)
class Cell:
    """One bandwidth: published and worked out, Gbit/s; ``steps`` apart on the paper's grid."""

    model: str
    method: str
    target: float
    published: float
    figure: Figure

    @property
    def gbit_s(self) -> float:
        return (self.figure.value or 0.0) / 1e9

    @property
    def steps(self) -> int:
        """Steps of the grid between the two; ours is the grid's first bandwidth that is enough."""
        return paper_index(self.gbit_s) - paper_nearest(self.published)


def table_of(tree: Tree) -> BandwidthTable:
    """Return the table that a scenario holds; ConfigError names what is wrong in it."""
    from skerry_tools.plan.sites import validated_table

    raw = cast("Mapping[str, object]", tree.values.get("bandwidths", {}))
    return validated_table(BandwidthTable, raw, tree, ("bandwidths",))


def cells(tree: Tree) -> list[Cell]:
    """Return every cell of a scenario; raises ConfigError for one that cannot be read."""
    return list(_cells(table_of(tree)))


def curves(tree: Tree) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return utilisation by bandwidth (bit/s), on the paper's grid, by model and method."""
    table = table_of(tree)
    rates = [0.1e9 * PAPER_STEP**index for index in range(50)]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, row in table.models.items():
        for method in row.published:
            how, island = _way(table, row, method)
            points = [(rate, utilisation(how, island, rate)) for rate in rates]
            found.setdefault(name, {})[method] = points
    return found


def _way(table: BandwidthTable, row: ModelRow, method: str) -> tuple[Method, Island]:
    """Return what a row of the table is: a method, and an island with its bits."""
    how = cast("Method", "overlapped" if method == FP4 else method)
    return how, _island(table, row, fp4=method == FP4)


def _cells(table: BandwidthTable) -> Iterator[Cell]:
    for name, row in table.models.items():
        for method, published in row.published.items():
            if method not in {"data-parallel", "diloco", "streaming", "overlapped", FP4}:
                path = f"bandwidths.models.{name}.published.{method}"
                msg = f"{path} is no method: data-parallel, diloco, streaming, overlapped, {FP4}."
                raise ConfigError(msg, path=path)
            how, island = _way(table, row, method)
            for target, value in zip(table.targets, published, strict=True):
                need = required_bits_s(how, island, target)
                words = f"least rate at which {target:.0%} of the time is compute"
                yield Cell(name, method, target, value, Figure(need, "bit/s", convention=words))


def _island(table: BandwidthTable, row: ModelRow, *, fp4: bool) -> Island:
    bits = table.bits_per_parameter * row.parameters * (table.fp4_share if fp4 else 1.0)
    return Island(
        step_s=row.step_time,
        layers=row.layers,
        layer_bits=bits / row.layers,
        h_steps=table.h_steps,
        fragment_layers=table.fragment_layers,
        overlap_steps=table.overlap_steps,
    )


def verdict(found: list[Cell]) -> str:
    """Return how well the table is met, in one sentence."""
    near = sum(abs(cell.steps) <= 1 for cell in found)
    same = sum(cell.steps == 0 for cell in found)
    return (
        f"{near} of {len(found)} published bandwidths are within one step (x1.21) of the paper's "
        f"grid, {same} on the same point."
    )


def lines(found: list[Cell]) -> list[str]:
    """Return the table as text: worked out, published in brackets, a mark where they differ."""
    targets = list(dict.fromkeys(cell.target for cell in found))
    told = [verdict(found), "", "Gbit/s for a compute utilisation of (published in brackets)"]
    told += [f"{'':24}" + "".join(f"{target:>17.0%}" for target in targets)]
    for model, method in dict.fromkeys((cell.model, cell.method) for cell in found):
        row = [cell for cell in found if (cell.model, cell.method) == (model, method)]
        told.append(f"{model:6}{method:18}" + "".join(f"{_shown(cell):>17}" for cell in row))
    return [*told, "", "* one step apart, ! more"]


def _shown(cell: Cell) -> str:
    mark = "" if not cell.steps else "*" if abs(cell.steps) == 1 else "!"
    return f"{cell.gbit_s:.2f} ({cell.published:g}){mark}"


def as_json(tree: Tree, found: list[Cell]) -> dict[str, Json]:
    """Return the table for machines."""
    return {
        "verdict": verdict(found),
        "source": str(tree.values.get("source", "")),
        "status": cast("dict[str, Json]", dict(tree.values.get("status", {}))),
        "cells": [
            {
                "model": cell.model,
                "method": cell.method,
                "utilisation": cell.target,
                "published_gbit_s": cell.published,
                "needed": cell.figure.json(),
                "shown": shown(cell.figure.value or 0.0, "bit/s"),
                "steps_apart": cell.steps,
            }
            for cell in found
        ],
    }
