"""The timeline of rounds: what is kept of each, and who has adopted them."""

from __future__ import annotations

from typing import Any

from skerry.protocol.messages import Commit, CommitOrigin, Consumed, Pulse
from skerry.status.timeline import (
    AHEAD_S,
    WRITTEN_S,
    Timeline,
    arrivals,
    committed_round,
    corrected,
)
from tests.support.builders import commit, consumed, ns, pulse, round_


def merged(learner: str, arrived_ns: int = 0, loss: float = 2.0) -> Consumed:
    return consumed(learner, tokens=500, arrived_ns=arrived_ns, loss=loss)


def closed(version: int, fragment: int = 0, *merged: Consumed, **changes: Any) -> Commit:
    times = {"opened_ns": ns(version), "closed_ns": ns(version + 0.5), "quorum_s": 0.2}
    return commit(version, fragment, consumed=merged, **times, **changes)


def beat(learner: str, *versions: int, alive_s: float = 100.0) -> Pulse:
    return pulse(learner, versions=versions, alive_s=alive_s)


def filled(most: int, versions: int) -> Timeline:
    timeline = Timeline(most)
    for version in range(1, versions + 1):
        timeline.committed(committed_round(closed(version), 100 + version, float(version)))
    return timeline


def test_only_the_newest_rounds_are_kept() -> None:
    assert list(filled(3, 10).rounds) == [(0, 8), (0, 9), (0, 10)]


def test_a_syncer_whose_clock_is_off_closes_no_round_before_the_run_or_in_the_future() -> None:
    created_ns, stored_ns = 1000 * 10**9, 2000 * 10**9
    answer = merged("a", 9000 * 10**9 + 250_000_000)
    early, late, right = (
        corrected(closed(version, 0, answer), stored_ns, created_ns) for version in (5, 9000, 1960)
    )
    assert early.closed_ns == stored_ns - int(WRITTEN_S * 1e9)
    assert corrected(closed(5), created_ns + 10**9, created_ns).closed_ns == created_ns
    assert late.closed_ns == stored_ns + int(AHEAD_S * 1e9)
    assert arrivals(late) == (0.25,)
    assert right == closed(1960, 0, answer)
    assert {told.closed_ns - told.opened_ns for told in (early, late, right)} == {5 * 10**8}


def test_adoption_counts_each_learner_once_whenever_its_pulse_comes() -> None:
    timeline = Timeline()
    timeline.pulsed(beat("early", 1), 1.0)
    timeline.committed(committed_round(closed(1), 1, 1.0))
    timeline.pulsed(beat("late", 1), 3.0)
    timeline.pulsed(beat("late", 1), 4.0)
    row = timeline.rounds[0, 1]
    assert (row.adopted, row.adopted_s) == (2, 3.0)
    assert timeline.newest[0].adopted == 2


def test_nobody_was_seen_to_adopt_what_had_been_before_the_monitor_was_there() -> None:
    """It knows the newest pulses before it reads the ledger from its beginning."""
    timeline = Timeline()
    timeline.pulsed(beat("a", 3), 10_000.0)
    timeline.pulsed(beat("b", 2), 10_000.0)
    for version in (1, 2, 3):
        timeline.committed(committed_round(closed(version), version, float(version)))
    told = [(timeline.rounds[0, v].adopted, timeline.rounds[0, v].adopted_s) for v in (1, 2, 3)]
    assert told == [(2, None), (2, None), (1, None)]


def test_a_learner_that_starts_again_adopts_no_version_a_second_time() -> None:
    timeline = filled(10, 3)
    timeline.pulsed(beat("a", 2), 5.0)
    timeline.pulsed(beat("b", 3), 6.0)
    for at_s, version in ((7.0, 0), (8.0, 2), (9.0, 3)):
        timeline.pulsed(beat("a", version, alive_s=at_s - 6.5), at_s)
    told = [(timeline.rounds[0, v].adopted, timeline.rounds[0, v].adopted_s) for v in (1, 2, 3)]
    assert told == [(2, 6.0), (2, 6.0), (2, 6.0)]
    assert timeline.newest[0].adopted == 2


def test_a_learner_that_joins_late_does_not_move_when_old_rounds_were_adopted() -> None:
    timeline = filled(10, 3)
    timeline.pulsed(beat("a", 3), 6.0)
    timeline.committed(committed_round(closed(4), 104, 50.0))
    timeline.pulsed(beat("late", 4, alive_s=20.0), 60.0)
    assert [timeline.rounds[0, v].adopted for v in (3, 4)] == [2, 1]
    assert [timeline.rounds[0, v].adopted_s for v in (3, 4)] == [6.0, 60.0]


def test_a_version_that_a_learner_skipped_is_behind_it_too() -> None:
    timeline = filled(10, 3)
    timeline.pulsed(beat("a", 3), 9.0)
    assert [timeline.rounds[0, v].adopted for v in (1, 2, 3)] == [1, 1, 1]


def test_a_round_is_in_the_air_until_its_version_is_committed() -> None:
    timeline = filled(3, 1)
    timeline.opened(round_())
    assert timeline.open[0].version == 2
    timeline.opened(round_(attempt=1))
    assert timeline.open[0].attempt == 1
    timeline.committed(committed_round(closed(2), 102, 1.0))
    timeline.opened(round_())
    assert timeline.open == {}


def test_arrivals_are_told_from_the_opening_and_only_where_they_were_noted() -> None:
    told = closed(4, 0, merged("a", 4 * 10**9 + 250_000_000), merged("b"), merged("c", 1))
    assert arrivals(told) == (0.0, 0.25)


def test_a_loss_that_is_no_number_leaves_the_mean_alone() -> None:
    row = committed_round(
        closed(2, 0, merged("a", loss=float("nan")), merged("b", loss=3.0)), 1, 1.0
    )
    assert (row.loss, row.tokens) == (3.0, 1000)


def test_restored_fragments_say_nothing_of_how_often_rounds_come() -> None:
    """A restore writes one after the other: a round would be late after some milliseconds."""
    timeline = Timeline()
    for fragment in range(8):
        written = closed(40, fragment, origin=CommitOrigin.RESTORED)
        timeline.committed(committed_round(written, fragment, 1.0))
    assert timeline.interval_s() is None


def test_the_expected_round_is_a_mean_over_those_of_late() -> None:
    assert filled(10, 5).interval_s() == 1.0
    assert filled(10, 2).interval_s() is None
