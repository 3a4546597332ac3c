"""Goodput: which share of the time that was given to a run went into training.

Source: Decoupled DiLoCo (arXiv 2604.21428), evaluation: useful training time over allocated time,
summed over learners. Time in which a learner that has joined is down is allocated, since its
machine is waiting for it: a run that loses learners must not look better for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Share:
    """One learner's time in seconds: inside training steps, and since it joined."""

    busy_s: float
    allocated_s: float


def allocated_s(joined_s: float, now_s: float, ended_s: float | None = None) -> float:
    """Return the seconds a learner has been part of the run: until it ended, or until now."""
    return max(0.0, (now_s if ended_s is None else ended_s) - joined_s)


def goodput(shares: Iterable[Share]) -> float:
    """Return busy over allocated time, summed over learners, in [0, 1]; 0 before any time passed.

    Busy time above the allocated (two clocks never agree exactly) does not count.
    """
    busy = allocated = 0.0
    for share in shares:
        allocated += max(0.0, share.allocated_s)
        busy += min(max(0.0, share.busy_s), max(0.0, share.allocated_s))
    return busy / allocated if allocated > 0 else 0.0
