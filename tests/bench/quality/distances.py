"""What it costs when contributions arrive late, and what to do with those that do."""

from __future__ import annotations

from skerry_tools.lab.scenario import LinkSettings

from .cells import M_TOKENS, Cell, Experiment
from .fleets import STEP_S, M, fleet, pace

LESS = 3 * M_TOKENS // 4
NEAR, DEFAULT = "0 s", "by default"
LATENCIES = {"0.2 s": 0.2, "1 s": 1.0}
WAITING, HASTY = "K = M", "no grace"
POLICIES = {
    DEFAULT: (),
    HASTY: ("sync.grace_gamma=0",),
    "refused": ("sync.max_staleness=0",),
    "not discounted": ("sync.staleness_discount=1",),
    "by default, overwrite": ("sync.adoption=overwrite",),
    "by default, tau = 16": ("sync.overlap_steps=16",),
    "by default, tau = 16, P = 2": ("sync.overlap_steps=16", "sync.fragments=2"),
    WAITING: (f"sync.quorum={M}",),
}


def lateness() -> Experiment:
    """Compare staleness policies where messages take longer than the overlap hides."""
    cells = [_cell(NEAR, 0.0, DEFAULT)]
    cells += [_cell(far, s, policy) for far, s in LATENCIES.items() for policy in POLICIES]
    return Experiment(
        name="lateness",
        title="Late contributions",
        question=(
            "What do links cost that are slower than the overlap hides, and what should become of"
            f" contributions that missed their round? M = {M}, speeds up to 1.18x apart and 10 %"
            f" jitter, steps of {STEP_S} s and tau = 2; every message is on its way for so long."
            " Deltas are the default's. Against no delay."
        ),
        cells=tuple(cells),
        columns=("tokens", "staleness", "steps", "rounds"),
        x="latency",
        series="late ones",
        notes=(
            "By default the weight of a contribution is halved for each version it is behind, and"
            " one that is more than four behind is refused; adoption is `rebase`, and a round waits"
            " for others as long as nearly all of them take after the first. `no grace` closes with"
            " the first, `K = M` waits for all of them, however long. With P = 8 a round begins"
            " every 0.3 s, with P = 2 every 1.2 s; a learner has at most two fragments on their"
            " way, seven with tau = 16 and P = 8."
        ),
    )


def _cell(latency: str, latency_s: float, policy: str) -> Cell:
    reference = f"{NEAR}-{DEFAULT}".replace(" ", "-")
    key = f"{latency}-{policy}".replace(" ", "-").replace(",", "")
    islands = fleet(STEP_S, 1.18, 0.1)
    return Cell(
        key=key,
        labels=(("latency", latency), ("late ones", policy)),
        sets=("sync.quorum=1", "sync.delta_scheme=auto", *POLICIES[policy]),
        learners=M,
        tokens=LESS,
        seeds=(0, 1) if policy in {DEFAULT, HASTY, WAITING} else (0,),
        against="" if key == reference else reference,
        share=1.0 if policy == WAITING else pace(islands),
        islands=islands,
        link=LinkSettings(latency_s=latency_s),
    )
