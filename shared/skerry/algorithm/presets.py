"""The names of the built-in rules, and what outer preset ``auto`` stands for.

Every other rule is ``module:function``. This module needs no array library, so that settings and
plans know the names; ``skerry.algorithm.outer`` says where the numbers come from.
"""

from __future__ import annotations

from typing import NamedTuple

INNERS = ("adamw", "muon", "gradient")
"""Values of ``train.inner``: what a learner's step does."""
MERGES = ("average", "rda", "trimmed_mean", "median_of_means")
"""Values of ``sync.merge``: how outer gradients become one (``skerry.algorithm.merge``)."""
ROBUST = MERGES[2:]
"""The merges that outvote a minority (``skerry.algorithm.merge_robust``)."""
OUTERS = ("auto", "nesterov", "direct", "adamw")
"""Values of ``outer.preset``: what the syncer does with a merged outer gradient."""
MOMENTUM_FROM_H = 64
"""From this H on, momentum 0.5 was better than none in each pair of runs (experiment ``outer`` of
docs/quality.md, which ends at 256)."""


class Sgd(NamedTuple):
    """Hyper-parameters of momentum SGD; ``momentum`` 0 keeps no state."""

    lr: float
    momentum: float


def resolved(preset: str, h_steps: int) -> tuple[str, Sgd]:
    """Return which of ``direct`` and ``nesterov`` a preset is at this H, and its numbers."""
    if preset == "direct" or (preset == "auto" and h_steps < MOMENTUM_FROM_H):
        return "direct", Sgd(1.0, 0.0)
    return "nesterov", Sgd(0.7, 0.5 if preset == "auto" else 0.9)


def state_vectors(preset: str, h_steps: int, momentum: float | None) -> int:
    """Return how many f32 of state a preset keeps per parameter; a user's own counts as one."""
    if preset not in OUTERS:
        return 1
    if preset == "adamw":
        return 2
    default = resolved(preset, h_steps)[1].momentum
    return int((default if momentum is None else momentum) > 0)
