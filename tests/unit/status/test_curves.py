"""Curves: bounded, and the sums stay right however coarse they become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.status.commit_totals import Bin, BinnedCurve, Curves


def one(tokens: float, loss: float = 2.0, step: int = 1) -> Bin:
    return Bin(step=step, tokens=tokens, loss_sum=loss * tokens, weight=tokens, rounds=1)


def test_a_bin_holds_the_mean_loss_by_tokens() -> None:
    curve = BinnedCurve(10.0, 8)
    curve.add(3.0, one(100, loss=1.0))
    curve.add(7.0, one(300, loss=3.0))
    (held,) = curve.bins.values()
    assert (held.loss, held.tokens, held.rounds) == (2.5, 400, 2)


def test_what_merged_nothing_has_no_loss() -> None:
    assert Bin(rounds=1).loss is None


def test_a_rolling_curve_forgets_what_is_older_than_its_reach() -> None:
    curve = BinnedCurve(1.0, 3, rolling=True)
    for at_s in range(10):
        curve.add(float(at_s), one(1))
    assert sorted(curve.bins) == [7, 8, 9]


def test_a_rolling_curve_stays_bounded_under_a_clock_that_is_set_back() -> None:
    curve = BinnedCurve(1.0, 3, rolling=True)
    for at_s in (100, 101, 102, 5, 6, 7):
        curve.add(float(at_s), one(1))
        assert len(curve.bins) <= 3


@given(st.lists(st.floats(0, 2e6), min_size=1, max_size=60))
def test_a_whole_curve_keeps_every_token_in_bounded_room(times: list[float]) -> None:
    curve = BinnedCurve(1.0, 16)
    for at_s in times:
        curve.add(at_s, one(5))
    assert len(curve.bins) <= 16
    assert sum(held.tokens for held in curve.bins.values()) == pytest.approx(5 * len(times))
    assert sum(held.rounds for held in curve.bins.values()) == len(times)


def test_the_total_grows_from_bin_to_bin() -> None:
    curves = Curves()
    for at_s in range(0, 100, 10):
        curves.add(float(at_s), one(7))
    totals = [curves.run.bins[number].total for number in sorted(curves.run.bins)]
    assert totals == [7.0 * n for n in range(1, 11)]
