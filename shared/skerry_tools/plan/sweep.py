"""The same question about many fleets: goodput by chips and layout, and what moves it most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry_tools.plan.simulate import DAY_S, Outcome, simulate, with_fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry_tools.plan.scenario import Request
    from skerry_tools.plan.scene import Layout, Scene

SWING = 2.0
"""Each input is halved and doubled."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One goodput of a table, with half its 95 % confidence interval; both are shares."""

    row: str
    chips: float
    goodput: float
    half_width: float
    published: float | None = None


@dataclass(frozen=True, slots=True)
class Swing:
    """The goodput where one input is half, and twice, what it is."""

    name: str
    low: float
    high: float


def table(request: Request) -> list[Cell]:
    """Return the goodput of every row at every number of chips of the scenario's sweep."""
    sweep = request.scene.sweep
    alone: tuple[Layout, ...] = ("data-parallel", "elastic")
    rows: list[tuple[str, Layout, int]] = []
    rows.extend((layout, layout, 1) for layout in alone)
    rows.extend((f"M = {learners}", "decoupled", learners) for learners in sweep.learners)
    cells: list[Cell] = []
    for name, layout, learners in rows:
        known = sweep.published.get(name, ())
        for index, chips in enumerate(sweep.chips):
            asked = with_fleet(request, chips=chips, layout=layout, learners=learners)
            found = _until(asked, sweep.failures)
            told = known[index] if index < len(known) else None
            share = None if told is None else told / 100.0
            cells.append(Cell(name, chips, found.goodput, found.half_width, share))
    return cells


def error_points(cells: list[Cell]) -> float | None:
    """Return the root-mean-square error to what is published, in percentage points."""
    off = [100.0 * (c.goodput - c.published) for c in cells if c.published is not None]
    return math.sqrt(math.fsum(d * d for d in off) / len(off)) if off else None


def swings(request: Request) -> list[Swing]:
    """Return what each input that costs time does to the goodput, halved and doubled."""
    found: list[Swing] = []
    for name, change in _INPUTS.items():
        ends = [
            _until(replace(request, scene=change(request.scene, factor)), 3000).goodput
            for factor in (1.0 / SWING, SWING)
        ]
        found.append(Swing(name, *ends))
    return [swing for swing in found if abs(swing.high - swing.low) > 1e-6]


def _until(request: Request, failures: int) -> Outcome:
    """Simulate until about so many failures, or to the end, without looking at rounds."""
    scene = request.scene
    rate_s = scene.fleet.chips / scene.failures.chip_mtbi
    end_s = min(scene.simulation.days * DAY_S, failures / rate_s)
    simulation = scene.simulation.model_copy(update={"rounds": 0})
    quiet = replace(request, scene=scene.model_copy(update={"simulation": simulation}))
    return simulate(quiet, end_s=end_s)


def _scaled(table: str, field: str) -> Callable[[Scene, float], Scene]:
    def change(scene: Scene, factor: float) -> Scene:
        held = getattr(scene, table)
        value = getattr(held, field)
        if value is None:
            return scene
        return scene.model_copy(
            update={table: held.model_copy(update={field: type(value)(value * factor)})}
        )

    return change


_INPUTS = {
    "time between interruptions": _scaled("failures", "chip_mtbi"),
    "recovery": _scaled("recovery", "mean_s"),
    "downscale pause": _scaled("pauses", "downscale_s"),
    "upscale pause": _scaled("pauses", "upscale_s"),
    "upscale batch": _scaled("pauses", "batch_s"),
    "chips of a slice": _scaled("fleet", "slice_chips"),
    "checkpoint interval": _scaled("checkpoints", "every"),
    "checkpoint cost": _scaled("checkpoints", "cost_s"),
}
