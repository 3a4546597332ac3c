"""The simulation agrees with every closed form that there is."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from skerry.algorithm.traffic import data_parallel_bytes
from skerry_tools.plan import account, closed
from skerry_tools.plan.closed import Clock
from skerry_tools.plan.laws import Law, Shape
from skerry_tools.plan.process import Absence, Island, Timeline, Upscale, Use, walk

SLICES = 1000
LAWS = st.sampled_from([
    Law(1.0), Law(1.0, Shape.EXPONENTIAL), Law(1.0, Shape.LOG_NORMAL, 0.5),
    Law(1.0, Shape.EXPONENTIATED_WEIBULL, 1.5, 2.0),
])  # fmt: skip
LOADS = st.floats(0.05, 2.0)
"""Failures per mean pause: from 5 % of the time lost to most of it."""


def chance(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def failing(load: float, **more: object) -> Island:
    """An island of many slices with one failure per 100 s while all run, and pauses of 100 load."""
    island = Island(SLICES, 0.01 / SLICES, Law(100.0 * load), elastic=False)
    return replace(island, **more)


def walked(island: Island, failures: float, seed: int = 0) -> Timeline:
    return walk(island, failures * 100.0, chance(seed))


def near(found: float, expected: float, failures: float) -> None:
    """Within five standard errors of a share s estimated from so many cycles.

    One is s (1 - s) sqrt(2 / n) where runs and pauses vary as much as their means: at most a
    quarter of sqrt(2 / n).
    """
    assert found == pytest.approx(expected, abs=5.0 * 0.25 * math.sqrt(2.0 / failures))


@settings(max_examples=15)
@given(LOADS, LAWS, st.sampled_from(Clock), st.integers(0, 2**32))
def test_halting_matches_its_closed_form_for_every_law_and_clock(
    load: float, law: Law, clock: Clock, seed: int
) -> None:
    recovery = replace(law, mean_s=100.0 * load)
    timeline = walked(failing(load, recovery=recovery, clock=clock), 4000, seed)
    expected = closed.halting(0.01, 100.0 * load, clock)
    near(account.running_share(timeline), expected, 2000)
    assert account.goodput([timeline], [1])[0] == pytest.approx(
        account.running_share(timeline), abs=1e-9
    )


@settings(max_examples=15)
@given(
    st.floats(0.05, 1.0), st.floats(0.1, 1.5), st.floats(0.0, 0.3), st.sampled_from(Clock),
    st.integers(0, 2**32),
)  # fmt: skip
def test_rollback_matches_daly(
    load: float, every: float, cost: float, clock: Clock, seed: int
) -> None:
    island = failing(load, clock=clock, rollback=True)
    island = replace(island, checkpoint_every_s=100 * every, checkpoint_s=100 * cost)
    timeline = walked(island, 4000, seed)
    expected = closed.daly(0.01, 100 * load, 100 * every, 100 * cost, clock)
    near(account.goodput([timeline], [1])[0], expected, 1000)


@given(st.floats(1e-6, 1e-2), st.floats(0.1, 60.0))
def test_dalys_interval_is_best(rate_s: float, cost_s: float) -> None:
    best_s = closed.best_interval_s(rate_s, cost_s)
    if cost_s * rate_s > 0.1:
        return  # the expansion holds for writing that is short against failures
    best = closed.daly(rate_s, 60.0, best_s, cost_s, Clock.CALENDAR)
    for factor in (0.7, 1.4):
        assert closed.daly(rate_s, 60.0, best_s * factor, cost_s, Clock.CALENDAR) <= best


@settings(max_examples=10)
@given(st.floats(0.05, 1.0), st.integers(1, 6), st.integers(0, 2**32))
def test_uptime_of_independent_learners_is_binomial(load: float, learners: int, seed: int) -> None:
    island = failing(load)
    timelines = [walk(island, 3e5, chance(seed + n)) for n in range(learners)]
    at_once = account.running_at_once(timelines)
    running = float(np.mean([account.running_share(t) for t in timelines]))
    assert at_once.sum() == pytest.approx(1.0)
    for quorum, share in enumerate(account.uptime(at_once), start=1):
        near(share, closed.uptime(quorum, learners, running), 1500)


@settings(max_examples=8)
@given(st.integers(2, 8), st.sampled_from(Upscale), st.integers(0, 2**32))
def test_learners_are_as_good_as_one_of_their_size(
    learners: int, upscale: Upscale, seed: int
) -> None:
    one = Island(
        64, 0.005 / 64, Law(60.0), downscale_s=15.0, upscale_s=20.0, upscale=upscale, batch_s=120.0
    )
    many = [walk(one, 4e5, chance(seed + n)) for n in range(learners)]
    alone = walk(one, 4e5, chance(seed + 100))
    found = account.goodput(many, [10] * learners)[0]
    assert found == pytest.approx(account.goodput([alone], [10])[0], abs=0.03)


@settings(max_examples=15)
@example(load=1.71875, upscale=Upscale.EAGER, clock=Clock.RUNNING, seed=227)
@given(LOADS, st.sampled_from(Upscale), st.sampled_from(Clock), st.integers(0, 2**32))
def test_all_time_is_accounted_for(load: float, upscale: Upscale, clock: Clock, seed: int) -> None:
    for elastic in (True, False):
        island = failing(
            load, elastic=elastic, upscale=upscale, batch_s=50.0, clock=clock, downscale_s=5.0,
            upscale_s=7.0, rollback=True, checkpoint_every_s=40.0, checkpoint_s=3.0,
        )  # fmt: skip
        away = [Absence(500.0, 900.0), Absence(600.0, 700.0), Absence(2e4, 2.1e4, Use.PREEMPTED)]
        timeline = walk(island, 3e4, chance(seed), away)
        assert np.all(timeline.lengths >= 0)
        assert account.spent(timeline).sum() == pytest.approx(3e4)
        assert np.all(account.spent(timeline) >= -1e-6)
        assert account.spent(timeline)[Use.OUTAGE] <= 400.0 + 1e-6
        shares = account.split([timeline], [7])
        assert math.fsum(shares.values()) == pytest.approx(1.0)
        assert shares[Use.TRAIN] == pytest.approx(account.goodput([timeline], [7])[0])


def test_an_elastic_island_pauses_as_little_as_it_has_to() -> None:
    island = Island(SLICES, 0.01 / SLICES, Law(60.0), downscale_s=15.0, upscale_s=20.0)
    islands = {u: replace(island, upscale=u, batch_s=600.0) for u in Upscale}
    found = {u: account.goodput([walked(one, 3000)], [1])[0] for u, one in islands.items()}
    assert (
        1 / (1 + 0.01 * 35) - 0.01
        < found[Upscale.EAGER]
        < found[Upscale.BATCH]
        < 1 / (1 + 0.01 * 15)
    )


def test_the_calendar_costs_more_than_the_running_clock() -> None:
    running = Island(SLICES, 0.01 / SLICES, Law(60.0), downscale_s=15.0, upscale_s=20.0)
    calendar = replace(running, clock=Clock.CALENDAR)
    found = [account.goodput([walked(island, 3000)], [1])[0] for island in (running, calendar)]
    assert found[0] > found[1]


def test_the_same_seed_gives_the_same_walk() -> None:
    island = failing(0.5, recovery=Law(50.0, Shape.LOG_NORMAL, 0.5))
    one, same, other = (walked(island, 500, seed) for seed in (1, 1, 2))
    assert one.times.tobytes() == same.times.tobytes()
    assert one.times.tobytes() != other.times.tobytes()


@given(LAWS, st.floats(1.0, 1e4))
def test_a_law_has_its_mean(law: Law, mean_s: float) -> None:
    drawn = replace(law, mean_s=mean_s).draw(chance(1), 20_000)
    assert float(drawn.mean()) == pytest.approx(mean_s, rel=0.05)
    assert np.all(np.isfinite(drawn))
    assert np.all(drawn >= 0)


@given(st.integers(2, 64), st.integers(1, 10**9), st.integers(1, 1000))
def test_the_ring_is_the_one_that_runs_are_held_to(learners: int, params: int, steps: int) -> None:
    counted = data_parallel_bytes(params, {"all": steps}, learners)
    bits = closed.ring_bits(32.0, params, learners) * steps
    assert counted * 8 == pytest.approx(bits, rel=1e-6, abs=8)
