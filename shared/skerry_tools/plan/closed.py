"""What can be said in closed form, and a simulation must agree with.

``rate_s`` is always failures per second of a whole island while all of it runs, ``pause_s`` what
one of them costs. Sources: J. T. Daly, "A higher order estimate of the optimum checkpoint interval
for restart dumps", Future Generation Computer Systems 22 (2006), equation 13; L. Takacs,
"Introduction to the Theory of Queues" (1962), for the idle share of infinitely many servers;
P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69 (2009), for the ring.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Clock(StrEnum):
    """When failures strike: only what runs, or whatever the hour."""

    RUNNING = "running"
    CALENDAR = "calendar"


def halting(rate_s: float, pause_s: float, clock: Clock) -> float:
    """Return the share of time that an island runs which halts until nothing is broken.

    Failures of what runs: ``1 / (1 + rate * pause)``, one cycle is a run and a pause. By the
    calendar: ``exp(-rate * pause)``, the chance that nothing broke within the last pause; of a
    pause that varies, only the mean counts in both.
    """
    if clock is Clock.RUNNING:
        return 1.0 / (1.0 + rate_s * pause_s)
    return math.exp(-rate_s * pause_s)


def daly(rate_s: float, pause_s: float, every_s: float, cost_s: float, clock: Clock) -> float:
    """Return the share of time that is work which lasts, with checkpoints and rollback.

    A segment of ``every_s`` of work and ``cost_s`` of writing must pass without a failure, or it
    is done again: on average ``(e^(rate (every + cost)) - 1) / rate`` of trying. By the calendar
    the pause after each failure may be struck as well and begins anew: Daly's equation 13.
    """
    tries = math.expm1(rate_s * (every_s + cost_s)) / rate_s
    if clock is Clock.CALENDAR:
        return every_s / (tries * math.exp(rate_s * pause_s))
    return every_s / (tries * (1.0 + rate_s * pause_s))


def best_interval_s(rate_s: float, cost_s: float) -> float:
    """Return the interval between checkpoints that loses least: Daly's equation 37.

    Between Young's ``sqrt(2 cost / rate)`` and the mean time between failures.
    """
    mean_s = 1.0 / rate_s
    if cost_s >= 2.0 * mean_s:
        return mean_s
    x = cost_s / (2.0 * mean_s)
    return math.sqrt(2.0 * cost_s * mean_s) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - cost_s


def uptime(quorum: int, learners: int, running: float) -> float:
    """Return the share of time that at least ``quorum`` of the learners run, each by itself.

    The binomial tail, for learners that run for the share ``running`` of the time.
    """
    return math.fsum(
        math.comb(learners, k) * running**k * (1.0 - running) ** (learners - k)
        for k in range(max(quorum, 0), learners + 1)
    )


def participants(learners: int, running: float) -> float:
    """Return how many learners a round can expect at most, each running for that share."""
    return learners * running


def waiting_for_all(step_s: Sequence[float]) -> float:
    """Return the share of time learners train that stop for each other every round, K = M.

    Each round takes as long as the slowest: mean over maximum of the step times.
    """
    return math.fsum(step_s) / len(step_s) / max(step_s)


def ring_bits(bits: float, params: float, learners: int) -> float:
    """Return what each learner sends per step in a ring all-reduce: ``2 (1 - 1/M) b N`` bits."""
    return 2.0 * (1.0 - 1.0 / learners) * bits * params
