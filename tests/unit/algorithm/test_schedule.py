"""Fragments take turns, each once per H steps, never faster than the launch floor."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.schedule import (
    FragmentDue,
    Launch,
    LaunchReason,
    LaunchState,
    Schedule,
    due_step,
    extrapolated_step,
    global_clock,
    latest_due_step,
    launch_floor_s,
    max_in_flight,
    offset,
    room_steps,
)

quick = settings(max_examples=80)
schedules = st.builds(Schedule, st.integers(1, 48), st.integers(1, 100), st.integers(0, 8))


def next_round(*state: Any) -> tuple[Launch | None, LaunchReason]:
    return LaunchState(*state).next_round()


def next_launch_s(*state: Any) -> float | None:
    return LaunchState(*state).next_launch_s()


def idle(fragment: int, last_due_step: int = 0, version: int = 1) -> FragmentDue:
    return FragmentDue(fragment, version, last_due_step, in_flight=False)


def flying(fragment: int, last_due_step: int = 0, version: int = 1) -> FragmentDue:
    return FragmentDue(fragment, version, last_due_step, in_flight=True)


@quick
@given(schedule=schedules, after=st.integers(0, 1000), data=st.data())
def test_the_next_due_step_is_within_a_period_and_on_the_offset(
    schedule: Schedule, after: int, data: st.DataObject
) -> None:
    fragment = data.draw(st.integers(0, schedule.fragments - 1))
    due = due_step(schedule, fragment, after)
    assert after < due <= after + schedule.h_steps
    assert due % schedule.h_steps == offset(schedule, fragment)


@quick
@given(schedule=schedules, start=st.integers(0, 500))
def test_each_fragment_is_due_once_in_any_h_steps(schedule: Schedule, start: int) -> None:
    for fragment in range(schedule.fragments):
        due = due_step(schedule, fragment, start)
        assert due_step(schedule, fragment, due) == due + schedule.h_steps
        assert latest_due_step(schedule, fragment, due) == due


@quick
@given(schedule=schedules)
def test_offsets_are_spread_evenly(schedule: Schedule) -> None:
    offsets = [offset(schedule, p) for p in range(schedule.fragments)] + [schedule.h_steps]
    gaps = {b - a for a, b in pairwise(offsets)}
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("steps", "quorum", "clock"),
    [
        ([30, 10, 20], 1, 30),
        ([30, 10, 20], 2, 20),
        ([30, 10, 20], 3, 10),
        ([30, 10], 5, 10),
        ([30.9, 10.5], 2, 10),
        ([], 2, 0),
    ],
)
def test_the_clock_follows_the_kth_fastest_learner(
    steps: list[float], quorum: int, clock: int
) -> None:
    assert global_clock(steps, quorum) == clock


@quick
@given(steps=st.lists(st.integers(0, 1000), min_size=1), quorum=st.integers(1, 10))
def test_a_quorum_has_reached_the_clock(steps: list[int], quorum: int) -> None:
    clock = global_clock(steps, quorum)
    assert sum(step >= clock for step in steps) >= min(quorum, len(steps))


@pytest.mark.parametrize(
    ("age_s", "step_time_s", "limit", "expected"),
    [(1.1, 0.25, 9, 14), (1.0, 0.25, 2, 12), (1.0, 0.0, 9, 10), (-1.0, 0.25, 9, 10)],
    ids=["advances", "limited", "unmeasured", "clock went back"],
)
def test_extrapolation(age_s: float, step_time_s: float, limit: int, expected: int) -> None:
    assert extrapolated_step(10, age_s, step_time_s, limit) == expected


def test_the_launch_floor_spreads_a_period_over_the_fragments() -> None:
    assert launch_floor_s(Schedule(8, 24, 2), 0.5) == 1.5


def test_learners_that_stop_for_each_round_need_no_floor() -> None:
    schedule, states = Schedule(1, 1, 0), [idle(0, 7)]
    assert launch_floor_s(schedule, 0.5) == 0
    assert next_round(schedule, 8, 10.0, 10.0, 0.5, states, 1)[1] == "due"
    assert next_launch_s(schedule, 8, 10.0, 10.0, 0.5, states, 1) == 0


def test_time_alone_brings_no_learner_to_where_it_stops() -> None:
    schedule, states = Schedule(1, 24, 0), [idle(0)]
    assert next_launch_s(schedule, 23, 10.0, None, 0.5, states, 1) is None
    assert next_launch_s(Schedule(1, 24, 1), 23, 10.0, None, 0.5, states, 1) == 0.5


@pytest.mark.parametrize(
    ("schedule", "room"),
    [
        (Schedule(24, 24, 2), 3),
        (Schedule(8, 24, 2), 2),
        (Schedule(1, 24, 0), 1),
        (Schedule(1, 1, 0), 1),
        (Schedule(8, 1, 0), 8),
        (Schedule(4, 2, 1), 4),
    ],
)
def test_rounds_in_flight(schedule: Schedule, room: int) -> None:
    assert max_in_flight(schedule) == room


@pytest.mark.parametrize(
    ("fragments", "own", "steps"),
    [(8, 8, 6.0), (8, 4, 12.0), (8, 2, 24.0), (8, 1, 24.0), (64, 64, 3.375)],
)
def test_a_round_may_live_until_as_many_as_may_be_open_are_due(
    fragments: int, own: int, steps: float
) -> None:
    assert room_steps(Schedule(fragments, 24, 2, own=own)) == pytest.approx(steps)


def test_the_most_overdue_fragment_goes_first_and_is_opened_once() -> None:
    states = [idle(0, 8), idle(1, 2), idle(2, 0), idle(3, 6)]
    first, reason = next_round(Schedule(4, 8, 2), 11, 0.0, None, 0.1, states, 2)
    assert (first and first.fragment, reason) == (2, "due")
    schedule = Schedule(1, 10, 2)
    launch, _ = next_round(schedule, 57, 0.0, None, 0.1, [idle(0)], 1)
    assert launch is not None
    assert (launch.version, launch.due_step) == (2, 50)
    after = [idle(0, launch.due_step, launch.version)]
    assert next_round(schedule, 57, 1e9, 0.0, 0.1, after, 1) == (None, "not_due")


def test_nothing_is_launched_below_the_floor() -> None:
    schedule, states = Schedule(4, 8, 2), [idle(p) for p in range(4)]
    assert next_round(schedule, 8, 10.1, 10.0, 0.1, states, 2) == (None, "launch_floor")
    assert next_round(schedule, 8, 10.21, 10.0, 0.1, states, 2)[1] == "due"


@quick
@given(
    schedule=schedules,
    clock=st.integers(0, 300),
    since_s=st.floats(0, 5),
    step_time_s=st.floats(0.01, 2),
    data=st.data(),
)
def test_waking_in_time_finds_a_launch(
    schedule: Schedule, clock: int, since_s: float, step_time_s: float, data: st.DataObject
) -> None:
    flags = data.draw(
        st.lists(st.booleans(), min_size=schedule.fragments, max_size=schedule.fragments)
    )
    states = [FragmentDue(p, 1, 0, in_flight=flag) for p, flag in enumerate(flags)]
    room = max_in_flight(schedule)
    wait_s = next_launch_s(schedule, clock, since_s, 0.0, step_time_s, states, room)
    if wait_s is None:
        in_the_air = sum(flags) >= room or all(flags)
        assert in_the_air or next_round(schedule, clock, since_s, 0.0, step_time_s, states, room)[
            1
        ] == ("not_due" if schedule.blocking else None)
        return
    later, step = since_s + wait_s + 1e-6, clock + round(wait_s / step_time_s + 1e-6)
    assert next_round(schedule, step, later, 0.0, step_time_s, states, room)[1] == "due"
    if wait_s > 0:
        assert next_round(schedule, clock, since_s, 0.0, step_time_s, states, room)[0] is None


@quick
@given(schedule=schedules, step_time_s=st.floats(0.01, 1))
def test_a_run_opens_each_fragment_about_once_per_period(
    schedule: Schedule, step_time_s: float
) -> None:
    """Played over ten periods with instant rounds: at most one launch per floor, all fragments."""
    states = {p: idle(p) for p in range(schedule.fragments)}
    last: float | None = None
    launches = [0] * schedule.fragments
    for step in range(10 * schedule.h_steps + 1):
        for sub in range(-(-schedule.fragments // schedule.h_steps)):
            now_s = (step + sub * schedule.h_steps / schedule.fragments) * step_time_s + 1e-7 * step
            launch, _ = next_round(
                schedule, step, now_s, last, step_time_s, list(states.values()), schedule.fragments
            )
            if launch is not None:
                assert last is None or now_s - last >= launch_floor_s(schedule, step_time_s) - 1e-9
                launches[launch.fragment] += 1
                states[launch.fragment] = idle(launch.fragment, launch.due_step, launch.version)
                last = now_s
    assert max(launches) <= 10
    assert min(launches) >= 4


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_floors_of_all_parts_together_allow_as_many_launches_as_one(shards: int) -> None:
    parts = [len(range(shard, 8, shards)) for shard in range(shards)]
    rates = [1 / launch_floor_s(Schedule(8, 24, 2, own=part), 0.5) for part in parts]
    assert sum(rates) == pytest.approx(1 / launch_floor_s(Schedule(8, 24, 2), 0.5))
