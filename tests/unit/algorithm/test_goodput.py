"""Goodput counts what was allocated, down time included; badput says what the rest went into."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.goodput import (
    TRAIN,
    USES,
    Cause,
    Share,
    Spent,
    allocated_s,
    goodput,
    ratios,
    split,
)

spents = st.builds(Spent, *[st.floats(0, 1e6)] * 6)
shares = st.lists(st.builds(Share, st.floats(0, 1e6), st.floats(0, 1e6)), max_size=6)


def test_it_is_busy_over_allocated_time_summed_over_learners() -> None:
    assert goodput([Share(90, 100), Share(30, 200)]) == pytest.approx(0.4)
    assert goodput([Share(50, allocated_s(joined_s=0, now_s=100))]) == 0.5
    assert goodput([Share(300, 100), Share(0, 100)]) == 0.5, "a clock that runs ahead lifts others"
    assert allocated_s(joined_s=10, now_s=500, ended_s=60) == 50
    assert goodput([]) == goodput([Share(0, 0)]) == 0.0
    assert ratios([]) == dict.fromkeys(USES, 0.0)


@settings(max_examples=100)
@given(learners=shares)
def test_it_lies_between_none_and_all(learners: list[Share]) -> None:
    assert 0.0 <= goodput(learners) <= 1.0


def test_what_a_learner_does_not_account_for_was_idle_and_what_it_was_not_there_for_down() -> None:
    spent = Spent(train_s=50, compile_s=10, recover_s=5, wait_s=3, replay_s=2, alive_s=80)
    told = split(spent, 100)
    assert told == {
        TRAIN: 50,
        Cause.COMPILE: 10,
        Cause.RECOVER: 5,
        Cause.WAIT: 3,
        Cause.REPLAY: 2,
        Cause.IDLE: 10,
        Cause.DOWN: 20,
    }
    assert tuple(told) == USES


def test_incarnations_add_up() -> None:
    assert Spent(1, 2, 3, 4, 5, 20) + Spent(1, 1, 1, 1, 1, 10) == Spent(2, 3, 4, 5, 6, 30)


def test_a_learner_that_counts_too_much_loses_its_idle_time_first_and_its_steps_last() -> None:
    told = split(Spent(train_s=90, compile_s=20, alive_s=130), 100)
    assert (told[TRAIN], told[Cause.COMPILE], told[Cause.IDLE]) == (90, 10, 0)


@settings(max_examples=200)
@given(learners=st.lists(st.tuples(spents, st.floats(0, 1e6)), min_size=1, max_size=5))
def test_goodput_and_badput_are_all_there_is(learners: list[tuple[Spent, float]]) -> None:
    told = ratios(split(spent, allocated) for spent, allocated in learners)
    if sum(allocated for _, allocated in learners):
        assert sum(told.values()) == pytest.approx(1.0)
    whole = goodput(Share(spent.train_s, allocated) for spent, allocated in learners)
    assert told[TRAIN] == pytest.approx(whole)
