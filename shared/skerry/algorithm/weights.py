"""How much each contribution counts.

Source: Decoupled DiLoCo (arXiv 2604.21428), on dynamic token-weighted merging.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def weight(tokens: int, steps: int) -> float:
    """Return ``tokens * (tokens / steps)``: how much was learnt from, times how well per step.

    A step over more tokens has a less noisy gradient, so tokens that came in few steps count more
    than as many that came in many. 0 when there were no steps: such a contribution says nothing.
    The product with ``staleness.judge``'s discount is what gets normalised.
    """
    return tokens * (tokens / steps) if steps > 0 else 0.0


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights scaled to sum to one.

    The sum is exact whatever the order, so equal contributions get equal shares on every machine.
    Where all are zero the shares are equal: outer gradients of no work are zero, so it makes no
    difference which average of them is taken. Leave out what was refused before, since a refused
    contribution is not one of no work. Nothing in, nothing out.

    Raises:
        ValueError: a weight is negative or not finite.

    """
    if not all(math.isfinite(w) and w >= 0 for w in weights):
        msg = f"weights must be finite and not negative: {list(weights)}."
        raise ValueError(msg)
    largest = max(weights, default=0.0)
    if largest == 0:
        return tuple(1.0 / len(weights) for _ in weights)
    scaled = [w / largest for w in weights]
    total = math.fsum(scaled)
    return tuple(w / total for w in scaled)
