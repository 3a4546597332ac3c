"""How much of the cost of meeting seldom is that runs are short, and what Adam forgets."""

from __future__ import annotations

from .cells import BATCH, SEQ_LEN, Cell, Experiment

M = 4
MODES = ("data-parallel", "decoupled")
STEPS = (512, 1024, 2048, 4096, 8192)
SHORTER = (256, 384)
"""Of data-parallel alone: what decoupled learners need 512 steps for it has before."""
LONG = 4096
"""Runs of that many steps take minutes: one seed."""


def length() -> Experiment:
    """Compare decoupled learners with data-parallel, each run twice as long as the one before."""
    return Experiment(
        name="length",
        title="The length of a run",
        question=(
            "Does what it costs to meet seldom stay as runs become longer?"
            f" M = {M}, H = 24, {BATCH} sequences a learner, the same rate; against data-parallel"
            " with as many steps. The last column says after how many steps a run of data-parallel"
            " would have been as good, between its runs of other lengths by the logarithm of steps:"
            f" those of {' and '.join(map(str, SHORTER))} steps are there for that alone."
        ),
        cells=(
            *(_cell(steps, MODES[0]) for steps in SHORTER),
            *(_cell(steps, mode) for steps in STEPS for mode in MODES),
        ),
        columns=("tokens", "rounds", "equal loss"),
        x="steps",
        series="mode",
        ladder=tuple(f"{MODES[0]}-{steps}" for steps in (*SHORTER, *STEPS)),
    )


def _cell(steps: int, mode: str) -> Cell:
    reference = f"{MODES[0]}-{steps}"
    return Cell(
        key=f"{mode}-{steps}",
        labels=(("steps", str(steps)), ("mode", mode)),
        sets=(f"mode={mode}",),
        learners=M,
        tokens=steps * M * BATCH * SEQ_LEN,
        seeds=(0, 1) if steps < LONG else (0,),
        against="" if mode == MODES[0] else reference,
        plotted=mode != MODES[0],
    )


def inner() -> Experiment:
    """Compare how long Adam remembers squared gradients, in both modes."""
    cells = [
        Cell(
            key=f"{mode}-{b2}",
            labels=(("mode", mode), ("b2", b2)),
            sets=(f"mode={mode}", f"train.b2={b2}"),
            learners=M,
            tokens=1024 * M * BATCH * SEQ_LEN,
            seeds=(0, 1, 2),
            against="" if b2 == "0.95" else f"{mode}-0.95",
        )
        for mode in MODES
        for b2 in ("0.95", "0.99", "0.999")
    ]
    return Experiment(
        name="inner",
        title="What Adam remembers",
        question=(
            "A learner's own gradient is noisier than the mean of all: should its Adam average the"
            f" squares over more steps (`train.b2`)? M = {M}; against 0.95 in the same mode."
        ),
        cells=tuple(cells),
        x="b2",
        series="mode",
    )
