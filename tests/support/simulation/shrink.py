"""From a plan that fails to one of whose faults none can be left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry_tools.chaos.plan import FaultPlan

MOST_TRIALS = 400
"""Runs of a plan that one shrinking may take."""


def shrink(
    plan: FaultPlan, fails: Callable[[FaultPlan], bool], *, most_trials: int = MOST_TRIALS
) -> FaultPlan:
    """Return the plan without the faults that it does not need to fail: by halves, then one by one.

    The plan itself is returned where it does not fail at all.
    """
    left, size = most_trials - 1, len(plan.faults)
    if not fails(plan):
        return plan
    while size and left:
        for start in range(0, len(plan.faults), size):
            faults = plan.faults[:start] + plan.faults[start + size :]
            left -= 1
            if fails(smaller := replace(plan, faults=faults)):
                plan, size = smaller, min(size, len(faults))
                break
            if not left:
                break
        else:
            size //= 2
    return plan
