"""Goodput in closed form: what failures leave of the time, as the simulation plays them.

Both commands reckon with the same hardware (``hardware``) and the same tables of failures.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from skerry_tools.plan.tables import ScenarioTables

PARTS, LEAST = 2**60, 1e-12
"""Steps of the search where there is no formula, and the least goodput."""
MOST_COUNTED, ALL = 600.0, 1 - 1e-9
"""Most pauses of a round that are counted one by one; a probability as good as certain."""


class FailingLearner(NamedTuple):
    """One learner's hardware: ``slices`` equal parts that fail, leave and come back as one each.

    ``slice_rate_s`` is failures per second of one slice. Elastic learners never roll back.
    """

    slices: int
    slice_rate_s: float
    elastic: bool
    tables: ScenarioTables

    @property
    def rate_s(self) -> float:
        """Failures per second while all of it trains."""
        return self.slices * self.slice_rate_s


class TimeShares(NamedTuple):
    """Shares of a learner's time: that it trains at all, and with what part of its slices.

    ``pauses_s`` are pauses per second in which it trains, of ``pause_s`` each on average.
    """

    running: float
    working: float
    pauses_s: float
    pause_s: float

    @property
    def goodput(self) -> float:
        return max(LEAST, self.running * self.working)


def hardware(tables: ScenarioTables, chips: float, *, elastic: bool = True) -> FailingLearner:
    slices = max(1, round(chips / tables.fleet.slice_chips))
    rate_s = chips / slices / tables.failures.chip_mtbi
    return FailingLearner(slices, rate_s, elastic, tables)


def time_shares(learner: FailingLearner) -> TimeShares:
    """Return what is left of a learner's time, on average."""
    if not learner.elastic:
        return _halting(learner)
    return _elastic(learner) if learner.slices > 1 else _one_slice(learner)


def together(learners: Iterable[TimeShares], round_s: float) -> float:
    """Return the share of time in which learners train that wait for each other every ``round_s``.

    A round lasts as long as the most pauses that one of them has in it: Poisson's, so that the mean
    of the most is the sum over k of ``1 - product of P(at most k)``.
    """
    each = list(learners)
    means = [one.pauses_s * round_s for one in each]
    most = max(means) + math.sqrt(2.0 * max(means) * math.log(len(each)))  # as of a normal law
    if max(means) <= MOST_COUNTED:
        terms, below, most, k = [math.exp(-mean) for mean in means], [0.0] * len(each), 0.0, 0
        while math.prod(below) < ALL and k < 3 * MOST_COUNTED:
            below = [sum_ + term for sum_, term in zip(below, terms, strict=True)]
            most += 1.0 - min(1.0, math.prod(below))
            k += 1
            terms = [term * mean / k for term, mean in zip(terms, means, strict=True)]
    pause_s = max(one.pause_s for one in each)
    working = sum(one.working for one in each) / len(each)
    return working * round_s / (round_s + most * pause_s)


def _halting(learner: FailingLearner) -> TimeShares:
    """Halt until nothing is broken: ``1 / (1 + rate * pause)``, of which only means count.

    With rollback a segment of work and its checkpoint must pass without a failure, or it is done
    again: Daly (2006), equation 13, where no pause fails.
    """
    saving, rate_s, kept = learner.tables.checkpoints, learner.rate_s, 1.0
    pause_s = learner.tables.recovery.mean_s + learner.tables.pauses.upscale_s
    if saving.every is not None:
        segment_s = saving.every + saving.cost_s
        failing = rate_s * segment_s * saving.rollback
        again = math.expm1(min(failing, 700.0)) / failing if failing else 1.0
        kept = saving.every / segment_s / again
    return TimeShares(1.0 / (1.0 + rate_s * pause_s), kept, rate_s, pause_s)


def _elastic(learner: FailingLearner) -> TimeShares:
    """Go on without what failed: find the goodput that its own rate of failures leaves."""

    def is_enough(part: int) -> bool:
        return _at(learner, learner.rate_s * part / PARTS).goodput <= part / PARTS

    return _at(learner, learner.rate_s * bisect_left(range(PARTS), x=True, key=is_enough) / PARTS)


def _one_slice(learner: FailingLearner) -> TimeShares:
    """Train, fail and come back, from one upscale to the next: no sooner than a batch allows."""
    pauses, rate_s = learner.tables.pauses, learner.rate_s
    away_s = max(learner.tables.recovery.mean_s, pauses.downscale_s) + pauses.upscale_s
    early_s = max(0.0, pauses.batch_s - away_s)
    pause_s = away_s + early_s + math.expm1(-rate_s * early_s) / rate_s
    return TimeShares(1.0 / (1.0 + rate_s * pause_s), 1.0, rate_s, pause_s)


def _at(learner: FailingLearner, rate_s: float) -> TimeShares:
    """Return what so many failures per second of its time leave of a learner's time.

    Upscales come as often as their batches allow: every ``batch_s``, or with the next slice that is
    back. A slice is away for its recovery and for that; its learner pauses at the beginning.
    """
    pauses, slices = learner.tables.pauses, learner.slices
    gate_s = max(pauses.batch_s, pauses.upscale_s)
    returns = rate_s * gate_s
    alone = math.exp(-min(returns, 700.0))
    waits_s = rate_s * gate_s**2 / 2 / (returns + alone)
    upscales_s = max(rate_s / (returns + alone), rate_s / slices)
    running = max(0.0, 1.0 - rate_s * pauses.downscale_s - upscales_s * pauses.upscale_s)
    away_s = max(0.0, learner.tables.recovery.mean_s + waits_s - pauses.downscale_s)
    missing = rate_s * away_s * (running + (1.0 - running) / slices) / slices
    away = min(1.0, missing / running) if running else 1.0
    running -= running * away**slices
    working = (1.0 - away) / (1.0 - away**slices) if away < 1 else 0.0
    count = (rate_s + upscales_s) / running if running else 0.0
    return TimeShares(running, working, count, (1.0 - running) / running / count if count else 0.0)
