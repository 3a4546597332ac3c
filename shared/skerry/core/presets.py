"""Which outer optimizers go by a name, and what ``auto`` is: of use without any array library.

``skerry.core.outer`` builds them, and says where the numbers come from.
"""

from __future__ import annotations

from typing import NamedTuple

PRESETS = ("auto", "nesterov", "direct", "adamw")
LONGEST_DIRECT_H = 256
"""Up to so many inner steps per round momentum hurt (experiment ``outer``, which ends there)."""


class Sgd(NamedTuple):
    """Hyper-parameters of the fused path; ``momentum`` 0 keeps no state."""

    lr: float
    momentum: float


def resolved(preset: str, h_steps: int) -> tuple[str, Sgd]:
    """Return which of ``direct`` and ``nesterov`` a preset is at this H, and its numbers."""
    if preset == "direct" or (preset == "auto" and h_steps <= LONGEST_DIRECT_H):
        return "direct", Sgd(1.0, 0.0)
    return "nesterov", Sgd(0.7, 0.9)
