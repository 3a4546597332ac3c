"""The simulation agrees with every closed form that there is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skerry.algorithm.traffic import data_parallel_bytes
from skerry_tools.plan.baselines import halting, ring_bits
from skerry_tools.plan.failures import Absence, FailingLearner, LearnerTimeline, TimeUse, draw, walk
from skerry_tools.plan.simulation import binomial_uptime, uptime_of
from skerry_tools.plan.tables import (
    FailureClock,
    PauseTable,
    RecoveryDistribution,
    RecoveryTable,
    SavingTable,
    Upscale,
)

SLICES = 1000
LAWS = st.sampled_from([
    RecoveryTable(law=RecoveryDistribution.DETERMINISTIC, mean_s=1.0),
    RecoveryTable(law=RecoveryDistribution.EXPONENTIAL, mean_s=1.0),
    RecoveryTable(law=RecoveryDistribution.LOG_NORMAL, mean_s=1.0, spread=0.5),
    RecoveryTable(
        law=RecoveryDistribution.EXPONENTIATED_WEIBULL, mean_s=1.0, spread=1.5, exponent=2.0
    ),
])  # fmt: skip
LOADS = st.floats(0.05, 2.0)
"""Failures per mean pause: from 5 % of the time lost to most of it."""
SEEDS = st.integers(0, 2**32)
CLOCKS = st.sampled_from(FailureClock)


def chance(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def fixed(mean_s: float) -> RecoveryTable:
    return RecoveryTable(law=RecoveryDistribution.DETERMINISTIC, mean_s=mean_s)


def failing(
    load: float, *, elastic: bool = False, clock: FailureClock = FailureClock.RUNNING,
    recovery: RecoveryTable | None = None, saving: SavingTable | None = None, **pauses: Any,
) -> FailingLearner:  # fmt: skip
    """A learner of many slices with one failure per 100 s while all run, and pauses of 100 load."""
    recovery = (recovery or fixed(1.0)).model_copy(update={"mean_s": 100.0 * load})
    table = PauseTable.model_validate({"downscale_s": 0.0, "upscale_s": 0.0, **pauses})
    return FailingLearner(
        SLICES, 0.01 / SLICES, elastic, clock, recovery, table, saving or SavingTable()
    )


def walked(learner: FailingLearner, failures: float, seed: int = 0) -> LearnerTimeline:
    return walk(learner, failures * 100.0, chance(seed))


def trained(timeline: LearnerTimeline) -> float:
    """Return the share of time that is work which lasts: the goodput where nothing is lent."""
    return float(timeline.spent()[TimeUse.TRAIN] / timeline.end_s)


def near(found: float, expected: float, failures: float) -> None:
    """Within five standard errors of a share s estimated from so many cycles.

    One is s (1 - s) sqrt(2 / n) where runs and pauses vary as much as their means: at most a
    quarter of sqrt(2 / n).
    """
    assert found == pytest.approx(expected, abs=5.0 * 0.25 * math.sqrt(2.0 / failures))


@settings(max_examples=15)
@given(LOADS, LAWS, CLOCKS, SEEDS)
def test_halting_matches_its_closed_form_for_every_law_and_clock(
    load: float, law: RecoveryTable, clock: FailureClock, seed: int
) -> None:
    timeline = walked(failing(load, recovery=law, clock=clock), 4000, seed)
    near(timeline.running_share, halting(0.01, 100.0 * load, clock), 2000)
    assert trained(timeline) == pytest.approx(timeline.running_share, abs=1e-9)


def daly(load: float, every: float, cost: float, clock: FailureClock) -> float:
    """Return work that lasts, by J. T. Daly, Future Generation Computer Systems 22 (2006), eq. 13.

    A segment of work and writing must pass without a failure, or it is done again. By the calendar
    the pause after each failure may fail as well and begins again.
    """
    tries = math.expm1(every + cost)
    return every / (tries * (math.exp(load) if clock is FailureClock.CALENDAR else 1.0 + load))


@settings(max_examples=15)
@given(st.floats(0.05, 1.0), st.floats(0.1, 1.5), st.floats(0.0, 0.3), CLOCKS, SEEDS)
def test_rollback_matches_daly(
    load: float, every: float, cost: float, clock: FailureClock, seed: int
) -> None:
    saving = SavingTable(every=100 * every, cost_s=100 * cost, rollback=True)
    timeline = walked(failing(load, clock=clock, saving=saving), 4000, seed)
    near(trained(timeline), daly(load, every, cost, clock), 1000)


@settings(max_examples=10)
@given(st.floats(0.05, 1.0), st.integers(1, 6), SEEDS)
def test_uptime_of_independent_learners_is_binomial(load: float, learners: int, seed: int) -> None:
    timelines = [walked(failing(load), 3000, seed + n) for n in range(learners)]
    running = float(np.mean([one.running_share for one in timelines]))
    for quorum, share in enumerate(uptime_of(timelines), start=1):
        near(share, binomial_uptime(quorum, learners, running), 1500)


@settings(max_examples=15)
@example(load=1.71875, upscale=Upscale.EAGER, clock=FailureClock.RUNNING, seed=227)
@given(LOADS, st.sampled_from(Upscale), CLOCKS, SEEDS)
def test_all_time_is_accounted_for(
    load: float, upscale: Upscale, clock: FailureClock, seed: int
) -> None:
    saving = SavingTable(every=40.0, cost_s=3.0, rollback=True)
    pauses: dict[str, Any] = {
        "upscale": upscale,
        "batch_s": 50.0,
        "downscale_s": 5.0,
        "upscale_s": 7.0,
    }
    away = [Absence(500.0, 900.0), Absence(600.0, 700.0), Absence(2e4, 2.1e4, TimeUse.PREEMPTED)]
    for elastic in (True, False):
        learner = failing(load, elastic=elastic, clock=clock, saving=saving, **pauses)
        timeline = walk(learner, 3e4, chance(seed), away)
        assert np.all(timeline.lengths >= 0)
        assert timeline.spent().sum() == pytest.approx(3e4)
        assert np.all(timeline.spent() >= -1e-6)
        assert timeline.spent()[TimeUse.OUTAGE] <= 400.0 + 1e-6


def test_an_elastic_island_pauses_as_little_as_it_has_to() -> None:
    pauses: dict[str, Any] = {"downscale_s": 15.0, "upscale_s": 20.0, "batch_s": 600.0}
    eager, batch = (
        trained(walked(failing(0.6, elastic=True, upscale=upscale, **pauses), 3000))
        for upscale in (Upscale.EAGER, Upscale.BATCH)
    )
    assert 1 / (1 + 0.01 * 35) - 0.01 < eager < batch < 1 / (1 + 0.01 * 15)


def test_the_calendar_costs_more_than_the_running_clock() -> None:
    running = failing(0.6, elastic=True, downscale_s=15.0, upscale_s=20.0)
    calendar = replace(running, clock=FailureClock.CALENDAR)
    assert trained(walked(running, 3000)) > trained(walked(calendar, 3000))


def test_the_same_seed_gives_the_same_walk() -> None:
    learner = failing(0.5, recovery=RecoveryTable(spread=0.5))
    one, same, other = (walked(learner, 500, seed) for seed in (1, 1, 2))
    assert one.times.tobytes() == same.times.tobytes()
    assert one.times.tobytes() != other.times.tobytes()


@given(LAWS, st.floats(1.0, 1e4))
def test_a_law_has_its_mean(law: RecoveryTable, mean_s: float) -> None:
    drawn = draw(law.model_copy(update={"mean_s": mean_s}), chance(1), 20_000)
    assert float(drawn.mean()) == pytest.approx(mean_s, rel=0.05)
    assert np.all(np.isfinite(drawn))
    assert np.all(drawn >= 0)


@given(st.integers(2, 64), st.integers(1, 10**9), st.integers(1, 1000))
def test_the_ring_is_the_one_that_runs_are_compared_with(
    learners: int, params: int, steps: int
) -> None:
    counted = data_parallel_bytes(params, {"all": steps}, learners)
    bits = ring_bits(32.0, params, learners) * steps
    assert counted * 8 == pytest.approx(bits, rel=1e-6, abs=8)
