"""What the rhythm of merges costs learners with Muon, and what uneven fleets of them lose."""

from __future__ import annotations

from dataclasses import replace

from skerry_tools.lab.scenario import Failures

from .cells import LARGE, SEQ_LEN, SMALL, Cell, Experiment, Size
from .fleets import EQUAL_STEPS, SLOW_STEP_S, STEP_S, THREE, M, fleet, ladder, pace
from .optimizers import BEFORE, BIG, SIZES, STEPS, muon

TOKENS = STEPS[SMALL] * BIG * SEQ_LEN
ALONE = {"10 %": 0.1, "25 %": 0.25}
"""Shares of all tokens that one learner trains before the others join."""
DOWN_S = 10.0
"""Mean time that a killed learner is away."""


def rhythm() -> Experiment:
    """Compare decoupled learners with Muon that merge more or less often."""
    cells: list[Cell] = []
    for m in SIZES:
        before = muon(m, mode=BEFORE)
        cells.append(replace(before, labels=_labels(before, BEFORE), plotted=False))
        cells += [_merging(m, h, THREE) for h in (4, 8, 24, 64)]
        cells += [_merging(m, h, (0,), rate=TWICE[m]) for h in (4, 8)]
    cells += [_alone(said, share) for said, share in ALONE.items()]
    before = muon(M, mode=BEFORE, size=LARGE)
    cells.append(replace(before, labels=_labels(before, BEFORE), plotted=False))
    cells += [_merging(M, h, (0,), size=LARGE) for h in (8, 24)]
    return Experiment(
        name="rhythm",
        title="The rhythm of merges",
        question=(
            "What does it cost learners with Muon to merge seldom, and does it help if one of them"
            " begins alone? All else, the outer step too, is as in"
            " [the inner optimizer](#the-inner-optimizer), at the best rates that were found there"
            " at H = 24, and at twice those; against data-parallel with Muon at its best rate."
        ),
        cells=tuple(cells),
        columns=("steps", "rounds"),
        x="merges",
        series="M",
        notes=(
            "`alone`: the share of all tokens that one learner trains before the three others join,"
            " in more steps, so that the tokens are equal."
        ),
    )


TWICE = {2: "2.4e-2", 4: "4.8e-2", 8: "4.8e-2"}
"""Twice the best rate at H = 24."""


def _merging(m: int, h: int, seeds: tuple[int, ...], size: Size = SMALL, rate: str = "") -> Cell:
    cell = muon(m, f"sync.h_steps={h}", size=size, rate=rate)
    return replace(
        cell,
        key=f"{cell.key}-H{h}",
        labels=_labels(cell, f"H = {h}"),
        seeds=seeds,
        plotted=not rate and size is SMALL,
    )


def _labels(cell: Cell, merges: str, alone: str = "-") -> tuple[tuple[str, str], ...]:
    known = dict(cell.labels)
    named = tuple((name, known[name]) for name in ("model", "M", "lr"))
    return (*named, ("merges", merges), ("alone", alone))


def _alone(said: str, share: float) -> Cell:
    joins = share * M / (1 + share * (M - 1))  # as a share of the steps
    cell, (first, *others) = muon(M), fleet(STEP_S)
    return replace(
        cell,
        key=f"M{M}-alone-{share:g}",
        labels=_labels(cell, "H = 24", said),
        islands=(first, *(other.model_copy(update={"joins": joins}) for other in others)),
        share=(joins + M * (1 - joins)) / M,
        plotted=False,
    )


def muon_fleet() -> Experiment:
    """Compare learners with Muon of mixed speeds, and failing ones, with equal fleets."""
    sets, mixed, equal = muon(M).sets, fleet(SLOW_STEP_S, 2.0), fleet(SLOW_STEP_S)
    rungs = [
        replace(
            rung,
            labels=(("inner", "muon"), *rung.labels),
            tokens=TOKENS,
            batch=BIG,
            against="equal" if number else "",
        )
        for number, rung in enumerate(ladder("equal", SLOW_STEP_S, sets))
    ]
    failing = Failures(
        islands=tuple(island.name for island in equal[M // 2 :]), every_s=60, down_s=DOWN_S
    )
    speeds = replace(
        rungs[0],
        key="speeds",
        labels=(("inner", "muon"), ("fleet", "speeds 2x")),
        against="equal",
        share=pace(mixed),
        islands=mixed,
        plotted=True,
    )
    failures = replace(
        speeds,
        key="failures",
        labels=(("inner", "muon"), ("fleet", "half of them failing")),
        share=1 - 0.5 * DOWN_S / (60 + DOWN_S),
        islands=equal,
        failures=failing,
    )
    return Experiment(
        name="muon-fleet",
        title="Uneven fleets with Muon",
        question=(
            f"What do mixed speeds and failures cost learners with Muon? M = {M}, H = 24, rate and"
            " batches as in [the inner optimizer](#the-inner-optimizer), steps of"
            f" {SLOW_STEP_S:g} s. Speeds are from 1 to 2x as in [mixed speeds](#mixed-speeds); of"
            " the failing fleet two learners are killed once a minute in the mean, each away for"
            f" {DOWN_S:g} s, and start warm."
        ),
        cells=(*rungs, speeds, failures),
        columns=("tokens", "time", "kills", "steps", "equal steps", "staleness"),
        x="fleet",
        series="inner",
        ladder=tuple(rung.key for rung in rungs),
        notes=EQUAL_STEPS,
    )
