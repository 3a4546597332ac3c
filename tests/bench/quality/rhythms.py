"""What the rhythm of merges costs learners with Muon, and what uneven fleets of them lose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skerry_tools.lab.scenario import Failures, LinkSettings

from .cells import LARGE, SEQ_LEN, SMALL, Cell, Experiment, Size
from .fleets import EQUAL_STEPS, SLOW_STEP_S, STEP_S, THREE, M, fleet, ladder, pace
from .optimizers import BEFORE, BIG, SIZES, STEPS, muon

TOKENS = STEPS[SMALL] * BIG * SEQ_LEN
TWICE = {2: "2.4e-2", 4: "4.8e-2", 8: "4.8e-2"}
"""Twice the best rate at H = 24."""
ALONE = {"10 %": 0.1, "25 %": 0.25}
"""Shares of all tokens that one learner trains before the others join."""
EQUAL = "equal"
SIX = (0, 1, 2, 3, 4, 5)
TOGETHER = ("learners", "all from the start")
DOWN_S = 10.0
"""Mean time that a killed learner is away."""
LATE = {"half a step": 0.5, "a step": 1.0, "2 steps": 2.0}
"""What a message takes each way, in steps: with tau = 2 the overlap hides two in all."""


def rhythm() -> Experiment:
    """Compare decoupled learners with Muon that merge more or less often."""
    cells: list[Cell] = []
    for m in SIZES:
        before = muon(m, mode=BEFORE)
        cells.append(replace(before, labels=_labels(before, BEFORE), plotted=False))
        cells += [_merging(m, h, THREE) for h in (4, 8, 24, 64)]
        cells += [_merging(m, h, (0,), rate=TWICE[m]) for h in (4, 8)]
        cells += [
            _merging(m, h, seeds, tau=tau)
            for h, tau, seeds in ((4, 0, THREE), (4, 1, (0,)), (8, 0, (0,)))
        ]
    cells.append(_merging(2, 4, THREE, rate=TWICE[2], tau=0))
    before = muon(M, mode=BEFORE, size=LARGE)
    cells.append(replace(before, labels=_labels(before, BEFORE), plotted=False))
    cells += [_merging(M, h, (0,), size=LARGE) for h in (8, 24)]
    return Experiment(
        name="rhythm",
        title="The rhythm of merges",
        question=(
            "What does it cost learners with Muon to merge seldom? All else, the outer step too, is"
            " as in [the inner optimizer](#the-inner-optimizer), at the best rates that were found"
            " there at H = 24, and at twice those; against data-parallel with Muon at its best"
            " rate. Learners train on for tau = 2 steps while a round is open, or for as many as it"
            " says; with tau = 0 they wait for it, and it for all of them."
        ),
        cells=tuple(cells),
        columns=("steps", "rounds"),
        x="merges",
        series="M",
    )


def _merging(
    m: int,
    h: int,
    seeds: tuple[int, ...],
    *,
    size: Size = SMALL,
    rate: str = "",
    tau: int | None = None,
) -> Cell:
    overlap = () if tau is None else (f"sync.overlap_steps={tau}",)
    waits = () if tau != 0 else (f"sync.quorum={m}",)
    cell = muon(m, f"sync.h_steps={h}", *overlap, *waits, size=size, rate=rate)
    said = "" if tau is None else f", tau = {tau}"
    return replace(
        cell,
        key=f"{cell.key}-H{h}{said.replace(', tau = ', '-tau')}",
        labels=_labels(cell, f"H = {h}{said}"),
        seeds=seeds,
        plotted=not rate and size is SMALL,
    )


def _labels(cell: Cell, merges: str) -> tuple[tuple[str, str], ...]:
    known = dict(cell.labels)
    return (*((name, known[name]) for name in ("model", "M", "lr")), ("merges", merges))


def average() -> Experiment:
    """Compare a moving average of the global model with the model at the run's end."""
    constant = "train.schedule=constant"
    cells = [
        *(_averaged(BEFORE, decay) for decay in (0.5, 0.8)),
        *(_averaged("H = 24", decay, "sync.h_steps=24") for decay in (0.5, 0.8, 0.9)),
        *(_averaged("H = 4", decay, "sync.h_steps=4") for decay in (0.8, 0.95)),
        *(
            _averaged("H = 24, rate stays", decay, "sync.h_steps=24", constant)
            for decay in (0.5, 0.8, 0.9)
        ),
    ]
    return Experiment(
        name="average",
        title="The moving average",
        question=(
            "Is the moving average of the global model (`eval.ema`), over the versions of each"
            f" fragment, better than the model at the run's end? Muon, M = {M}, rate and batches as"
            " in [the inner optimizer](#the-inner-optimizer); the rate falls to a tenth at the end,"
            " or stays."
        ),
        cells=tuple(cells),
        columns=("average",),
        x="eval.ema",
        series="merges",
    )


def _averaged(said: str, decay: float, *sets: str) -> Cell:
    mode = BEFORE if said == BEFORE else "direct"
    key, first = f"{said}-{decay}", f"{BEFORE}-0.5"
    return replace(
        muon(M, f"eval.ema={decay}", *sets, mode=mode),
        key=key,
        labels=(("merges", said), ("eval.ema", f"{decay}")),
        against="" if key == first else first,
        plotted=False,
    )


def muon_fleet() -> Experiment:
    """Compare learners with Muon of mixed speeds, failing ones and late ones with equal fleets."""
    rungs = [
        replace(
            rung,
            labels=(*rung.labels, TOGETHER),
            tokens=TOKENS,
            batch=BIG,
            seeds=SIX,
            against=EQUAL if number else "",
        )
        for number, rung in enumerate(ladder(EQUAL, SLOW_STEP_S, muon(M).sets))
    ]
    alone = (_alone(said, share) for said, share in ALONE.items())
    return Experiment(
        name="muon-fleet",
        title="Uneven fleets with Muon",
        question=(
            "What do mixed speeds and failures cost learners with Muon, and does it help if one of"
            f" them begins alone? M = {M}, H = 24, rate and batches as in"
            f" [the inner optimizer](#the-inner-optimizer), steps of {SLOW_STEP_S:g} s. Speeds are"
            " from 1 to 2x as in [mixed speeds](#mixed-speeds); of the failing fleet two learners"
            f" are killed once a minute in the mean, each away for {DOWN_S:g} s, and start warm, or"
            " without their moments (cold). Late messages take that long each way; the overlap"
            " hides two steps in all. Equal learners with smaller batches take as many"
            " steps for their tokens as those of mixed speeds."
        ),
        cells=(*rungs, *_uneven(rungs[0]), *_smaller(rungs[0]), *alone),
        columns=("tokens", "time", "kills", "steps", "equal steps", "staleness"),
        x="fleet",
        series="learners",
        ladder=tuple(rung.key for rung in rungs),
        notes=f"{EQUAL_STEPS} Where one begins alone a step takes {STEP_S:g} s.",
    )


def _uneven(equal: Cell) -> tuple[Cell, ...]:
    """Return fleets with mixed speeds, failing learners or slow links, beside an equal one."""
    mixed, failing = fleet(SLOW_STEP_S, 2.0), [one.name for one in equal.islands[M // 2 :]]
    killed = Failures(islands=tuple(failing), every_s=60, down_s=DOWN_S)
    kept = 1 - 0.5 * DOWN_S / (60 + DOWN_S)
    uneven: dict[str, dict[str, Any]] = {
        "speeds 2x": {"share": pace(mixed), "islands": mixed},
        "half of them failing": {"share": kept, "failures": killed},
        "half of them failing, cold": {
            "share": kept, "failures": killed.model_copy(update={"warm": False}),
        },
    }  # fmt: skip
    for said, steps in LATE.items():
        late: dict[str, Any] = {"link": LinkSettings(latency_s=steps * SLOW_STEP_S)}
        uneven[f"messages {said} late"] = late
        if steps != 1:
            both = late | uneven["half of them failing"]
            uneven[f"messages {said} late, half failing"] = both
    tau = (*equal.sets, "sync.overlap_steps=6")
    later = uneven["messages 2 steps late"] | {"sets": tau, "seeds": THREE}
    uneven["messages 2 steps late, tau = 6"] = later
    return tuple(
        replace(
            equal,
            key=said.replace(" ", "-").replace(",", ""),
            labels=(("fleet", said), TOGETHER),
            against=equal.key,
            plotted=True,
            **fields,
        )
        for said, fields in uneven.items()
    )


def _smaller(equal: Cell) -> tuple[Cell, Cell]:
    """Return equal learners with batches so small that steps and tokens are as of mixed speeds.

    The ladder's fleets have as many steps and tokens too, but fewer learners, which is better by
    itself. The second cell is the fleet of mixed speeds beside this one.
    """
    batch = round(equal.batch * pace(fleet(SLOW_STEP_S, 2.0)))
    said = f"batches of {batch}"
    smaller = replace(
        equal,
        key="smaller",
        labels=(("fleet", f"M = {M}, {said}"), TOGETHER),
        against=equal.key,
        batch=batch,
        plotted=False,
    )
    mixed = replace(
        _uneven(equal)[0],
        key="speeds-beside-smaller",
        labels=(("fleet", f"speeds 2x, beside {said}"), TOGETHER),
        against=smaller.key,
        plotted=False,
    )
    return smaller, mixed


def _alone(said: str, share: float) -> Cell:
    joins = share * M / (1 + share * (M - 1))  # as a share of the steps
    first, *others = fleet(STEP_S)
    return replace(
        muon(M),
        key=f"alone-{share:g}",
        labels=(("fleet", f"M = {M}"), ("learners", f"one alone for {said} of the tokens")),
        against=EQUAL,
        islands=(first, *(other.model_copy(update={"joins": joins}) for other in others)),
        share=(joins + M * (1 - joins)) / M,
    )
