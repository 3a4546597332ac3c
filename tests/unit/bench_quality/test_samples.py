"""Means, intervals and paired differences over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from bench.quality.samples import Estimate, at, estimate, excess, first_below, slope, student_t


@pytest.mark.parametrize("level", [0.5, 0.95, 0.995, 0.9995])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 17, 30, 99])
def test_quantiles_are_those_of_students_t(degrees: int, level: float) -> None:
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs] - it has none

    expected = stats.t.ppf((1 + level) / 2, degrees)
    assert student_t(degrees, level) == pytest.approx(expected, rel=1e-9)


def test_the_lowest_of_several_has_a_wider_interval() -> None:
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs] - it has none

    found = estimate([-1.0, -1.2, -0.9])
    assert found.half is not None
    assert found.among(1) == found
    half = found.among(10).half
    ratio = stats.t.ppf(1 - 0.05 / 10 / 2, 2) / stats.t.ppf(0.975, 2)
    assert half == pytest.approx(ratio * found.half)
    assert estimate([-1.0]).among(10) == Estimate(-1.0, None, 1)


def test_an_interval_holds_the_true_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    held = sum(
        found.low <= 1.0 <= found.high
        for found in (estimate(list(draw.normal(1.0, 0.3, 3))) for _ in range(4000))
    )
    assert held / 4000 == pytest.approx(0.95, abs=0.015)


def test_a_slope_has_the_interval_of_least_squares() -> None:
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs] - it has none

    points = [(17.0, 6.0), (17.0, 7.1), (18.0, 4.2), (18.0, 3.9), (20.0, 3.5)]
    x, y = np.array(points).T
    (wanted, _), spread = np.polyfit(x, y, 1, cov=True)
    found = slope(points)
    assert found is not None
    assert found.mean == pytest.approx(wanted)
    assert found.half == pytest.approx(stats.t.ppf(0.975, 3) * spread[0, 0] ** 0.5)
    assert slope(points[:2]) is None
    assert slope([(17.0, 1.0)] * 3) is None


def test_pairs_remove_what_seeds_differ_by() -> None:
    theirs = {0: 2.0, 1: 3.0, 2: 4.0}
    ours = {seed: 1.01 * loss for seed, loss in theirs.items()}
    found = excess(ours, theirs)
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert found.half == pytest.approx(0.0, abs=1e-9)


def test_only_seeds_that_both_have_are_pairs() -> None:
    found = excess({0: 2.2, 7: 9.0}, {0: 2.0, 1: 1.0})
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(10.0), 1)
    assert excess({0: 1.0}, {1: 1.0}) is None


def test_a_target_is_reached_between_two_points_or_never() -> None:
    xs, ys = [0.0, 1.0, 3.0], [4.0, 3.0, 1.0]
    assert first_below(xs, ys, 2.0) == pytest.approx(2.0)
    assert first_below(xs, ys, 4.0) == 0.0
    assert first_below(xs, ys, 0.5) is None


def test_heights_between_points_and_beyond_them() -> None:
    xs, ys = [0.0, 1.0, 3.0], [4.0, 3.0, 1.0]
    assert [at(xs, ys, x) for x in (-1.0, 0.5, 2.0, 9.0)] == [4.0, 3.5, 2.0, 1.0]
