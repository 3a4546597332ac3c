"""What is told of the last minutes, whatever the days before were like."""

from __future__ import annotations

from math import inf, nan

import pytest

from skerry.protocol.messages import Pulse
from skerry.status.alerts import late_after_s
from skerry.status.recent import MARK_S, RECENT_S, WATCHED_S, WINDOW_S, Recent, interval_s
from tests.support.builders import member, ns, pulse

DAY_S = 86_400.0
NOW_S = 1_700_000_000.0


def beat(busy_s: float, alive_s: float, incarnation: int = 1, learner: str = "a") -> Pulse:
    return pulse(learner, 1, busy_s=busy_s, alive_s=alive_s, incarnation=incarnation)


class Fleet:
    """One learner after ten good days; ``lives`` lets time pass."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.now_s, self.busy_s, self.alive_s = NOW_S, 9 * DAY_S, 10 * DAY_S
        self.recent.pulsed(beat(self.busy_s, self.alive_s), self.now_s)

    def lives(self, seconds: float, share: float, *, every_s: float = 5.0) -> float | None:
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            self.busy_s += share * every_s
            self.alive_s += every_s
            self.recent.pulsed(beat(self.busy_s, self.alive_s), self.now_s)
        return self.goodput()

    def goodput(self) -> float | None:
        return self.recent.goodput(self.now_s)


def test_starts_are_counted_once_whatever_is_read_first_and_a_first_start_is_none() -> None:
    starts = [member("a", n, joined_ns=ns(NOW_S - 60 + 10 * n)) for n in (1, 2, 3, 4)]
    recent = Recent()
    for again in (starts[-1], *starts, *starts, member("b", 0), member("b", 1)):
        recent.joined(again, again.joined_ns / 1e9)
    assert recent.starts(NOW_S) == {"a": 3}
    assert recent.starts(NOW_S + RECENT_S) == {}


def test_a_collapse_after_ten_good_days_shows_within_the_window() -> None:
    fleet = Fleet()
    assert fleet.lives(WINDOW_S, 0.9) == pytest.approx(0.9)
    assert fleet.lives(WINDOW_S / 2, 0.0) == pytest.approx(0.45, abs=0.02)
    assert fleet.lives(WINDOW_S / 2 + MARK_S, 0.0) == pytest.approx(0.0, abs=0.01)


def test_an_outage_is_forgotten_once_it_has_left_the_window() -> None:
    fleet = Fleet()
    assert fleet.lives(DAY_S / 10, 0.0) == 0.0
    assert fleet.lives(WINDOW_S + MARK_S, 0.9) == pytest.approx(0.9, abs=0.01)


def test_nothing_is_told_before_it_was_watched_for_some_minutes() -> None:
    fleet = Fleet()
    assert fleet.lives(WATCHED_S - 10, 0.1) is None
    assert fleet.lives(10, 0.1) == pytest.approx(0.1)


def test_nothing_is_told_where_nobody_has_lived() -> None:
    fleet = Fleet()
    fleet.lives(WINDOW_S, 0.9)
    fleet.now_s += WINDOW_S + 1
    assert fleet.goodput() is None
    assert Recent().goodput(NOW_S) is None


def test_a_learner_that_is_started_again_counts_from_nothing() -> None:
    fleet = Fleet()
    fleet.lives(WINDOW_S, 0.9)
    fleet.now_s += 100
    fleet.recent.pulsed(beat(0.0, 90.0, incarnation=2), fleet.now_s)
    fleet.recent.pulsed(beat(1e6, 1e6), fleet.now_s)  # of the old one, late
    assert fleet.goodput() == pytest.approx(0.9 * 800 / 890, abs=0.01)


def test_after_an_outage_of_the_broker_no_more_is_recent_than_the_window_holds() -> None:
    fleet = Fleet()
    fleet.recent.pulsed(beat(0.0, 10.0, learner="b"), fleet.now_s)
    fleet.now_s += DAY_S
    fleet.recent.pulsed(beat(fleet.busy_s + DAY_S, fleet.alive_s + DAY_S), fleet.now_s)
    fleet.recent.pulsed(beat(0.25 * DAY_S, DAY_S + 10.0, learner="b"), fleet.now_s)
    since = fleet.recent.marks[-1]
    assert fleet.recent.alive_s - since.alive_s == pytest.approx(WINDOW_S)
    assert fleet.recent.train_s - since.train_s == pytest.approx(0.25 * WINDOW_S)


@pytest.mark.parametrize("lie", [inf, nan, -inf, 1e300, -1.0])
def test_what_pulses_lie_about_is_bounded_by_the_time_that_has_passed(lie: float) -> None:
    fleet = Fleet()
    fleet.recent.pulsed(beat(0.0, 0.0, learner="liar"), fleet.now_s)
    fleet.recent.pulsed(beat(lie, lie, learner="liar"), fleet.now_s)
    goodput = fleet.lives(WINDOW_S, 0.5)
    assert goodput == pytest.approx(0.5, abs=0.01)


def test_a_clock_that_is_set_back_begins_a_new_window() -> None:
    fleet = Fleet()
    fleet.lives(WINDOW_S, 0.9)
    fleet.now_s -= DAY_S
    assert fleet.lives(WATCHED_S - 20, 0.9) is None
    assert fleet.lives(40, 0.9) == pytest.approx(0.9)


def test_its_memory_is_bounded() -> None:
    fleet = Fleet()
    fleet.lives(10 * WINDOW_S, 0.9)
    assert len(fleet.recent.marks) <= WINDOW_S / MARK_S + 1
    assert len(fleet.recent.counted) == 1


def test_a_round_is_late_by_how_often_rounds_come() -> None:
    gap_s = interval_s([NOW_S + 30 * n for n in range(5)])
    assert gap_s == 30.0
    assert late_after_s(gap_s, 24, []) == 300.0
    assert late_after_s(0.5, 24, []) == 20.0
    assert interval_s([1.0, 2.0]) is None
    assert late_after_s(None, 24, []) == 120.0


def test_rests_and_outages_are_no_interval_between_rounds() -> None:
    evening = [NOW_S + 5 * n for n in range(40)]
    morning = [evening[-1] + 43_200 + 5 * n for n in range(20)]
    later = [morning[-1] + 3_600 + 5 * n for n in range(4)]
    for closed_s in ((*evening, *morning), (*evening, *morning, *later), (*evening[-2:], *later)):
        assert interval_s(closed_s) == pytest.approx(5.0)


def test_a_pause_between_two_bursts_of_commits_belongs_to_the_rhythm() -> None:
    bursts = [NOW_S + 30 * burst + 0.01 * n for burst in range(8) for n in range(4)]
    assert interval_s(bursts) == pytest.approx(7 * 30 / 31, abs=0.1)
    assert interval_s([NOW_S, NOW_S, NOW_S]) == 0.0
