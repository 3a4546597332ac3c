"""How much each contribution counts: by its tokens and steps, and by how late it is.

Sources: Decoupled DiLoCo (arXiv 2604.21428), on dynamic token-weighted merging, and on the syncer
(late fragments join a later round). A contribution is an outer gradient relative to the sender's
own anchor, so a late one is a delayed gradient, never a pull back to where the model was. On
weighing by staleness see C. Xie, S. Koyejo, I. Gupta, "Asynchronous federated optimization" (arXiv
1903.03934).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

LEAST_OTHERS = 2
"""How many other learners it takes to outvote one."""
LARGEST = sys.float_info.max
"""The largest factor on a share. A tiny share's inverse may be infinite, and 0 times that is NaN;
such a share is below every bound."""


class StalenessReason(StrEnum):
    """Why a contribution counts fully, less, or not at all."""

    FRESH = "fresh"
    LATE = "late"
    TOO_STALE = "too_stale"
    BASE_IN_FUTURE = "base_in_future"
    """Its base is a version that this log has never committed."""


def weight(tokens: int, steps: int, *, bare: bool = False) -> float:
    """Return ``tokens * (tokens / steps)``: the amount of data, times the data in each step.

    A step over more tokens has a less noisy gradient, so tokens from few steps count more than as
    many tokens from many steps. ``bare`` gradients of single steps count by their tokens: then
    the mean is the gradient of one batch of them all. 0 without steps. The product with
    ``discounted`` is what gets normalised.
    """
    return tokens * (1.0 if bare else tokens / steps) if steps > 0 else 0.0


def normalised(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights scaled to sum to one; an empty tuple for no weights.

    The sum is exact in any order, so equal contributions get equal shares on every machine. Where
    all are zero the shares are equal: outer gradients of no work are zero, and so is any average of
    them. Leave refused contributions out first.

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


def shares(work: Sequence[float], learners: Sequence[str], most: float) -> tuple[float, ...]:
    """Return ``normalised`` work, at most ``most`` equal shares of it per learner; 0: no limit.

    ``learners`` names each contribution's sender. A learner's excess goes to the others in
    proportion. Of two learners either may do most of the work.
    """
    found = normalised(work)
    held = dict.fromkeys(learners, 0.0)
    for share, learner in zip(found, learners, strict=True):
        held[learner] += share
    if not most or len(held) <= LEAST_OTHERS:
        return found
    bound, full, scale = most / len(held), dict[str, float](), 1.0
    while rest := math.fsum(total for name, total in held.items() if name not in full):
        scale = min(max(0.0, 1.0 - bound * len(full)) / rest, LARGEST)
        over = {n: bound / t for n, t in held.items() if n not in full and t * scale > bound}
        if not over:
            break
        full |= over
    if not full:
        return found
    return normalised([s * full.get(n, scale) for s, n in zip(found, learners, strict=True)])


def by_slice(
    weights: Sequence[float], reach: Sequence[Sequence[float]], slices: int
) -> NDArray[np.float64]:
    """Return each contribution's share of each slice, f64 (contributions, slices).

    ``reach`` holds for each contribution the part of its tokens that reached each slice, or is
    empty if all did. A slice weighs ``slice_tokens * (tokens / steps)``: a learner that never used
    an expert says nothing about it. The shares of a slice sum to one, or are all zero if no tokens
    reached it; where all tokens reached it they are ``weights``.
    """
    own = np.array(weights, np.float64)[:, None]
    shares = np.repeat(own, slices, axis=1)
    if not any(reach):
        return shares
    parts = np.array([part or (1.0,) * slices for part in reach])
    weighted = own * parts
    total = weighted.sum(axis=0)
    scaled = np.divide(weighted, total, out=np.zeros_like(weighted), where=total > 0)
    return np.where((parts == 1).all(axis=0), shares, scaled)


def discounted(
    base_version: int, version: int, max_staleness: int, discount: float
) -> tuple[float | None, StalenessReason]:
    """Return the factor on a contribution's weight and why; None if it is refused.

    ``version`` is the fragment's current one, which the round builds on; ``discount`` is the factor
    for each version of staleness.
    """
    staleness = version - base_version
    if staleness < 0:
        return None, StalenessReason.BASE_IN_FUTURE
    if staleness > max_staleness:
        return None, StalenessReason.TOO_STALE
    reason = StalenessReason.LATE if staleness else StalenessReason.FRESH
    return discount**staleness, reason


def oldest_base(version: int, max_staleness: int) -> int:
    """Return the oldest base that ``discounted`` still accepts for a fragment at ``version``."""
    return max(1, version - max_staleness)
