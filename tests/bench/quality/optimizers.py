"""Which inner optimizer loses least by meeting seldom, each with its own rate and outer step."""

from __future__ import annotations

from .cells import BATCH, SEQ_LEN, Cell, Experiment

M = 4
BIG = 4 * BATCH
"""Sequences a learner and step: 1,024 tokens, where learning rates say more than noise does."""
TOKENS = 576 * M * BIG * SEQ_LEN
"""Twenty for each parameter of the small model."""
RATES = {"adamw": ("3e-3", "6e-3", "1.2e-2"), "muon": ("6e-3", "1.2e-2", "2.4e-2")}
BEFORE = "data-parallel"
OUTER = {
    "direct": ("outer.preset=direct",),
    "0.7 / 0.6": ("outer.preset=nesterov", "outer.lr=0.7", "outer.momentum=0.6"),
}


def optimizer() -> Experiment:
    """Compare AdamW and Muon in decoupled learners, against data-parallel of the same."""
    cells: list[Cell] = []
    for inner, rates in RATES.items():
        for rate in rates:
            cells.append(_cell(inner, rate, BEFORE, ("mode=single",), learners=1))
            cells += [
                _cell(inner, rate, outer, ("mode=decoupled", *sets), learners=M)
                for outer, sets in OUTER.items()
            ]
    return Experiment(
        name="optimizer",
        title="The inner optimizer",
        question=(
            f"Does Muon lose less than AdamW by meeting seldom? M = {M}, H = 24, {BIG * SEQ_LEN:,}"
            " tokens a learner and step, twenty for each parameter; against data-parallel, which is"
            f" one learner with batch {M * BIG}, with the same inner optimizer and rate. `0.7 /"
            " 0.6` is Nesterov outside, with that rate and momentum."
        ),
        cells=tuple(cells),
        x="lr",
        series="mode",
        notes="Compare each line of data-parallel and of decoupled learners at its best rate.",
    )


def _cell(inner: str, rate: str, mode: str, sets: tuple[str, ...], *, learners: int) -> Cell:
    key = f"{inner}-{mode.replace(' ', '').replace('/', '-')}-{rate}"
    return Cell(
        key=key,
        labels=(("inner", inner), ("mode", mode), ("lr", rate)),
        sets=(*sets, f"train.inner={inner}", f"train.lr={rate}"),
        learners=learners,
        tokens=TOKENS,
        seeds=(0,),
        against="" if mode == BEFORE else f"{inner}-{BEFORE}-{rate}",
        batch=M * BIG // learners,
    )
