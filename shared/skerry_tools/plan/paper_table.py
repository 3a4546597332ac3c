"""Streaming DiLoCo's model of utilisation, and its table of bandwidths worked out again.

The paper (arXiv 2501.18512, section 3.1 and table 4) simulates a graph of layers; since its nodes
are equal within a kind, closed forms follow: docs/planning.md has them. A step is a third forward,
the rest backward, from the last layer to the first; a layer can be sent when its backward is done,
and is needed by its forward pass of a later step. Only bits per parameter are fitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from pydantic import Field

from skerry.settings.loading import validated
from skerry.settings.models import Table
from skerry.settings.tree import Tree
from skerry_tools.plan.figures import (
    Answer,
    Chart,
    Figure,
    FigureTable,
    Json,
    LineChart,
    Point,
    figures,
    shown,
)
from skerry_tools.plan.quantities import Count, Time

PaperMethod: TypeAlias = Literal[
    "data-parallel", "diloco", "streaming", "overlapped", "overlapped-fp4"
]
BACKWARD = 2 / 3
"""Share of a step that is its backward pass: twice the forward pass's operations."""
GRID_BITS_S = tuple(0.1e9 * 10 ** (4 * index / 49) for index in range(50))
"""The paper's bandwidths, from 0.1 to 1000 Gbit/s, 1.21 apart."""


@dataclass(frozen=True, slots=True)
class PaperIsland:
    """One island among equals; ``layer_bits`` are those of one layer on the wire."""

    step_s: float
    layers: int
    layer_bits: float
    h_steps: int = 100
    fragment_layers: int = 3
    overlap_steps: int = 1


def data_parallel_step_s(island: PaperIsland, bits_s: float, latency_s: float = 0.0) -> float:
    """Return how long a step takes whose gradients are reduced layer by layer during it.

    The last layer is sent first; the step ends when the first layer has been reduced too.
    """
    backward, layer_s = BACKWARD * island.step_s, island.layer_bits / bits_s
    reduced = max(backward + layer_s, backward / island.layers + island.layers * layer_s)
    return island.step_s - backward + reduced + latency_s


def utilisation(method: str, island: PaperIsland, bits_s: float) -> float:
    """Return the share of time in which an island computes at this bandwidth."""
    step = island.step_s
    if method == "data-parallel":
        return step / data_parallel_step_s(island, bits_s)
    if method == "diloco":
        whole = (island.h_steps - 1) * step + data_parallel_step_s(island, bits_s)
        return island.h_steps * step / whole
    if method == "streaming":
        island = replace(island, overlap_steps=0)
    count = max(1, island.layers // island.fragment_layers)
    interval = island.h_steps * step / count
    stalls = sum(_stall_s(island, fragment, count, bits_s) for fragment in range(count)) / count
    return interval / (interval + stalls)


def _stall_s(island: PaperIsland, fragment: int, count: int, bits_s: float) -> float:
    """Return how long the first layer of a fragment is late, its layers spread over the depth."""
    layer_s, done = island.layer_bits / bits_s, -math.inf
    for place in reversed(range(island.fragment_layers)):
        ready = -BACKWARD * island.step_s * (fragment + place * count) / island.layers
        done = max(done, ready) + layer_s
    forward = (1 - BACKWARD) * island.step_s * fragment / island.layers
    return max(0.0, done - island.overlap_steps * island.step_s - forward)


def required_bits_s(method: str, island: PaperIsland, target: float) -> float:
    """Return the least bandwidth, to a millionth, at which an island computes this share of time.

    ``target`` is below 1, which a method that cannot hide all never reaches.
    """
    low, high = 1.0, 1e18
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        enough = utilisation(method, island, middle) >= target
        low, high = (low, middle) if enough else (middle, high)
    return high


class PaperModelTable(Table):
    """One model of the table, and what was published for it, Gbit/s for each target."""

    parameters: Count
    layers: int = Field(ge=1)
    step_time: Time
    published: dict[PaperMethod, tuple[float, ...]]


class PaperTable(Table):
    """The table ``[bandwidths]`` of a scenario."""

    bits_per_parameter: float = Field(gt=0)
    fp4_share: float = Field(gt=0, le=1)
    h_steps: int = Field(ge=1)
    fragment_layers: int = Field(ge=1)
    overlap_steps: int = Field(ge=0)
    targets: tuple[float, ...]
    models: dict[str, PaperModelTable]


class PaperScenario(Table):
    """A scenario of kind ``bandwidths``."""

    kind: Literal["bandwidths"]
    source: str = ""
    status: dict[str, str] = Field(default_factory=dict)
    bandwidths: PaperTable


class PaperCell(NamedTuple):
    """One bandwidth, published and worked out."""

    model: str
    method: str
    target: float
    published_bits_s: float
    needed_bits_s: float

    @property
    def steps_apart(self) -> int:
        """Steps of the grid between the two; ours is the grid's first bandwidth that is enough."""
        step, first = math.log(GRID_BITS_S[1] / GRID_BITS_S[0]), GRID_BITS_S[0]
        published = round(math.log(self.published_bits_s / first) / step)
        return math.ceil(math.log(self.needed_bits_s / first) / step - 1e-6) - published

    @property
    def text(self) -> str:
        mark = "" if not self.steps_apart else "*" if abs(self.steps_apart) == 1 else "!"
        return f"{self.needed_bits_s / 1e9:.2f} ({self.published_bits_s / 1e9:g}){mark}"

    def json(self) -> dict[str, Json]:
        words = f"least rate at which {self.target:.0%} of the time is compute"
        return {
            "model": self.model,
            "method": self.method,
            "utilisation": self.target,
            "published_gbit_s": self.published_bits_s / 1e9,
            "needed": Figure(self.needed_bits_s, "bit/s", words).json(),
            "shown": shown(self.needed_bits_s, "bit/s"),
            "steps_apart": self.steps_apart,
        }


def cells(table: PaperTable) -> list[PaperCell]:
    """Return every cell of the table."""
    return [
        PaperCell(model, method, target, value * 1e9, required_bits_s(method, island, target))
        for model, method, island, published in _rows(table)
        for target, value in zip(table.targets, published, strict=True)
    ]


def _rows(table: PaperTable) -> Iterator[tuple[str, str, PaperIsland, tuple[float, ...]]]:
    shape = (table.h_steps, table.fragment_layers, table.overlap_steps)
    for name, row in table.models.items():
        for method, published in row.published.items():
            share = table.fp4_share if method == "overlapped-fp4" else 1.0
            bits = table.bits_per_parameter * row.parameters * share / row.layers
            yield name, method, PaperIsland(row.step_time, row.layers, bits, *shape), published


def answer(tree: Tree) -> Answer:
    """Work the table out again; ConfigError where the scenario cannot be read."""
    asked = validated(PaperScenario, tree)
    found, rows = cells(asked.bandwidths), list(_rows(asked.bandwidths))
    near = sum(abs(cell.steps_apart) <= 1 for cell in found)
    same = sum(cell.steps_apart == 0 for cell in found)
    verdict = (
        f"{near} of {len(found)} published bandwidths are within one step (x1.21) of the paper's "
        f"grid, {same} on the same point."
    )
    text = [verdict, "", "Gbit/s for a compute utilisation of (published in brackets)"]
    text.append(f"{'':24}" + "".join(f"{target:>17.0%}" for target in asked.bandwidths.targets))
    cursor = iter(found)
    for model, method, _, published in rows:
        own = "".join(f"{next(cursor).text:>17}" for _ in published)
        text.append(f"{model:6}{method:18}{own}")
    json: dict[str, Json] = {
        "verdict": verdict,
        "source": asked.source,
        "status": dict(asked.status),
        "cells": [cell.json() for cell in found],
    }

    def charts() -> list[Chart]:
        curves: dict[str, dict[str, list[Point]]] = {}
        for model, method, island, _ in rows:
            points = [(rate, utilisation(method, island, rate)) for rate in GRID_BITS_S]
            curves.setdefault(model, {})[method] = points
        across = "bandwidth between two islands, bit/s"
        return [
            LineChart(f"utilisation-{name}", f"{name}: share of time in compute", across, series)
            for name, series in curves.items()
        ]

    table = figures(
        (f"{c.model} {c.method} {c.target:.0%}", c.needed_bits_s, "bit/s", f"published {c.text}")
        for c in found
    )
    title, end = "Bandwidths for a compute utilisation", ["", "* one step apart, ! more"]
    return Answer(title, text + end, json, [FigureTable("bandwidths", title, table)], charts)
