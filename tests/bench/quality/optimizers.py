"""Which inner optimizer loses least by meeting seldom, each with its own rate and outer step."""

from __future__ import annotations

from dataclasses import replace

from .cells import BATCH, LARGE, LARGEST, SEQ_LEN, SMALL, Cell, Experiment, Size

SIZES = (2, 4, 8)
"""Numbers of learners (M)."""
BIG = 4 * BATCH
"""Sequences a learner and step: 1,024 tokens, where learning rates say more than noise does."""
STEPS = {SMALL: 4 * 576, LARGE: 4 * 1_200, LARGEST: 4 * 5_000}
"""Steps of one learner for twenty tokens for each parameter."""
BEFORE = "data-parallel"
OUTER = {
    "direct": ("outer.preset=direct",),
    "0.7 / 0.6": ("outer.preset=nesterov", "outer.lr=0.7", "outer.momentum=0.6"),
}
RATES = {
    ("adamw", BEFORE): ("1.2e-2", "2.4e-2"),
    ("adamw", "direct"): ("6e-3", "1.2e-2"),
    ("muon", BEFORE): ("1.2e-2", "2.4e-2", "4.8e-2"),
    ("muon", "direct"): ("1.2e-2", "2.4e-2", "4.8e-2"),
    ("muon", "0.7 / 0.6"): ("6e-3", "1.2e-2", "2.4e-2"),
}
"""What is tried of each inner optimizer and mode, around the best of a first look."""
BEST = {
    ("adamw", BEFORE): ("1.2e-2", "1.2e-2", "1.2e-2"),
    ("adamw", "direct"): ("6e-3", "6e-3", "6e-3"),
    ("muon", BEFORE): ("1.2e-2", "2.4e-2", "4.8e-2"),
    ("muon", "direct"): ("1.2e-2", "2.4e-2", "2.4e-2"),
}
"""The best rate of the first seed at each of ``SIZES``: these have three seeds."""
LARGE_RATES = {
    ("adamw", BEFORE): ("6e-3", "1.2e-2"),
    ("adamw", "direct"): ("6e-3", "1.2e-2"),
    ("muon", BEFORE): ("1.2e-2", "2.4e-2"),
    ("muon", "direct"): ("1.2e-2", "2.4e-2"),
}
"""What is tried of the large model with M = 4."""
LARGE_BEST = "1.2e-2"
"""Its best rate with either optimizer, data-parallel."""
GROWTH: dict[tuple[Size, int], dict[str, dict[str, tuple[int, ...]]]] = {
    (SMALL, 2): {BEFORE: {"1.2e-2": (0, 1, 2)}, "direct": {"1.2e-2": (0, 1, 2)}},
    (LARGEST, 2): {BEFORE: {"6e-3": (0, 1)}, "direct": {"3e-3": (0, 1)}},
    (SMALL, 4): {BEFORE: {"2.4e-2": (0, 1, 2)}, "direct": {"2.4e-2": (0, 1, 2)}},
    (LARGE, 4): {
        BEFORE: {"1.2e-2": (0, 1), "6e-3": (0,)},
        "direct": {"1.2e-2": (0, 1), "6e-3": (0,)},
    },
    (LARGEST, 4): {
        BEFORE: {"6e-3": (0, 1), "3e-3": (0,), "1.2e-2": (0,)},
        "direct": {"3e-3": (0, 1), "6e-3": (0,), "1.2e-2": (0,)},
    },
    (SMALL, 8): {BEFORE: {"4.8e-2": (0, 1, 2)}, "direct": {"2.4e-2": (0, 1, 2)}},
    (LARGEST, 8): {BEFORE: {"6e-3": (0, 1)}, "direct": {"3e-3": (0, 1)}},
}
"""Rates and seeds with Muon by the size of the model and M, the best rate first."""


def optimizer() -> Experiment:
    """Compare AdamW and Muon in decoupled learners, against data-parallel of the same."""
    return Experiment(
        name="optimizer",
        title="The inner optimizer",
        question=(
            "Does Muon lose less than AdamW by meeting seldom? H = 24, formats and deltas of the"
            f" defaults, {BIG * SEQ_LEN:,} tokens a learner and step, twenty for each parameter;"
            f" against data-parallel, which is one learner with M times {BIG} sequences a step,"
            " with the same inner optimizer at its best rate. `0.7 / 0.6` is Nesterov outside,"
            " with that rate and momentum."
        ),
        cells=(
            *(
                _cell(SMALL, inner, mode, rate, m)
                for m in SIZES
                for (inner, mode), rates in RATES.items()
                for rate in rates
            ),
            *(
                _cell(LARGE, inner, mode, rate, 4)
                for (inner, mode), rates in LARGE_RATES.items()
                for rate in rates
            ),
        ),
        x="lr",
        series="mode",
        notes="Compare each mode at its best rate, which the first seed has chosen.",
    )


def growth() -> Experiment:
    """Compare decoupled learners with Muon and data-parallel at three sizes of the model."""
    cells = [
        replace(
            muon(m, mode=mode, size=size, rate=rate),
            seeds=seeds,
            against="" if mode == BEFORE else _key(size, "muon", BEFORE, next(iter(base)), m),
        )
        for (size, m), modes in GROWTH.items()
        for base in [modes[BEFORE]]
        for mode, rates in modes.items()
        for rate, seeds in rates.items()
    ]
    return Experiment(
        name="size",
        title="The size of the model",
        question=(
            "Does the gap to data-parallel with Muon grow with the model? H = 24,"
            f" {BIG * SEQ_LEN:,} tokens a learner and step, twenty for each parameter."
        ),
        cells=tuple(cells),
        x="model",
        series="mode",
        notes=(
            "Models of 117 k, 246 k and 1.03 M parameters, the first two also at the rates of `the"
            " inner optimizer`. The slope is of each size's best line, over its pairs of runs."
        ),
    )


def muon(m: int, *sets: str, mode: str = "direct", size: Size = SMALL, rate: str = "") -> Cell:
    """Return the cell of M learners with Muon, by default at its best rate, and with sets.

    ``mode`` may also be ``BEFORE``, which the others are compared with.
    """
    best = BEST["muon", mode][SIZES.index(m)] if size is SMALL else LARGE_BEST
    cell = _cell(size, "muon", mode, rate or best, m)
    return replace(cell, sets=(*cell.sets, *sets))


def _cell(size: Size, inner: str, mode: str, rate: str, m: int) -> Cell:
    alone = mode == BEFORE
    outer = ("mode=single",) if alone else ("mode=decoupled", *OUTER[mode])
    at = SIZES.index(m)
    best = BEST.get((inner, mode), ("",) * len(SIZES))[at]
    against = BEST[inner, BEFORE][at] if size is SMALL else LARGE_BEST
    return Cell(
        key=_key(size, inner, mode, rate, m),
        labels=(
            ("model", size.name),
            ("M", str(m)),
            ("inner", inner),
            ("mode", mode),
            ("lr", rate),
        ),
        sets=("sync.delta_scheme=auto", *outer, f"train.inner={inner}", f"train.lr={rate}"),
        learners=1 if alone else m,
        tokens=STEPS[size] * BIG * SEQ_LEN,
        seeds=(0, 1, 2) if size is SMALL and rate == best else (0,),
        against="" if alone else _key(size, inner, BEFORE, against, m),
        size=size,
        batch=m * BIG if alone else BIG,
    )


def _key(size: Size, inner: str, mode: str, rate: str, m: int) -> str:
    first = "" if size is SMALL else f"{size.name}-"
    return f"{first}M{m}-{inner}-{mode.replace(' ', '').replace('/', '-')}-{rate}"
