"""Render a simulation: the answer first, then figures with their conventions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from skerry_tools.plan import simulation
from skerry_tools.plan.answer import Answer, Figure, FigureTable, Kind, shown
from skerry_tools.plan.failures import TimeUse
from skerry_tools.plan.question import find, question, read, refuse
from skerry_tools.plan.simulation import Setup, SimulatedRun
from skerry_tools.plan.tables import DAY_S

DEFAULT = "goodput-table"
BY_CHIPS = "share of the chips' time"


def setup_of(named: str | None, sets: Sequence[str]) -> Setup:
    """Return what a shipped scenario, or a file, asks; ConfigError where it cannot be asked."""
    path = find(named or DEFAULT)
    if not read([path]).values:
        refuse(f"{named} is empty: give [fleet], [failures] or sites, or leave it out.")
    return simulation.setup(question(read([path], sets)))


def lead(found: SimulatedRun) -> str:
    asked, learners = found.setup.question, len(found.timelines)
    fleet, quorum = asked.tables.fleet, asked.run.sync.quorum
    how = {
        "decoupled": f"{learners} decoupled learners, K = {quorum}",
        "elastic": "elastic data-parallel",
        "data-parallel": "data-parallel with restart",
    }[fleet.layout]
    far = ", extrapolated" if next(simulation.caveats(found), None) else ""
    said = f"{fleet.chips:,.0f} chips as {how}, {found.end_s / DAY_S:.4g} days{far}:"
    if asked.tables.failures.never:
        said += f" goodput {100 * found.goodput:.1f} %, without failures"
    elif not found.failures:
        expected = learners * found.end_s / found.between_s
        said += f" no failure was drawn, {expected:.2g} are expected in that time:"
        said += f" goodput {100 * found.goodput:.1f} % without one"
    else:
        said += f" goodput {100 * found.goodput:.1f} % (± {100 * found.half_width:.1f})"
    said += f", a learner trains {100 * found.running:.1f} % of the time"
    if fleet.layout == "decoupled" and not found.setup.stops:
        said += f", at least K do {100 * found.uptime[min(quorum, learners) - 1]:.2f} % of it"
        said += f", {found.participants:.1f} of {learners} take part in a merge"
    tokens, took_s = asked.tables.timing.tokens, found.time_to_tokens_s
    if took_s is not None and tokens is not None:
        said += f"; {shown(tokens, 'token')}s in {took_s / DAY_S:,.3g} days"
    worst = max((use for use in TimeUse if use), key=lambda use: found.split[use])
    if found.split[worst] > 0:
        said += f". Most is lost to {worst.text}: {100 * found.split[worst]:.1f} %"
    return f"{said}."


def answer(found: SimulatedRun) -> Answer:
    tables, mind = found.setup.question.tables, list(simulation.caveats(found))
    kind: Kind = "extrapolated" if mind else "derived"
    shares = {use.text: Figure(share, "share") for use, share in found.split.items() if share > 0}
    shown_as = [
        FigureTable("assumptions", "Assumed", _assumed(found), "input"),
        FigureTable("result", "Result", dict(_result(found)), kind),
        FigureTable("split", f"What the time went into: {BY_CHIPS}", shares),
    ]
    if not found.setup.stops:
        title = "Uptime(K): share of the time that at least K learners train"
        uptimes = {f"K = {k}": Figure(share, "share") for k, share in enumerate(found.uptime, 1)}
        shown_as.append(FigureTable("uptime", title, uptimes))
    facts = {"seed": tables.simulation.seed}
    return Answer(lead(found), shown_as, mind, tables.source, tables.status, facts)


def _assumed(found: SimulatedRun) -> dict[str, Figure]:
    tables = found.setup.question.tables
    mean = f"mean, {tables.recovery.law}, until a slice works again"
    taken = f"to take slices back, every {tables.pauses.batch_s:g} s at most, or to start"
    rows = {
        "chips": Figure(tables.fleet.chips, "chip"),
        "learners": Figure(len(found.timelines), "1"),
        "chips_of_a_slice": Figure(tables.fleet.slice_chips, "chip", "fail and come back together"),
        "interruption_of_a_chip": Figure(tables.failures.chip_mtbi, "s", "mean time between two"),
        "recovery": Figure(tables.recovery.mean_s, "s", mean),
        "downscale": Figure(tables.pauses.downscale_s, "s", "pause for all slices of a learner"),
        "upscale": Figure(tables.pauses.upscale_s, "s", taken),
    }
    if tables.checkpoints.every is not None:
        rows["checkpoint_every"] = Figure(tables.checkpoints.every, "s", "of training")
    return rows


def _result(found: SimulatedRun) -> Iterator[tuple[str, Figure]]:
    yield "goodput", Figure(found.goodput, "share", BY_CHIPS)
    if found.failures:
        yield "half_width", Figure(found.half_width, "share", "95 % interval, by 30 batch means")
    yield "running", Figure(found.running, "share", "share of the time a learner trains, mean")
    yield "failures", Figure(found.failures, "1", "in all of the simulated time")
    yield "between_failures_of_a_learner", Figure(found.between_s, "s", "while all of it trains")
    if found.tokens_s is not None:
        yield "speed", Figure(found.tokens_s, "tokens/s", "all learners, goodput counted")
        yield "tokens", Figure(found.tokens_s * found.end_s, "token", "in the simulated time")
    if found.time_to_tokens_s is not None:
        yield "time_to_tokens", Figure(found.time_to_tokens_s, "s", "at that speed")
