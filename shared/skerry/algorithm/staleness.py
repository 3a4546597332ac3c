"""Whether a late contribution still counts, and for how much.

A contribution is an outer gradient relative to the sender's own anchor, so a late one is a delayed
gradient: it is never a pull back to where the model was. Sources: Decoupled DiLoCo (arXiv
2604.21428), on the syncer (late fragments join a later round); for weighing by staleness, C. Xie,
S. Koyejo, I. Gupta, "Asynchronous federated optimization" (arXiv 1903.03934), whose polynomial and
hinge functions are other choices for ``Discount``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

Discount = Callable[[int], float]
"""Maps staleness in versions, 1 or more, to a factor in (0, 1]."""


class StalenessReason(StrEnum):
    """Why a contribution counts fully, less, or not at all."""

    FRESH = "fresh"
    LATE = "late"
    TOO_STALE = "too_stale"
    BASE_IN_FUTURE = "base_in_future"
    """Its base is a version that this log has never committed."""


def exponential(factor: float) -> Discount:
    """Return the discount that multiplies by ``factor`` for each version behind."""

    def discount(behind: int) -> float:
        return factor**behind

    return discount


def judge(
    base_version: int, version: int, max_staleness: int, discount: float | Discount
) -> tuple[float | None, StalenessReason]:
    """Return the factor on a contribution's weight and why; None if it is refused.

    ``version`` is the fragment's current one, which the round builds on; ``discount`` is a factor
    per version behind or a function of how many.
    """
    behind = version - base_version
    if behind < 0:
        return None, StalenessReason.BASE_IN_FUTURE
    if behind > max_staleness:
        return None, StalenessReason.TOO_STALE
    if behind == 0:
        return 1.0, StalenessReason.FRESH
    by_age = discount if callable(discount) else exponential(discount)
    return by_age(behind), StalenessReason.LATE


def oldest_base(version: int, max_staleness: int) -> int:
    """Return the oldest base that ``judge`` still takes for a fragment at ``version``."""
    return max(1, version - max_staleness)
