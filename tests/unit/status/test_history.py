"""What the page remembers of learners, rounds and texts, in bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import Commit, CommitOrigin, LearnerPhase
from skerry.status import history as status_history
from skerry.status.history import (
    MOST_CHECKPOINTS,
    MOST_SAMPLES,
    MOST_TURNS,
    History,
)
from skerry.status.report import LearnerRow
from tests.support.builders import (
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    learner_row,
    member,
    ns,
    progress,
)


def closed(version: int, closed_s: float = 100.0, **changes: Any) -> Commit:
    merged = consumed(base_version=version - 1, identity=version, cursor_to=5)
    times = {"opened_ns": ns(closed_s - 0.5), "closed_ns": ns(closed_s)}
    base: dict[str, Any] = {"origin": CommitOrigin.ROUND, "consumed": (merged,), **times}
    return commit(version, **(base | changes))


def test_names_that_only_commits_know_do_not_fill_the_lanes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_history, "MOST_LEARNERS", 2)
    history = History(1)
    for version, name in enumerate(("a", "b", "c"), 1):
        merged = replace(closed(version).consumed[0], learner=name)
        history.committed(closed(version, consumed=(merged,)), version, 100.0, 100.0)
    assert list(history.lanes) == ["a", "b"]


def row(state: Liveness, phase: LearnerPhase = LearnerPhase.TRAINING) -> LearnerRow:
    return learner_row("a", liveness=state, reason=LivenessReason.SILENT, phase=phase)


def test_genesis_is_no_training() -> None:
    history = History(fragments=1)
    history.committed(closed(1, origin=CommitOrigin.GENESIS), 1, 1.0, 1.0)
    assert not history.curves.run.bins
    assert (0, 1) in history.timeline.rounds


def test_a_restored_run_goes_on_with_the_tokens_that_it_comes_with() -> None:
    """Evaluations tell those of the whole run: both are drawn on one axis."""
    history = History(fragments=2)
    for fragment in range(2):
        rows = (progress("a", tokens=5000), progress("b", tokens=3000))
        restored = closed(40, origin=CommitOrigin.RESTORED, consumed=(), progress=rows)
        history.committed(replace(restored, fragment=fragment), 1 + fragment, 99.0, 99.0)
    assert not history.curves.run.bins
    history.committed(closed(41), 3, 100.0, 100.0)
    (held,) = history.curves.run.bins.values()
    assert (held.total, held.tokens) == (8500.0, 500.0)


def test_a_lane_knows_the_host_of_its_learner() -> None:
    history = History(fragments=1)
    history.take(member(joined_ns=ns(5)), 5.0)
    assert history.lanes["a"].host == "host"


def test_a_lane_holds_changes_of_state_and_no_more_than_some() -> None:
    history = History(fragments=1)
    for at_s, state in ((1.0, Liveness.ALIVE), (2.0, Liveness.ALIVE), (3.0, Liveness.GONE)):
        history.judged((row(state),), at_s)
    assert [(t.at_s, t.state) for t in history.lanes["a"].turns] == [
        (1.0, "training"),
        (3.0, "gone"),
    ]
    for at_s in range(100):
        history.judged((row((Liveness.ALIVE, Liveness.SUSPECT)[at_s % 2]),), float(at_s))
    assert len(history.lanes["a"].turns) == MOST_TURNS


@pytest.mark.parametrize("phase", [LearnerPhase.FINISHED, LearnerPhase.STOPPED])
def test_silence_after_the_end_is_no_state_of_its_own(phase: LearnerPhase) -> None:
    history = History(fragments=1)
    history.judged((row(Liveness.GONE, phase),), 1.0)
    assert history.lanes["a"].turns[-1].state == phase.value


def test_samples_thin_out_from_the_oldest_on_and_the_newest_stays() -> None:
    history = History(fragments=1)
    for number in range(1, 5 * MOST_SAMPLES):
        history.take(
            evaluation(number, versions=(number,), evaluated_ns=number, sample=f"text {number}"),
            1.0,
        )
    assert len(history.samples) <= MOST_SAMPLES
    assert history.samples[-1].sample == f"text {5 * MOST_SAMPLES - 1}"
    steps = [s.step for s in history.samples]
    assert steps == sorted(steps)


def test_an_evaluation_without_a_sample_is_none() -> None:
    history = History(fragments=1)
    history.take(evaluation(1, versions=(1,), sample=""), 1.0)
    assert history.samples == []


def test_only_the_newest_checkpoints_are_kept() -> None:
    history = History(fragments=1)
    for number in range(2 * MOST_CHECKPOINTS):
        record = checkpoint_record(f"/{number}", step=number, written_ns=number)
        history.take(record, 1.0)
    assert len(history.checkpoints) == MOST_CHECKPOINTS
    assert list(history.checkpoints)[-1] == f"/{2 * MOST_CHECKPOINTS - 1}"
