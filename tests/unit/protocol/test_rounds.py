"""When a round closes, and why; and that the syncer can sleep until it might."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.protocol.messages import CloseReason
from skerry.protocol.rounds import (
    WITHOUT_QUORUM,
    Decision,
    OpenReason,
    RoundPolicy,
    RoundView,
    Timings,
    decide,
    ema,
    grace_s,
    measured,
    measured_arrivals,
    measured_behind,
    most_grace_s,
    next_wake_s,
    patience_s,
    quorum_at_s,
    short_since_s,
)

quick = settings(max_examples=150)
POLICY = RoundPolicy(
    quorum=2, grace_gamma=0.5, overlap_steps=1, room_steps=4.0, round_timeout_s=60.0
)
TIMINGS = Timings(1.0, 0.4, 1.0, 0.3, 0.2)  # grace: 0.3 + 4 * 0.2 s; at most 0.5 * (4 - 1.4) s
ALL = frozenset("abc")

times = st.floats(0, 100, allow_nan=False)
policies = st.builds(
    RoundPolicy,
    st.integers(1, 4),
    st.floats(0, 0.99),
    st.integers(0, 5),
    st.floats(1, 9),
    st.floats(0.1, 50),
)
measurements = st.none() | st.floats(0.001, 10)
timings_ = st.builds(
    Timings, measurements, measurements, measurements, measurements, st.floats(0, 10)
)
views = st.builds(
    RoundView,
    opened_s=times,
    arrived=st.dictionaries(st.sampled_from("abcd"), times),
    expected=st.frozensets(st.sampled_from("abcd")),
    short_since_s=st.none() | times,
    final=st.booleans(),
)


def view(
    arrived: dict[str, float],
    expected: frozenset[str] = ALL,
    short_since_s: float | None = None,
    *,
    final: bool = False,
) -> RoundView:
    return RoundView(0.0, arrived, expected, short_since_s, final)


A, AB, ABC = {"a": 0.5}, {"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5, "c": 0.6}
CASES = {
    "nobody yet": (1.0, view({}), OpenReason.QUORUM),
    "below quorum": (1.0, view(A), OpenReason.QUORUM),
    "quorum, in grace": (1.59, view(AB), OpenReason.GRACE),
    "quorum, grace over": (1.61, view(AB), CloseReason.GRACE_OVER),
    "everyone": (0.6, view(ABC), CloseReason.ALL_ARRIVED),
    "everyone alive": (0.6, view(AB, frozenset("ab")), CloseReason.ALL_ARRIVED),
    "one that died since": (0.6, view(AB, frozenset("a")), CloseReason.ALL_ARRIVED),
    "too few alive": (59.0, view(A, frozenset("a"), 0.0), OpenReason.QUORUM),
    "too few for long": (1.0, view(A, frozenset("a"), -60.0), CloseReason.SHORT_HANDED),
    "too few, not all in": (1.0, view(A, frozenset("ab"), -60.0), OpenReason.QUORUM),
    "timeout with one": (60.0, view(A), CloseReason.TIMEOUT),
    "timeout with none": (60.0, view({}), OpenReason.NOBODY_CAME),
    "final waits for all": (30.0, view(AB, final=True), OpenReason.FINAL),
    "final with all": (1.0, view(ABC, final=True), CloseReason.ALL_ARRIVED),
    "final, one": (1.0, view(A, frozenset("a"), final=True), CloseReason.SHORT_HANDED),
    "final timeout": (60.0, view(A, final=True), CloseReason.TIMEOUT),
    "final with none": (60.0, view({}, final=True), CloseReason.FINAL_EMPTY),
}


@pytest.mark.parametrize(("now", "seen", "reason"), CASES.values(), ids=CASES.keys())
def test_decisions(now: float, seen: RoundView, reason: CloseReason | OpenReason) -> None:
    decision = Decision.CLOSE if isinstance(reason, CloseReason) else Decision.WAIT
    decision = Decision.REOPEN if reason is OpenReason.NOBODY_CAME else decision
    assert decide(now, seen, POLICY, TIMINGS) == (decision, reason)


@quick
@given(st.floats(0, 200), views, policies, timings_)
def test_a_round_that_never_had_its_quorum_is_known_by_its_reason(
    now: float, seen: RoundView, policy: RoundPolicy, timings: Timings
) -> None:
    decision, reason = decide(now, seen, policy, timings)
    if decision is Decision.CLOSE and quorum_at_s(seen, policy.quorum) is None:
        assert reason in WITHOUT_QUORUM


@pytest.mark.parametrize(
    ("policy", "timings", "grace"),
    [
        (POLICY, TIMINGS, 1.1),
        (POLICY, replace(TIMINGS, behind_off_s=2.0), 0.5 * (4 - 1.4)),
        (POLICY, Timings(step_s=1.0, quorum_s=40.0, sync_s=1.0), 1.0),
        (RoundPolicy(1, 0.9, 0, 8, 60.0), Timings(1.0, 0.0, 0.0), 0.0),
        (RoundPolicy(1, 0.0, 2, 8, 60.0), Timings(1.0, 0.0, 0.0), 0.0),
        (POLICY, Timings(), 0.0),
    ],
    ids=["what others take", "share of the room", "a step", "learners stop", "off", "unmeasured"],
)
def test_grace(policy: RoundPolicy, timings: Timings, grace: float) -> None:
    assert grace_s(policy, timings) == pytest.approx(grace)


@quick
@given(policy=policies, timings=timings_)
def test_grace_is_a_step_or_what_others_take_as_far_as_that_holds_up_nobody(
    policy: RoundPolicy, timings: Timings
) -> None:
    grace, step = grace_s(policy, timings), timings.step_s or 0.0
    spent = (timings.quorum_s or 0.0) + (timings.sync_s or 0.0)
    assert 0.0 <= grace <= min(patience_s(timings), policy.round_timeout_s)
    assert grace <= max(step, policy.room_steps * step - spent)


def test_until_somebody_has_come_after_the_quorum_a_step_is_waited_for() -> None:
    assert patience_s(Timings(step_s=0.5)) == 0.5
    assert patience_s(measured_behind(Timings(step_s=0.5), 0.2, 0.01, POLICY)) == 0.5
    assert patience_s(measured_behind(Timings(step_s=0.5), 0.2, 0.4, POLICY)) == pytest.approx(1.2)


def test_what_others_take_is_their_average_and_four_times_what_they_are_off_it() -> None:
    timings = Timings(step_s=1.0, behind_s=0.2, behind_off_s=0.1)
    after = measured_behind(timings, 0.5, 0.4, POLICY)
    assert (after.behind_s, after.behind_off_s) == pytest.approx((0.3, 0.15))
    assert patience_s(after) == pytest.approx(1.0)
    assert patience_s(replace(after, behind_s=0.9)) == pytest.approx(1.5)


def test_those_who_come_steadily_late_are_waited_for_in_the_end_and_no_longer() -> None:
    timings = Timings(step_s=1.0)
    for _ in range(100):
        timings = measured_behind(timings, 0.2, 1.5, POLICY)
    assert patience_s(timings) == pytest.approx(1.5)


@quick
@given(policy=policies, timings=timings_, behind_s=st.floats(0, 1e6))
def test_one_that_cannot_be_waited_for_makes_nobody_wait(
    policy: RoundPolicy, timings: Timings, behind_s: float
) -> None:
    after = measured_behind(timings, 0.2, behind_s, policy)
    assert patience_s(after) <= patience_s(timings) or behind_s <= most_grace_s(policy, timings)


def test_only_who_comes_behind_the_quorum_is_measured() -> None:
    timings = Timings(step_s=1.0)
    assert measured_arrivals(timings, 0.2, [5.0], POLICY) == timings
    assert measured_arrivals(timings, 0.2, [5.0, 5.0], POLICY) == timings
    behind = measured_behind(timings, 0.2, 0.5, POLICY)
    assert measured_arrivals(timings, 0.2, [5.5, 5.0, 5.0], POLICY) == behind


def test_who_was_in_time_once_is_not_waited_for_for_ever() -> None:
    timings = replace(TIMINGS, behind_s=1.2, behind_off_s=0.0)
    assert grace_s(POLICY, timings) == pytest.approx(1.2)
    for _ in range(20):
        timings = measured_behind(timings, 0.2, 1.5, POLICY)
    assert grace_s(POLICY, timings) == 1.0


@quick
@given(seen=views, policy=policies, timings=timings_, now=times, later=times)
def test_a_round_that_closed_stays_closed_as_time_passes(
    seen: RoundView, policy: RoundPolicy, timings: Timings, now: float, later: float
) -> None:
    first, _ = decide(min(now, later), seen, policy, timings)
    second, _ = decide(max(now, later), seen, policy, timings)
    assert first is not Decision.CLOSE or second is Decision.CLOSE


@quick
@given(seen=views, policy=policies, timings=timings_, now=times)
def test_only_an_empty_final_round_closes_without_a_contribution(
    seen: RoundView, policy: RoundPolicy, timings: Timings, now: float
) -> None:
    decision, reason = decide(now, seen, policy, timings)
    if decision is Decision.CLOSE and not seen.arrived:
        assert (seen.final, reason) == (True, CloseReason.FINAL_EMPTY)


@quick
@given(seen=views, policy=policies, timings=timings_)
def test_no_round_waits_for_ever(seen: RoundView, policy: RoundPolicy, timings: Timings) -> None:
    end = max([seen.opened_s, *seen.arrived.values()]) + policy.round_timeout_s + 11.0
    assert decide(end, seen, policy, timings)[0] is not Decision.WAIT


@quick
@given(seen=views, policy=policies, timings=timings_, now=times, share=st.floats(0, 0.999))
def test_nothing_changes_before_the_next_wake_and_something_does_then(
    seen: RoundView, policy: RoundPolicy, timings: Timings, now: float, share: float
) -> None:
    before = decide(now, seen, policy, timings)
    wake_s = next_wake_s(now, seen, policy, timings)
    if before[0] is Decision.WAIT:
        assert wake_s > 0
        assert decide(now + share * wake_s, seen, policy, timings) == before
        assert decide(now + wake_s + 1e-6, seen, policy, timings)[0] is not Decision.WAIT
    else:
        assert wake_s == 0


def test_the_quorum_is_reached_at_the_kth_arrival() -> None:
    seen = view({"a": 5.0, "b": 1.0, "c": 3.0})
    assert [quorum_at_s(seen, k) for k in (1, 2, 3, 4)] == [1.0, 3.0, 5.0, None]


@quick
@given(old=st.floats(0, 1e6), new=st.floats(0, 1e6), factor=st.floats(0, 1))
def test_an_average_lies_between_old_and_new(old: float, new: float, factor: float) -> None:
    low, high = min(old, new), max(old, new)
    assert low - 1e-6 <= ema(old, new, factor) <= high + 1e-6


def test_the_first_measurement_is_taken_as_it_is() -> None:
    assert measured(Timings(), 0.1, step_s=2.0, sync_s=0.5) == Timings(2.0, None, 0.5)
    assert measured(Timings(1.0, 1.0, 1.0), 0.5, quorum_s=3.0) == Timings(1.0, 2.0, 1.0)


def test_hands_are_short_since_the_first_time_that_too_few_were_alive() -> None:
    since = short_since_s(5.0, None, 1, POLICY)
    assert since == 5.0
    assert short_since_s(9.0, since, 0, POLICY) == 5.0
    assert short_since_s(9.0, since, 2, POLICY) is None
    assert short_since_s(5.0, None, 0, POLICY) is None, "nobody has worked yet"
