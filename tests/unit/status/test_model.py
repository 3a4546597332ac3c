"""Learners are reported as suspect, gone or back, and records are as old as a clock can tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.protocol.messages import (
    Commit,
    LearnerPhase,
    Pulse,
    RefusalCause,
    RunRecord,
    RunState,
)
from skerry.settings.models import RunConfig
from skerry.status.model import MOST_LINES, RunModel
from skerry.status.recent import RECENT_S
from skerry.status.timeline import AHEAD_S
from skerry.telemetry.metrics import flat
from tests.support.builders import (
    as_seen,
    checkpoint_record,
    commit,
    consumed,
    member,
    ns,
    pulse,
    refused,
    run_record,
)

PULSE_S = 0.5
STARTED_S = 1_000_000.0


@dataclass
class Clock:
    now_s: float = STARTED_S

    def __call__(self) -> float:
        return self.now_s


def record() -> RunRecord:
    cut = plan((LeafSpec("w", (8, 8)),), 1)
    return run_record("run", cut, RunConfig().model_dump_json(), created_ns=1)


def beat(clock: Clock, step: int, phase: LearnerPhase = LearnerPhase.TRAINING) -> Pulse:
    since_s = clock.now_s - STARTED_S
    return pulse(step=step, phase=phase, sent_ns=ns(clock.now_s), alive_s=since_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model(clock: Clock) -> RunModel:
    """A model that has seen twenty regular pulses of learner ``a``."""
    model = RunModel(record(), RunConfig(), clock)
    for step in range(20):
        clock.now_s += PULSE_S
        model.take(as_seen(beat(clock, step), clock.now_s))
        assert judge(model) == []
    return model


def judge(model: RunModel) -> list[tuple[str, str]]:
    return model.judge(model.snapshot().report)


def until_gone(model: RunModel, clock: Clock, limit_s: float = 60.0) -> list[str]:
    """Let time pass until somebody is gone and return the events on the way."""
    events: list[str] = []
    end_s = clock.now_s + limit_s
    while clock.now_s < end_s and "learner_gone" not in events:
        clock.now_s += PULSE_S / 2
        events += [event for event, _ in judge(model)]
    return events


def test_a_learner_that_falls_silent_is_suspect_first_then_gone(
    model: RunModel, clock: Clock
) -> None:
    assert until_gone(model, clock) == ["learner_suspect", "learner_gone"]


def test_a_pulse_brings_a_suspect_learner_back(model: RunModel, clock: Clock) -> None:
    until_gone(model, clock)
    model.take(as_seen(beat(clock, 30), clock.now_s))
    assert judge(model) == [("learner_back", "a")]


def test_each_change_is_logged_once_with_what_is_known(model: RunModel, clock: Clock) -> None:
    with capture_logs() as logs:
        until_gone(model, clock)
        judge(model)
    assert [line["event"] for line in logs] == ["learner_suspect", "learner_gone"]
    assert {line["learner"] for line in logs} == {"a"}
    assert logs[-1]["reason"] in {"silent", "stalled"}
    assert logs[-1]["log_level"] == "warning"


def test_a_learner_that_says_goodbye_is_no_warning(model: RunModel, clock: Clock) -> None:
    model.take(as_seen(beat(clock, 21, LearnerPhase.STOPPED), clock.now_s))
    clock.now_s += 0.001
    model.take(as_seen(beat(clock, 21, LearnerPhase.STOPPED), clock.now_s))
    with capture_logs() as logs:
        judge(model)
    assert [(line["log_level"], line["reason"]) for line in logs] == [("info", "stopped")]


def test_silence_after_the_end_of_the_run_is_nobodys_trouble(model: RunModel, clock: Clock) -> None:
    model.take(as_seen(replace(record(), state=RunState.FINISHED), clock.now_s))
    assert until_gone(model, clock, limit_s=600.0) == []


def test_a_name_that_a_restored_run_keeps_a_shard_for_is_not_missed(model: RunModel) -> None:
    model.take(as_seen(member("restored", 0, shard=3), STARTED_S))
    assert judge(model) == []
    assert [row.name for row in model.snapshot().report.learners] == ["a"]


def closed(version: int, closed_s: float, **changes: Any) -> Commit:
    times = {"opened_ns": ns(closed_s - 1), "closed_ns": ns(closed_s)}
    return commit(version, **times, **changes)


def test_a_commit_of_the_far_future_is_not_the_newest_for_ever(
    model: RunModel, clock: Clock
) -> None:
    """No round would be late for as long as such a clock is believed."""
    stored_s, odd = clock.now_s, closed(1, 3 * clock.now_s)
    model.peek(as_seen(odd, stored_s))
    model.take(as_seen(odd, stored_s))
    clock.now_s += 120.0
    assert model.snapshot().report.run.last_round_s_ago == pytest.approx(120.0)
    (row,) = model.history.timeline.rounds.values()
    assert row.closed_s == pytest.approx(stored_s + AHEAD_S)


@pytest.mark.parametrize("off_s", [-30.0, -3600.0, 0.0, 30.0])
def test_a_round_is_as_old_as_its_arrival_whatever_its_syncers_clock_says(
    model: RunModel, clock: Clock, off_s: float
) -> None:
    for version in range(1, 20):
        clock.now_s += 2.0
        off = off_s if version > 10 else 0.0
        model.take(as_seen(closed(version, clock.now_s + off), clock.now_s, version))
        assert model.snapshot().report.run.last_round_s_ago == pytest.approx(0.0)
    assert model.view.last_commit is not None
    assert model.view.last_commit.version == 19
    clock.now_s += 5.0
    assert model.snapshot().report.run.last_round_s_ago == pytest.approx(5.0)
    assert model.history.timeline.interval_s() == pytest.approx(2.0)


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_refusal_is_as_old_as_its_arrival_whatever_other_clocks_say(
    model: RunModel, clock: Clock, off_s: float
) -> None:
    refusals = (refused(learner="a"), refused(RefusalCause.GENESIS, "c"))
    round_ = closed(2, clock.now_s + off_s, refused=refusals)
    model.take(as_seen(round_, clock.now_s, 2, clock.now_s + off_s))
    assert model.history.lately.refused(clock.now_s + RECENT_S - 1) == {"too_stale": 1}
    assert model.history.lately.refused(clock.now_s + RECENT_S + 1) == {}


def test_a_round_of_before_we_watched_is_as_old_as_the_broker_says(
    model: RunModel, clock: Clock
) -> None:
    stored_s = clock.now_s - 100.0
    model.peek(as_seen(closed(7, stored_s - 3600.0), stored_s, 9))
    for version in range(1, 8):
        at_s = stored_s - 7 + version
        model.take(as_seen(closed(version, at_s), at_s, 2 + version))
    assert model.snapshot().report.run.last_round_s_ago == pytest.approx(100.0)


def test_a_commit_is_counted_once_whatever_is_read_again(model: RunModel, clock: Clock) -> None:
    changes = {"consumed": (consumed(tokens=500),), "refused": (refused(learner="b"),)}
    round_ = closed(2, clock.now_s, **changes)
    for _ in range(2):
        model.take(as_seen(round_, clock.now_s, 7))
    assert (model.view.rounds, model.view.refused) == (1, {"too_stale": 1})
    (held,) = model.history.curves.run.bins.values()
    assert (held.tokens, held.loss, held.rounds) == (500.0, 2.0, 1)
    assert [mark.learner for mark in model.history.marks] == ["a"]
    assert model.history.lately.refused(clock.now_s) == {"too_stale": 1}
    assert flat(model.totals.figures())["skerry.contribution.staleness.count"] == 1


def test_parameters_are_counted_without_padding() -> None:
    cut = plan([LeafSpec("w", (3, 5)), LeafSpec("b", ())], 1)
    assert RunModel(run_record(plan=cut), RunConfig()).parameters == 16


def test_a_crowd_that_changes_at_once_is_one_line_beyond_the_first_few(clock: Clock) -> None:
    model = RunModel(record(), RunConfig(), clock)
    for number in range(500):
        model.take(as_seen(replace(beat(clock, 1), learner=f"l{number}"), clock.now_s))
    clock.now_s += 3600.0
    with capture_logs() as logs:
        assert len(judge(model)) == 500
    assert len(logs) == MOST_LINES + 1
    assert logs[-1]["learner_gone"] == 500 - MOST_LINES


def test_the_newest_checkpoint_has_the_most_commits_whatever_clock_its_writer_had(
    clock: Clock, model: RunModel
) -> None:
    for at, (path, off_s) in enumerate((("ahead", 18_000), ("right", 0), ("behind", -18_000))):
        clock.now_s += 30
        written = checkpoint_record(path, written_ns=ns(clock.now_s + off_s), ledger_sequence=at)
        model.take(as_seen(written, clock.now_s))
        run = model.snapshot().report.run
        assert (run.checkpoint, run.checkpoint_s_ago) == (path, 0.0)
    clock.now_s += 30
    model.take(as_seen(checkpoint_record("of a slower writer", ledger_sequence=1), clock.now_s))
    assert model.snapshot().report.run.checkpoint == "behind"
