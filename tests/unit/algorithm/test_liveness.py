"""Silence is judged by each learner's own rhythm; stalled training is not hidden by pulses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.liveness import (
    Activity,
    Heartbeat,
    Liveness,
    LivenessPolicy,
    StepProgress,
    advance,
    first_heartbeat,
    judge,
    observe,
    phi,
)

quick = settings(max_examples=100)
POLICY = LivenessPolicy(pulse_s=0.5, suspect_phi=3.0, gone_phi=8.0)


def rhythm(intervals: list[float], policy: LivenessPolicy = POLICY) -> Heartbeat:
    heartbeat = first_heartbeat(0.0, policy)
    for interval in intervals:
        heartbeat = observe(heartbeat, heartbeat.last_s + interval)
    return heartbeat


def gone_after_s(heartbeat: Heartbeat) -> float:
    """Bisect for the silence after which this learner is gone."""
    low, high = 0.0, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        gone = judge(heartbeat, heartbeat.last_s + middle, POLICY)[0] is Liveness.GONE
        low, high = (low, middle) if gone else (middle, high)
    return high


@pytest.mark.parametrize(
    ("silence_s", "verdict"),
    [
        (0.0, (Liveness.ALIVE, "pulsing")),
        (1.0, (Liveness.ALIVE, "pulsing")),
        (2.5, (Liveness.SUSPECT, "silent")),
        (4.0, (Liveness.GONE, "silent")),
    ],
)
def test_silence_makes_suspect_and_then_gone(
    silence_s: float, verdict: tuple[Liveness, str]
) -> None:
    heartbeat = rhythm([0.5] * 20)
    assert judge(heartbeat, heartbeat.last_s + silence_s, POLICY) == verdict


def test_the_first_pulse_already_has_the_rhythm_it_was_told() -> None:
    assert gone_after_s(first_heartbeat(0.0, POLICY)) == pytest.approx(0.5 * 6.6, rel=0.02)


def test_patience_follows_the_measured_rhythm() -> None:
    assert gone_after_s(rhythm([5.0] * 50)) > 5 * gone_after_s(rhythm([0.5] * 50))


def test_an_irregular_learner_is_given_more_time() -> None:
    regular, irregular = rhythm([2.0] * 100), rhythm([0.2, 0.2, 0.2, 0.2, 9.2] * 20)
    assert gone_after_s(irregular) > 1.2 * gone_after_s(regular)


def test_one_outage_does_not_teach_patience() -> None:
    before = rhythm([0.5] * 200)
    after = observe(before, before.last_s + 3600.0)
    assert gone_after_s(after) < 1.5 * gone_after_s(before)


def test_a_step_that_has_become_long_is_not_silence() -> None:
    heartbeat = rhythm([0.5] * 50)
    progress = StepProgress(10, heartbeat.last_s, step_time_s=30.0)
    now_s = heartbeat.last_s + 60.0
    assert judge(heartbeat, now_s, POLICY)[0] is Liveness.GONE
    assert judge(heartbeat, now_s, POLICY, progress=progress)[0] is Liveness.ALIVE


@quick
@given(
    intervals=st.lists(st.floats(0.0, 100.0), max_size=30),
    silences=st.tuples(st.floats(0, 1e5), st.floats(0, 1e5)),
)
def test_suspicion_only_grows_with_silence(
    intervals: list[float], silences: tuple[float, float]
) -> None:
    heartbeat = rhythm(intervals)
    short, long = (phi(heartbeat, heartbeat.last_s + s, 0.5) for s in sorted(silences))
    assert 0.0 <= short <= long < float("inf")


@pytest.mark.parametrize(("z", "expected"), [(3.0902, 3.0), (5.6120, 8.0)])
def test_phi_is_the_exponent_of_the_normal_tail(z: float, expected: float) -> None:
    heartbeat = Heartbeat(last_s=0.0, mean_s=1.0, variance=4.0, count=100)
    assert phi(heartbeat, 1.0 + 2.0 * z, 0.0) == pytest.approx(expected, abs=1e-3)


@quick
@given(intervals=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=60))
def test_the_mean_stays_within_what_was_seen(intervals: list[float]) -> None:
    heartbeat = rhythm(intervals)
    assert min(0.5, *intervals) - 1e-9 <= heartbeat.mean_s <= max(0.5, *intervals) + 1e-9
    assert heartbeat.variance >= 0


STUCK = StepProgress(step=7, advanced_s=0.0, step_time_s=0.1)


@pytest.mark.parametrize(
    ("stuck_s", "verdict"),
    [
        (3.0, (Liveness.ALIVE, "pulsing")),
        (4.0, (Liveness.SUSPECT, "stalled")),
        (10.0, (Liveness.GONE, "stalled")),
    ],
)
def test_pulses_do_not_hide_a_dead_trainer(stuck_s: float, verdict: tuple[Liveness, str]) -> None:
    heartbeat = Heartbeat(stuck_s, 0.5, 0.0, 20)
    verdict_now = judge(heartbeat, stuck_s, POLICY, activity=Activity.TRAINING, progress=STUCK)
    assert verdict_now == verdict


@pytest.mark.parametrize("activity", [Activity.WAITING, Activity.FINISHED])
def test_only_training_must_advance(activity: Activity) -> None:
    heartbeat = Heartbeat(1000.0, 0.5, 0.0, 20)
    assert judge(heartbeat, 1000.0, POLICY, activity=activity, progress=STUCK)[0] is Liveness.ALIVE


def test_one_that_stops_for_the_others_must_pulse_and_not_step() -> None:
    blocking = LivenessPolicy(pulse_s=0.5, suspect_phi=3.0, gone_phi=8.0, blocking=True)
    held = Heartbeat(1000.0, 0.5, 0.0, 20)
    verdict = judge(held, 1000.0, blocking, activity=Activity.TRAINING, progress=STUCK)
    assert verdict == (Liveness.ALIVE, "pulsing")
    verdict = judge(held, 1020.0, blocking, activity=Activity.TRAINING, progress=STUCK)
    assert verdict == (Liveness.GONE, "silent")


def test_one_that_said_goodbye_is_gone_at_once() -> None:
    heartbeat = rhythm([0.5])
    for closed in (False, True):
        found = judge(heartbeat, heartbeat.last_s, POLICY, activity=Activity.STOPPED, closed=closed)
        assert found == (Liveness.GONE, "stopped")


def test_only_a_higher_step_is_an_advance() -> None:
    first = StepProgress(5, 1.0, 0.1)
    assert advance(first, 5, 2.0, 0.2) == StepProgress(5, 1.0, 0.2)
    assert advance(first, 6, 2.0, 0.2) == StepProgress(6, 2.0, 0.2)


@pytest.mark.parametrize(("silence_s", "gone"), [(0.9, False), (1.2, True)])
def test_of_one_that_lost_its_connection_a_short_silence_is_enough(
    silence_s: float, *, gone: bool
) -> None:
    heartbeat = rhythm([0.5] * 20)
    now_s = heartbeat.last_s + silence_s
    expected = (Liveness.GONE, "disconnected") if gone else (Liveness.ALIVE, "pulsing")
    assert judge(heartbeat, now_s, POLICY, closed=True) == expected
    assert judge(heartbeat, now_s, POLICY) == (Liveness.ALIVE, "pulsing")
