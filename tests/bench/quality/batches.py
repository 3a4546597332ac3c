"""How much of the cost of meeting seldom is the noise of small batches."""

from __future__ import annotations

from .cells import BATCH, SEQ_LEN, Cell, Experiment

M = 4
STEPS = 512
RATES = ("3e-3", "6e-3", "1e-2")
LOCAL_ADAM = (
    "mode=diloco",
    "sync.h_steps=1",
    "sync.merge=average",
    "outer.preset=direct",
    "sync.adoption=rebase",
    "sync.contribution_scheme=f32",
    "sync.global_scheme=f32",
)
"""Meets after every step and loses nothing on the way: only where Adam runs is different."""


def batch() -> Experiment:
    """Compare decoupled learners with data-parallel: three batches, equal steps, several rates."""
    cells: list[Cell] = []
    for size in (BATCH, 4 * BATCH, 16 * BATCH):
        for rate in RATES if size == BATCH else RATES[1:]:
            reference = _cell(size, rate, "data-parallel", ("mode=data-parallel",), "")
            cells.append(reference)
            if size == BATCH:
                cells.append(_cell(size, rate, "H = 1", LOCAL_ADAM, reference.key))
            for h in (8, 24) if size < 16 * BATCH else (24,):
                sets = ("mode=decoupled", f"sync.h_steps={h}")
                cells.append(_cell(size, rate, f"decoupled, H = {h}", sets, reference.key))
    return Experiment(
        name="batch",
        title="The batch of a learner",
        question=(
            f"How much of what it costs to meet seldom is the noise of small batches? M = {M},"
            f" {STEPS} steps, batches of {BATCH}, {4 * BATCH} and {16 * BATCH} sequences a learner;"
            " against data-parallel with the same batches and rate. `H = 1` averages the learners'"
            " parameters after every single step, in f32: what it differs by from data-parallel is"
            " that each learner's Adam sees its own gradient, not the mean of all."
        ),
        cells=tuple(cells),
        columns=("tokens", "rounds"),
        x="batch",
        series="mode",
        notes=(
            "Where gradients are mostly noise, Adam divides by that noise: the mean of M learners'"
            " steps is up to sqrt(M) times shorter than one step from the mean gradient, which is"
            " why `H = 1` at a rate of 6e-3 is close to data-parallel at 3e-3. Compare, too, each"
            " mode at its better rate."
        ),
    )


def _cell(size: int, rate: str, mode: str, sets: tuple[str, ...], against: str) -> Cell:
    return Cell(
        key=f"b{size}-{mode.replace(' ', '').replace(',', '-').replace('=', '')}-{rate}",
        labels=(("batch", str(size)), ("mode", mode), ("lr", rate)),
        sets=(*sets, f"train.lr={rate}"),
        learners=M,
        tokens=STEPS * M * size * SEQ_LEN,
        seeds=(0,),
        against=against,
        batch=size,
    )
