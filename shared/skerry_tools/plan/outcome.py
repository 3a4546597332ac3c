"""A simulation as its reader gets it: the answer first, then figures with their conventions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry_tools.plan import closed
from skerry_tools.plan.figures import (
    LEGEND,
    Figure,
    Grid,
    Json,
    Kind,
    Sheet,
    derived,
    given,
    shown,
)
from skerry_tools.plan.process import Use
from skerry_tools.plan.sweep import error_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry_tools.plan.scenario import Request
    from skerry_tools.plan.simulate import Outcome
    from skerry_tools.plan.sweep import Cell

BY_CHIPS = "share of the chips' time given to the run"
BY_TIME = "share of the time"
NAMES = {
    Use.TRAIN: "train (goodput)",
    Use.MISSING: "slices away",
    Use.DOWNSCALE: "pauses to go on without a slice",
    Use.UPSCALE: "pauses to take slices back or start",
    Use.RECOVER: "waiting for what failed",
    Use.ROLLBACK: "work lost and done again",
    Use.CHECKPOINT: "writing checkpoints",
    Use.OUTAGE: "outages",
    Use.WAIT: "waiting for other learners",
    Use.PREEMPTED: "preempted",
    Use.IDLE: "between steps",
}


def lead(request: Request, found: Outcome) -> str:
    """Return the answer in a sentence or two."""
    fleet, sync = request.scene.fleet, request.run.sync
    how = {
        "decoupled": f"{found.learners} decoupled learners, K = {sync.quorum}",
        "elastic": "elastic data-parallel",
        "data-parallel": "data-parallel with restart",
    }[fleet.layout]
    said = (
        f"{fleet.chips:,.0f} chips as {how}, {found.end_s / 86400:.4g} days:"
        f" goodput {100 * found.goodput:.1f} % (± {100 * found.half_width:.1f}),"
        f" a learner trains {100 * found.running:.1f} % of the time"
    )
    if fleet.layout == "decoupled":
        up = found.uptime[min(sync.quorum, found.learners) - 1]
        said += f", at least K do {100 * up:.2f} % of it"
        if found.merges.participants is not None:
            said += f", {found.merges.participants:.1f} of {found.learners} take part in a merge"
    if found.time_to_tokens_s is not None and request.scene.timing.tokens is not None:
        tokens, days = request.scene.timing.tokens, found.time_to_tokens_s / 86400
        said += f"; {shown(tokens, 'token')}s in {days:,.3g} days"
    worst = max((use for use in Use if use is not Use.TRAIN), key=lambda use: found.split[use])
    if found.split[worst] > 0:
        said += f". Most is lost to {NAMES[worst]}: {100 * found.split[worst]:.1f} %"
    return f"{said}."


def parts(request: Request, found: Outcome) -> list[Sheet | Grid]:
    """Return the figures of an outcome."""
    told: list[Sheet | Grid] = [_result(request, found), _losses(found)]
    if found.learners > 1:
        told.append(_uptime(found))
    if found.merges.seen:
        told.append(_merges(found))
    return [_assumptions(request), *told]


def lines(request: Request, found: Outcome, cells: Sequence[Cell] = ()) -> list[str]:
    """Return the whole answer as text."""
    told = [lead(request, found), ""]
    for part in parts(request, found):
        told += [*part.lines(), ""]
    if cells:
        told += [*grid(cells).lines(), ""]
    told += (["Mind", *(f"  {doubt}" for doubt in found.doubts), ""]) if found.doubts else []
    if request.source:
        told += [f"Source: {request.source}"]
        told += [f"  {path}: {status}" for path, status in request.status.items()]
    return [*told, LEGEND]


def as_json(request: Request, found: Outcome, cells: Sequence[Cell] = ()) -> dict[str, Json]:
    """Return the whole answer for machines."""
    tables: dict[str, Json] = {part.name: part.json() for part in parts(request, found)}
    doubts: list[Json] = [*found.doubts]
    status: dict[str, Json] = {**request.status}
    told: dict[str, Json] = {
        "scenario": request.name,
        "answer": lead(request, found),
        "seed": request.scene.simulation.seed,
        "figures": tables,
        "extrapolated": doubts,
        "source": request.source,
        "status": status,
    }
    if cells:
        told["table"] = grid(cells).json()
        told["error_points"] = error_points(list(cells))
    return told


def grid(cells: Sequence[Cell]) -> Grid:
    """Return goodputs by row and number of chips, what was published beside them."""
    rows: dict[str, dict[str, Figure]] = {}
    for cell in cells:
        own = rows.setdefault(cell.row, {})
        name = shown(cell.chips, "chip")
        own[name] = derived(cell.goodput, "share", BY_CHIPS)
        if cell.published is not None:
            own[f"{name}, published"] = given(cell.published, "share", "published")
    error = error_points(list(cells))
    count = sum(cell.published is not None for cell in cells)
    notes = (
        [] if error is None else [f"Error: {error:.2f} points RMS over {count} published cells."]
    )
    return Grid("table", "Goodput by chips", rows, notes)


def _assumptions(request: Request) -> Sheet:
    scene = request.scene
    clock = "strikes what trains" if scene.failures.clock is closed.Clock.RUNNING else "any time"
    law = f"{scene.recovery.law}, from failure to a slice that works again"
    figures = {
        "chips": given(scene.fleet.chips, "chip"),
        "learners": given(request.learners, "1"),
        "chips_of_a_slice": given(scene.fleet.slice_chips, "chip", "fail and come back together"),
        "interruption_of_a_chip": given(
            scene.failures.chip_mtbi, "s", f"mean time between two, {scene.failures.clock}: {clock}"
        ),
        "recovery": given(scene.recovery.mean_s, "s", f"mean, {law}"),
        "downscale": given(scene.pauses.downscale_s, "s", "pause for all slices of an island"),
        "upscale": given(
            scene.pauses.upscale_s,
            "s",
            f"pause for all slices of an island, {scene.pauses.upscale}",
        ),
    }
    if scene.checkpoints.every is not None:
        figures["checkpoint_every"] = given(scene.checkpoints.every, "s", "of training")
    return Sheet("assumptions", "Assumed", figures)


def _result(request: Request, found: Outcome) -> Sheet:
    kind = Kind.EXTRAPOLATED if found.doubts else Kind.DERIVED
    island_rate = sum(found.chips) / found.learners / request.scene.failures.chip_mtbi
    figures = {
        "goodput": Figure(found.goodput, "share", kind, BY_CHIPS),
        "half_width": Figure(found.half_width, "share", kind, "95 % interval, by 30 batch means"),
        "running": Figure(found.running, "share", kind, f"{BY_TIME} a learner trains, mean"),
        "failures": Figure(found.failures, "1", kind, "in all of the simulated time"),
        "between_failures_of_a_learner": derived(1.0 / island_rate, "s", "while all of it trains"),
    }
    if found.tokens_s is not None:
        figures["speed"] = Figure(found.tokens_s, "tokens/s", kind, "all learners, goodput counted")
        figures["tokens"] = Figure(found.tokens_done, "token", kind, "in the simulated time")
    if found.time_to_tokens_s is not None:
        figures["time_to_tokens"] = Figure(found.time_to_tokens_s, "s", kind, "at that speed")
    return Sheet("result", "Result", figures)


def _losses(found: Outcome) -> Sheet:
    shares = {use: found.split[use] for use in Use if found.split[use] > 0}
    return Sheet(
        "split",
        "What the time went into",
        {_key(use): derived(share, "share", BY_CHIPS) for use, share in shares.items()},
    )


def _uptime(found: Outcome) -> Grid:
    rows: dict[str, dict[str, Figure]] = {
        f"K = {k}": {
            "simulated": derived(share, "share", f"{BY_TIME} that at least K learners train"),
            "binomial": derived(
                min(1.0, closed.uptime(k, found.learners, found.running)), "share", "closed form"
            ),
        }
        for k, share in enumerate(found.uptime, start=1)
    }
    return Grid("uptime", "Uptime(K): share of the time that at least K learners train", rows)


def _merges(found: Outcome) -> Sheet:
    seen = found.merges.seen
    took = sum(m.closed_s - m.opened_s for m in seen) / len(seen)
    figures = {
        "looked_at": given(len(seen), "1", "rounds, in samples over the run"),
        "participants": derived(found.merges.participants, "1", "mean contributions of a merge"),
        "open_for": derived(took, "s", "mean, from the opening of a round to its close"),
        "waiting": derived(
            found.merges.waited, "share", "of learners' running time; tau > 0: none"
        ),
    }
    for reason, count in found.merges.reasons.items():
        figures[f"closed_{reason}"] = derived(count / len(seen), "share", "of the rounds")
    return Sheet("merges", "Rounds", figures)


def _key(use: Use) -> str:
    return NAMES[use].replace(" (goodput)", "").replace(" ", "_")
