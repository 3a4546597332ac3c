"""When training is over, and how far the clock follows what learners say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.liveness import LivenessPolicy
from skerry.algorithm.schedule import Schedule
from skerry.protocol import clock as clock_module
from skerry.protocol.clock import END_TIMEOUTS, ClockLimit, GlobalClock, LearnerTable
from skerry.protocol.coordinator import CoordinatorSettings, RoundCoordinator
from skerry.protocol.messages import LearnerPhase, Quarantine, QuarantineReason
from skerry.settings.models import LivenessConfig
from tests.support.builders import commit, progress, pulse

PATIENCE_S = 60.0
POLICY = LivenessPolicy(**LivenessConfig().model_dump())
PULSE = pulse("fast", 100, phase=LearnerPhase.FINISHED)


def table_of(phase: LearnerPhase, silent_s: float) -> LearnerTable:
    """Return a table whose other learner was last heard ``silent_s`` before now (1000 s)."""
    table = LearnerTable(POLICY, PATIENCE_S)
    table.observe(replace(PULSE, learner="slow", phase=phase), 1000.0 - silent_s)
    table.observe(PULSE, 1000.0)
    return table


@pytest.mark.parametrize("phase", [LearnerPhase.TRAINING, LearnerPhase.CATCHING_UP])
def test_silence_of_one_that_was_at_work_is_no_end(phase: LearnerPhase) -> None:
    """A broker that was away lets whoever has finished be heard first."""
    table = table_of(phase, 10.0)
    assert "slow" not in table.working(1000.0)
    assert not table.finished(1000.0)


def test_run_ends_without_one_that_stays_away() -> None:
    assert table_of(LearnerPhase.TRAINING, PATIENCE_S + 1).finished(1000.0)


@pytest.mark.parametrize("phase", [LearnerPhase.FINISHED, LearnerPhase.STOPPED])
def test_run_does_not_wait_for_one_that_said_it_was_done(phase: LearnerPhase) -> None:
    assert table_of(phase, 10.0).finished(1000.0)


def test_run_does_not_wait_for_ever_for_one_that_says_it_trains() -> None:
    table = table_of(LearnerPhase.TRAINING, 0.0)
    since = 1000.0 - END_TIMEOUTS * PATIENCE_S
    assert not table.finished(1000.0, since)
    assert table.finished(1000.0, since - 1.0)


@pytest.mark.parametrize(
    ("held", "released", "after"),
    [(set(), False, {"a"}), ({"a"}, True, set()), ({"a"}, False, {"a"}), ({"b"}, True, {"b"})],
)
def test_a_decision_on_a_learner_changes_something_once(
    held: set[str], released: bool, after: set[str]
) -> None:
    table = LearnerTable(POLICY, quarantined=set(held))
    decided = Quarantine("run", "a", QuarantineReason.BY_HAND, "admin", 1, released)
    assert table.set_quarantine(decided) == (held != after)
    assert table.quarantined == after


def test_one_in_quarantine_is_neither_waited_for_nor_counted() -> None:
    table = table_of(LearnerPhase.TRAINING, 0.0)
    assert table.working(1000.0).keys() == {"slow", "fast"}
    table.quarantined.add("slow")
    assert table.working(1000.0).keys() == {"fast"}
    assert table.finished(1000.0)


def clock(claimed: int, limit: ClockLimit, quorum: int = 1, now_s: float = 1000.0) -> int:
    """Return the clock where ``liar`` claims a step and two others are at 100."""
    table = LearnerTable(POLICY, PATIENCE_S)
    for name, step in (("a", 100), ("b", 100), ("liar", claimed)):
        table.observe(pulse(name, step), now_s)
    return table.clock(now_s, quorum, limit, estimated=False)


MERGED = frozenset({"a", "b"})


def test_clock_goes_no_further_than_commits_and_time_bear_out() -> None:
    liar = MERGED | {"liar"}
    assert clock(10**8, ClockLimit(100, 1000.0, 48, liar)) == 148
    by_time = clock(10**8, ClockLimit(100, 990.0, 48, liar))  # ten seconds of 0.1 s, eight times
    assert by_time == 148 + 800
    assert clock(120, ClockLimit(100, 1000.0, 48)) == 120


@pytest.mark.parametrize(("merged", "most"), [(MERGED, 148), (MERGED | {"liar"}, 148 + 800)])
def test_who_is_alone_moves_the_clock_no_faster_than_those_who_are_away(
    merged: frozenset[str], most: int
) -> None:
    table = LearnerTable(POLICY, PATIENCE_S)
    for name in ("a", "b"):
        table.observe(pulse(name, 100), 0.0)
    table.observe(replace(pulse("liar", 10**8), step_time_s=1e-6), 1000.0)
    limit = ClockLimit(100, 990.0, 48, merged)
    assert table.working(1000.0).keys() == {"liar"}
    assert table.clock(1000.0, 1, limit, estimated=False) == most


def test_clock_follows_a_merged_learner_that_is_left_alone_though_it_makes_no_quorum() -> None:
    table = LearnerTable(POLICY, PATIENCE_S)
    table.observe(pulse("a", 600), 1000.0)
    limit = ClockLimit(100, 940.0, 48, MERGED)
    assert table.clock(1000.0, 2, limit, estimated=False) == 600


def test_clock_follows_learners_that_were_merged_where_they_make_a_quorum() -> None:
    limit = ClockLimit(90, 1000.0, 48, frozenset({"a", "b"}))
    assert clock(130, limit) == 100
    assert clock(130, limit, quorum=3) == 100
    assert clock(130, limit._replace(merged=frozenset())) == 130


@pytest.mark.parametrize(("merged", "over"), [({"fast", "slow"}, True), ({"fast"}, False)])
def test_run_ends_with_a_slower_learner_after_the_one_that_came_to_its_last_step_is_gone(
    merged: set[str], *, over: bool
) -> None:
    """It has heard of the last step, from another shard's commit or of a last round."""
    table = LearnerTable(POLICY, PATIENCE_S)
    table.observe(replace(PULSE, step=1000), 0.0)
    table.observe(replace(PULSE, learner="slow", step=600), 1000.0)
    limit = ClockLimit(900, 980.0, 48, frozenset(merged))
    nothing: Any = None
    settings = CoordinatorSettings(Schedule(2, 24, 6), nothing, 1000)
    clock = GlobalClock(table, 1, blocking=False, limit=limit)
    assert RoundCoordinator(nothing, clock, settings, nothing).over(1000.0) == over


def test_no_more_names_are_followed_than_learners_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "MOST_PULSING", 2)
    table = LearnerTable(POLICY)
    for name in "abc":
        table.observe(pulse(name), 0.0)
    table.observe(pulse("a", 9), 1.0)
    assert {name: seen.pulse.step for name, seen in table.seen.items()} == {"a": 9, "b": 8}


def test_only_the_newest_start_of_a_learner_counts_and_it_begins_its_own_rhythm() -> None:
    table = LearnerTable(POLICY)
    table.observe(pulse("a", 50), 0.0)
    table.observe(pulse("a", 7, incarnation=2), 600.0)
    table.observe(pulse("a", 90), 601.0)
    assert table.seen["a"].pulse.step == 7
    assert table.seen["a"].heartbeat.count == 0, "the pause between the two is no interval"


@pytest.mark.parametrize(
    ("phase", "step_time_s", "by_now"),
    [(LearnerPhase.TRAINING, 0.1, 105), (LearnerPhase.TRAINING, 0.0, 100),
     (LearnerPhase.FINISHED, 0.1, 100)],
)  # fmt: skip
def test_a_step_is_estimated_for_one_interval_between_pulses_and_while_it_trains(
    phase: LearnerPhase, step_time_s: float, by_now: int
) -> None:
    table = LearnerTable(LivenessPolicy(pulse_s=0.5, suspect_phi=3.0, gone_phi=8.0))
    table.observe(pulse("a", 100, phase=phase, step_time_s=step_time_s), 0.0)
    limit = ClockLimit(1000, 0.0, 0)
    assert table.clock(0.9, 1, limit, estimated=True) == by_now
    assert table.clock(0.9, 1, limit, estimated=False) == 100


def test_a_commit_moves_the_limit_of_the_clock_and_one_that_is_behind_gives_it_no_time() -> None:
    made = GlobalClock(LearnerTable(POLICY), 1, blocking=False, limit=ClockLimit(100, 0.0, 48))
    made.committed(commit(9, step=120, progress=(progress("a"),)), 5.0)
    made.committed(commit(9, step=110, progress=(progress("b"),)), 9.0)
    assert made.limit == ClockLimit(120, 5.0, 48, frozenset({"a", "b"}))
