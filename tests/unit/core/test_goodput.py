"""Goodput counts what was allocated, down time included."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.core.goodput import Share, allocated_s, goodput

shares = st.lists(st.builds(Share, st.floats(0, 1e6), st.floats(0, 1e6)), max_size=6)


def test_it_is_busy_over_allocated_time_summed_over_learners() -> None:
    assert goodput([Share(90, 100), Share(30, 200)]) == pytest.approx(0.4)


def test_a_learner_that_is_down_lowers_it() -> None:
    down = Share(50, allocated_s(joined_s=0, now_s=100))
    assert goodput([down]) == 0.5


def test_time_after_the_end_is_not_allocated() -> None:
    assert allocated_s(joined_s=10, now_s=500, ended_s=60) == 50


def test_it_is_zero_before_any_time_has_passed() -> None:
    assert goodput([]) == goodput([Share(0, 0)]) == 0.0


def test_a_clock_that_runs_ahead_cannot_lift_the_others() -> None:
    assert goodput([Share(300, 100), Share(0, 100)]) == 0.5


@settings(max_examples=100)
@given(learners=shares)
def test_it_lies_between_none_and_all(learners: list[Share]) -> None:
    assert 0.0 <= goodput(learners) <= 1.0
