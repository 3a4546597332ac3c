"""Which outer optimizers go by a name, and what ``auto`` is: of use without any array library.

``skerry.algorithm.outer`` builds them, and says where the numbers come from.
"""

from __future__ import annotations

from typing import NamedTuple

PRESETS = ("auto", "nesterov", "direct", "adamw")
MOMENTUM_FROM_H = 64
"""From so many inner steps per round on a short momentum was better than none in each pair of runs
(experiment ``outer`` of docs/quality.md, which ends at 256)."""
FORMERLY_DIRECT_H = 256


class Sgd(NamedTuple):
    """Hyper-parameters of the fused path; ``momentum`` 0 keeps no state."""

    lr: float
    momentum: float


def resolved(preset: str, h_steps: int) -> tuple[str, Sgd]:
    """Return which of ``direct`` and ``nesterov`` a preset is at this H, and its numbers."""
    if preset == "direct" or (preset == "auto" and h_steps < MOMENTUM_FROM_H):
        return "direct", Sgd(1.0, 0.0)
    return "nesterov", Sgd(0.7, 0.5 if preset == "auto" else 0.9)


def formerly(h_steps: int) -> Sgd:
    """Return what ``auto`` meant in run records, which have spelt it out since it changed."""
    return Sgd(1.0, 0.0) if h_steps <= FORMERLY_DIRECT_H else Sgd(0.7, 0.9)
