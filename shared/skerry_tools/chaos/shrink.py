"""From a plan that fails to the least of it that still does.

Delta debugging (A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input",
IEEE TSE 28(2), 2002) over the faults, then over the numbers of those that are left. What comes out
fails as the plan did; taking away any one fault of it, it fails no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from skerry_tools.chaos.plan import Fault, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Fails = Callable[[FaultPlan], bool]

MOST_TRIALS = 400
"""Runs of a plan that one shrinking may take."""
ROUNDED = (0, 1, 2)
"""Decimals of times that are tried, the roundest first."""


class _Trials:
    """Runs the plan with other faults, at most so often, and never the same twice."""

    def __init__(self, plan: FaultPlan, fails: Fails, most: int) -> None:
        self.plan = plan
        self.fails = fails
        self.left = most
        self.known: dict[tuple[Fault, ...], bool] = {}

    def fail(self, faults: Sequence[Fault]) -> bool:
        """Tell whether the plan fails with these faults; False when no trial is left."""
        key = tuple(sorted(faults, key=lambda fault: fault.at_s))
        if key not in self.known:
            if not self.left:
                return False
            self.left -= 1
            self.known[key] = self.fails(replace(self.plan, faults=key))
        return self.known[key]


def shrink(plan: FaultPlan, fails: Fails, *, most_trials: int = MOST_TRIALS) -> FaultPlan:
    """Return a plan of the same seed with as few and as plain faults as still fail.

    ``fails`` runs a plan; it must say the same each time. The plan itself is returned where it
    does not fail at all.
    """
    trials = _Trials(plan, fails, most_trials)
    if not trials.fail(plan.faults):
        return plan
    faults = list(plan.faults)
    while True:
        before = list(faults)
        faults = _fewer(faults, trials)
        for index in range(len(faults)):
            faults = _plainer(faults, index, trials)
        if faults == before:
            break
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _fewer(faults: list[Fault], trials: _Trials) -> list[Fault]:
    """Drop faults, many at once at first and one by one at last."""
    if trials.fail([]):
        return []
    parts = 2
    while len(faults) >= 2:
        size = -(-len(faults) // parts)
        for start in range(0, len(faults), size):
            rest = faults[:start] + faults[start + size :]
            if rest and trials.fail(rest):
                faults, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(faults):
                break
            parts = min(2 * parts, len(faults))
    return faults


def _plainer(faults: list[Fault], index: int, trials: _Trials) -> list[Fault]:
    """Make the numbers of one fault smaller and rounder, as long as the plan fails."""
    while True:
        for simpler in _simpler(faults[index]):
            tried = [*faults[:index], simpler, *faults[index + 1 :]]
            if trials.fail(tried):
                faults = tried
                break
        else:
            return faults


def _simpler(fault: Fault) -> Iterator[Fault]:
    """Yield plainer forms of a fault, the plainest first; none can be made this fault again."""
    for duration_s in (0.0, *_rounder(fault.duration_s), round(fault.duration_s / 2, 3)):
        if duration_s < fault.duration_s:
            yield replace(fault, duration_s=duration_s)
    for amount in (1.0, *_rounder(fault.amount)):
        if fault.amount and _shorter(amount, fault.amount):
            yield replace(fault, amount=amount)
    for at_s in (0.0, *_rounder(fault.at_s)):
        if at_s < fault.at_s:
            yield replace(fault, at_s=at_s)


def _rounder(number: float) -> list[float]:
    """Return the number with fewer decimals, rounded towards 0."""
    return [int(number * 10**places) / 10**places for places in ROUNDED]


def _shorter(one: float, other: float) -> bool:
    """Tell whether a number takes fewer characters to write than another one."""
    return len(f"{one:g}") < len(f"{other:g}")
