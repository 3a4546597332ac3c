"""The simulation agrees with every closed form that there is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skerry_tools.plan.failures import LearnerTimeline, TimeUse, draw, walk
from skerry_tools.plan.goodput import FailingLearner
from skerry_tools.plan.simulation import uptime_of
from skerry_tools.plan.tables import PauseTable, RecoveryTable, SavingTable, ScenarioTables

SLICES = 1000
LAWS = st.sampled_from([
    RecoveryTable(law="deterministic"), RecoveryTable(law="exponential"),
    RecoveryTable(law="log-normal", spread=0.5),
])  # fmt: skip
LOADS = st.floats(0.05, 2.0)
"""Failures per mean pause: from 5 % of the time lost to most of it."""
SEEDS = st.integers(0, 2**32)


def chance(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def failing(
    load: float, *, elastic: bool = False, recovery: RecoveryTable | None = None,
    saving: SavingTable | None = None, **pauses: float,
) -> FailingLearner:  # fmt: skip
    """A learner of many slices with one failure per 100 s while all run, and pauses of 100 load."""
    recovery = recovery or RecoveryTable(law="deterministic")
    recovery = recovery.model_copy(update={"mean_s": 100.0 * load})
    table = PauseTable(**{"downscale_s": 0.0, "upscale_s": 0.0, **pauses})
    saving = saving or SavingTable()
    tables = ScenarioTables(recovery=recovery, pauses=table, checkpoints=saving)
    return FailingLearner(SLICES, 0.01 / SLICES, elastic, tables)


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
@given(LOADS, LAWS, SEEDS)
def test_halting_matches_its_closed_form_for_every_law(
    load: float, law: RecoveryTable, seed: int
) -> None:
    timeline = walked(failing(load, recovery=law), 4000, seed)
    near(timeline.running_share, 1 / (1 + load), 2000)
    assert trained(timeline) == pytest.approx(timeline.running_share, abs=1e-9)


@settings(max_examples=6)
@given(st.floats(0.05, 1.0), st.floats(0.1, 1.5), st.floats(0.0, 0.3), SEEDS)
def test_rollback_matches_daly(load: float, every: float, cost: float, seed: int) -> None:
    """J. T. Daly, Future Generation Computer Systems 22 (2006), eq. 13, where no pause fails.

    A segment of work and writing must pass without a failure, or it is done again.
    """
    saving = SavingTable(every=100 * every, cost_s=100 * cost, rollback=True)
    expected = every / (math.expm1(every + cost) * (1.0 + load))
    near(trained(walked(failing(load, saving=saving), 4000, seed)), expected, 1000)


@settings(max_examples=10)
@given(st.floats(0.05, 1.0), st.integers(1, 6), SEEDS)
def test_uptime_of_independent_learners_is_binomial(load: float, learners: int, seed: int) -> None:
    timelines = [walked(failing(load), 3000, seed + n) for n in range(learners)]
    p = float(np.mean([one.running_share for one in timelines]))
    each = [math.comb(learners, k) * p**k * (1 - p) ** (learners - k) for k in range(learners + 1)]
    for quorum, share in enumerate(uptime_of(timelines), start=1):
        near(share, math.fsum(each[quorum:]), 1500)


@settings(max_examples=15)
@example(load=1.71875, batch_s=0.0, seed=227)
@given(LOADS, st.sampled_from([0.0, 50.0]), SEEDS)
def test_all_time_is_accounted_for(load: float, batch_s: float, seed: int) -> None:
    saving = SavingTable(every=40.0, cost_s=3.0, rollback=True)
    away = [(500.0, 900.0), (600.0, 700.0), (2e4, 2.1e4)]
    for elastic in (True, False):
        learner = failing(
            load, elastic=elastic, saving=saving, batch_s=batch_s, downscale_s=5.0, upscale_s=7.0
        )
        timeline = walk(learner, 3e4, chance(seed), away)
        assert np.all(timeline.lengths >= 0)
        assert timeline.spent().sum() == pytest.approx(3e4)
        assert np.all(timeline.spent() >= -1e-6)
        assert timeline.spent()[TimeUse.OUTAGE] <= 1400.0 + 1e-6


def test_an_elastic_island_pauses_as_little_as_it_has_to() -> None:
    at_once, batch = (
        trained(walked(failing(0.6, elastic=True, downscale_s=15, upscale_s=20, batch_s=s), 3000))
        for s in (0.0, 600.0)
    )
    assert 1 / (1 + 0.01 * 35) - 0.01 < at_once < batch < 1 / (1 + 0.01 * 15)


@given(LAWS, st.floats(1.0, 1e4))
def test_a_law_has_its_mean(law: RecoveryTable, mean_s: float) -> None:
    drawn = draw(law.model_copy(update={"mean_s": mean_s}), chance(1), 20_000)
    assert float(drawn.mean()) == pytest.approx(mean_s, rel=0.05)
    assert np.all(np.isfinite(drawn))
    assert np.all(drawn >= 0)
