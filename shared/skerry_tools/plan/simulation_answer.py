"""A simulation as its reader gets it: the answer first, then figures with their conventions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from skerry_tools.plan import simulation
from skerry_tools.plan.failures import TimeUse
from skerry_tools.plan.figures import (
    LEGEND,
    Answer,
    Figure,
    FigureKind,
    FigureTable,
    Json,
    LineChart,
    Point,
    Row,
    figures,
    shown,
    sourced,
)
from skerry_tools.plan.question import question, read, refuse, shipped
from skerry_tools.plan.simulation import DAY_S, Setup, SimulatedRun, SweepCell

DEFAULT = "goodput-table"
UPTIME = "Uptime(K): share of the time that at least K learners train"
BY_CHIPS = "share of the chips' time given to the run"
NAMES = {
    TimeUse.TRAIN: "train",
    TimeUse.MISSING: "slices away",
    TimeUse.DOWNSCALE: "pauses to go on without a slice",
    TimeUse.UPSCALE: "pauses to take slices back or start",
    TimeUse.RECOVER: "waiting for what failed",
    TimeUse.ROLLBACK: "work lost and done again",
    TimeUse.CHECKPOINT: "writing checkpoints",
    TimeUse.OUTAGE: "outages",
    TimeUse.WAIT: "waiting for other learners",
    TimeUse.PREEMPTED: "preempted",
}


def listed() -> Iterator[str]:
    """Yield the name and source of each shipped scenario that can be simulated."""
    for name, path in shipped("plan", "simulation").items():
        yield f"{name}: {question(read([path])).tables.source}"


def setup_of(named: str | None, sets: Sequence[str]) -> Setup:
    """Return what a shipped scenario, or a file, asks; ConfigError where it cannot be asked."""
    known, name = shipped("plan", "simulation"), named or DEFAULT
    path = known.get(name, Path(name))
    if name not in known and not path.exists() and path.suffix != ".toml":
        refuse(name, f"is no scenario, neither shipped nor a file: there are {', '.join(known)}.")
    return simulation.setup(question(read([path], sets), path.stem))


def lead(found: SimulatedRun) -> str:
    """Return the answer in a sentence or two."""
    asked, learners = found.setup.question, len(found.timelines)
    fleet, quorum = asked.tables.fleet, asked.run.sync.quorum
    how = {
        "decoupled": f"{learners} decoupled learners, K = {quorum}",
        "elastic": "elastic data-parallel",
        "data-parallel": "data-parallel with restart",
    }[fleet.layout]
    said = (
        f"{fleet.chips:,.0f} chips as {how}, {found.end_s / DAY_S:.4g} days:"
        f" goodput {100 * found.goodput:.1f} % (± {100 * found.half_width:.1f}),"
        f" a learner trains {100 * found.running:.1f} % of the time"
    )
    if fleet.layout == "decoupled":
        said += f", at least K do {100 * found.uptime[min(quorum, learners) - 1]:.2f} % of it"
        if found.rounds.participants is not None:
            said += f", {found.rounds.participants:.1f} of {learners} take part in a merge"
    tokens, took_s = asked.tables.timing.tokens, found.time_to_tokens_s
    if took_s is not None and tokens is not None:
        said += f"; {shown(tokens, 'token')}s in {took_s / DAY_S:,.3g} days"
    worst = max((use for use in TimeUse if use), key=lambda use: found.split[use])
    if found.split[worst] > 0:
        said += f". Most is lost to {NAMES[worst]}: {100 * found.split[worst]:.1f} %"
    return f"{said}."


def answer(found: SimulatedRun, *, sweep: bool = False) -> Answer:
    """Return an outcome as text, JSON and charts; ``sweep``: with the scenario's table."""
    asked = found.setup.question
    caveats, tables = list(simulation.caveats(found)), list(_tables(found))
    cells = simulation.sweep(found.setup) if sweep else []
    values: dict[str, Json] = {
        "scenario": asked.name,
        "answer": lead(found),
        "seed": asked.tables.simulation.seed,
        "figures": {table.name: table.json() for table in tables},
        "extrapolated": list(caveats),
        "source": asked.tables.source,
        "status": dict(asked.tables.status),
    }
    if cells:
        tables.append(_sweep_table(cells))
        values |= {"table": tables[-1].json(), "error_points": simulation.error_points(cells)}
    text = [lead(found), *(line for table in tables for line in ("", *table.lines()))]
    text += ["", "Mind", *(f"  {caveat}" for caveat in caveats)] if caveats else []
    text += ["", *sourced(asked.tables.source, asked.tables.status), LEGEND]
    return Answer(text, values, tables, lambda: list(_charts(found, cells)))


def _tables(found: SimulatedRun) -> Iterator[FigureTable]:
    far = next(simulation.caveats(found), None)
    kind = FigureKind.EXTRAPOLATED if far else FigureKind.DERIVED
    assumed = figures(_assumed(found), FigureKind.INPUT)
    yield FigureTable("assumptions", "Assumed", assumed)
    yield FigureTable("result", "Result", figures(_result(found), kind))
    shares = ((use, share) for use, share in found.split.items() if share > 0)
    rows = ((NAMES[use].replace(" ", "_"), share, "share", "") for use, share in shares)
    yield FigureTable("split", f"What the time went into: {BY_CHIPS}", figures(rows))
    if len(found.timelines) > 1:
        uptimes = {
            f"K = {k}": {"simulated": Figure(share, "share"), "binomial": Figure(binomial, "share")}
            for k, share, binomial in _uptimes(found)
        }
        yield FigureTable("uptime", UPTIME, uptimes)
    if found.rounds.rounds:
        yield FigureTable("merges", "Rounds", figures(_rounds(found)))


def _assumed(found: SimulatedRun) -> Iterator[Row]:
    tables = found.setup.question.tables
    mean = f"mean, {tables.recovery.law}, until a slice works again"
    yield "chips", tables.fleet.chips, "chip", ""
    yield "learners", len(found.timelines), "1", ""
    yield "chips_of_a_slice", tables.fleet.slice_chips, "chip", "fail and come back together"
    mtbi_s, two = tables.failures.chip_mtbi, f"mean time between two, {tables.failures.clock}"
    yield "interruption_of_a_chip", mtbi_s, "s", two
    yield "recovery", tables.recovery.mean_s, "s", mean
    yield "downscale", tables.pauses.downscale_s, "s", "pause for all slices of a learner"
    yield "upscale", tables.pauses.upscale_s, "s", f"as long a pause, {tables.pauses.upscale}"
    if tables.checkpoints.every is not None:
        yield "checkpoint_every", tables.checkpoints.every, "s", "of training"


def _result(found: SimulatedRun) -> Iterator[Row]:
    tables, chips = found.setup.question.tables, sum(one.chips for one in found.setup.learners)
    between_s = tables.failures.chip_mtbi * len(found.timelines) / chips
    yield "goodput", found.goodput, "share", BY_CHIPS
    yield "half_width", found.half_width, "share", "95 % interval, by 30 batch means"
    yield "running", found.running, "share", "share of the time a learner trains, mean"
    yield "failures", found.failures, "1", "in all of the simulated time"
    yield "between_failures_of_a_learner", between_s, "s", "while all of it trains"
    if found.tokens_s is not None:
        yield "speed", found.tokens_s, "tokens/s", "all learners, goodput counted"
        yield "tokens", found.tokens_s * found.end_s, "token", "in the simulated time"
    if found.time_to_tokens_s is not None:
        yield "time_to_tokens", found.time_to_tokens_s, "s", "at that speed"


def _rounds(found: SimulatedRun) -> Iterator[Row]:
    seen, count = found.rounds, len(found.rounds.rounds)
    took_s = sum(one.closed_s - one.opened_s for one in seen.rounds) / count
    yield "looked_at", count, "1", "rounds, in samples over the run"
    yield "participants", seen.participants, "1", "mean contributions of a merge"
    yield "open_for", took_s, "s", "mean, from the opening of a round to its close"
    yield "waiting", seen.waited, "share", "of learners' running time; tau > 0: none"
    for reason, closed in seen.reasons.items():
        yield f"closed_{reason}", closed / count, "share", "of the rounds"


def _sweep_table(cells: Sequence[SweepCell]) -> FigureTable:
    rows: dict[str, dict[str, Figure]] = {}
    for cell in cells:
        own, name = rows.setdefault(cell.row, {}), shown(cell.chips, "chip")
        own[name] = Figure(cell.goodput, "share", BY_CHIPS)
        if cell.published is not None:
            own[f"{name}, published"] = Figure(cell.published, "share", "", FigureKind.INPUT)
    error, count = simulation.error_points(cells), sum(c.published is not None for c in cells)
    note = f"Error: {error:.2f} points RMS over {count} published cells." if count else ""
    return FigureTable("table", "Goodput by chips", rows, [note] if note else [])


def _charts(found: SimulatedRun, cells: Sequence[SweepCell]) -> Iterator[LineChart]:
    if cells:
        goodputs, known = defaultdict[str, list[Point]](list), defaultdict[str, list[Point]](list)
        for cell in cells:
            goodputs[cell.row].append((cell.chips, cell.goodput))
            if cell.published is not None:
                known[cell.row].append((cell.chips, cell.published))
        title = "Goodput against chips; dots: published"
        yield LineChart("goodput-by-chips", title, "chips", goodputs, known)
    if len(found.timelines) > 1:
        series = defaultdict[str, list[Point]](list)
        for k, share, binomial in _uptimes(found):
            series["simulated"].append((k, share))
            series["binomial"].append((k, binomial))
        yield LineChart("uptime", UPTIME, "K", series, log=False)


def _uptimes(found: SimulatedRun) -> Iterator[tuple[int, float, float]]:
    """Yield K and its uptime, simulated and of independent learners."""
    for k, share in enumerate(found.uptime, start=1):
        binomial = simulation.binomial_uptime(k, len(found.timelines), found.running)
        yield k, share, min(1.0, binomial)
