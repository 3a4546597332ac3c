"""Which inner optimizer loses least by meeting seldom, each with its own rate and outer step."""

from __future__ import annotations

from .cells import BATCH, SEQ_LEN, Cell, Experiment

SIZES = (2, 4, 8)
"""Numbers of learners (M)."""
BIG = 4 * BATCH
"""Sequences a learner and step: 1,024 tokens, where learning rates say more than noise does."""
TOKENS = 576 * 4 * BIG * SEQ_LEN
"""Twenty for each parameter of the small model."""
BEFORE = "data-parallel"
OUTER = {
    "direct": ("outer.preset=direct",),
    "0.7 / 0.6": ("outer.preset=nesterov", "outer.lr=0.7", "outer.momentum=0.6"),
}
RATES = {
    ("adamw", BEFORE): ("1.2e-2", "2.4e-2"),
    ("adamw", "direct"): ("6e-3", "1.2e-2"),
    ("muon", BEFORE): ("1.2e-2", "2.4e-2", "4.8e-2"),
    ("muon", "direct"): ("1.2e-2", "2.4e-2"),
    ("muon", "0.7 / 0.6"): ("6e-3", "1.2e-2", "2.4e-2"),
}
"""What is tried of each inner optimizer and mode, around the best of a first look."""


def optimizer() -> Experiment:
    """Compare AdamW and Muon in decoupled learners, against data-parallel of the same."""
    return Experiment(
        name="optimizer",
        title="The inner optimizer",
        question=(
            "Does Muon lose less than AdamW by meeting seldom? H = 24, formats and deltas of the"
            f" defaults, {BIG * SEQ_LEN:,} tokens a learner and step, twenty for each parameter;"
            f" against data-parallel, which is one learner with M times {BIG} sequences a step,"
            " with the same inner optimizer. `0.7 / 0.6` is Nesterov outside, with that rate and"
            " momentum."
        ),
        cells=tuple(
            _cell(inner, mode, rate, m)
            for m in SIZES
            for (inner, mode), rates in RATES.items()
            for rate in rates
        ),
        x="lr",
        series="mode",
        notes="Compare each mode at its best rate.",
    )


def _cell(inner: str, mode: str, rate: str, m: int) -> Cell:
    alone = mode == BEFORE
    outer = ("mode=single",) if alone else ("mode=decoupled", *OUTER[mode])
    return Cell(
        key=f"M{m}-{inner}-{mode.replace(' ', '').replace('/', '-')}-{rate}",
        labels=(("M", str(m)), ("inner", inner), ("mode", mode), ("lr", rate)),
        sets=("sync.delta_scheme=auto", *outer, f"train.inner={inner}", f"train.lr={rate}"),
        learners=1 if alone else m,
        tokens=TOKENS,
        seeds=(0,),
        against="" if alone else f"M{m}-{inner}-{BEFORE}-1.2e-2",
        batch=m * BIG if alone else BIG,
    )
