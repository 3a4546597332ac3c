"""What the page is sent: plain, bounded, and new where something has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Consumed,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Pulse,
)
from skerry.settings.models import RunConfig
from skerry_health_monitor.watching.book import Book
from skerry_health_monitor.watching.watch import Watch
from skerry_health_monitor.web.picture import (
    COLUMNS,
    MOST_ARRIVALS,
    Drawn,
    Scene,
    Sections,
    marks,
    picture,
)
from tests.support.puppet import run_record

NOW_S = 1_000.0
ROWS = ("learners", "rounds", "fragments", "checkpoints", "evaluations", "samples", "curve_run")


def pulse(learner: str = "a", **changes: Any) -> Pulse:
    told = Pulse(
        *("run", learner, 1, LearnerPhase.TRAINING, int(NOW_S * 1e9), 5, 5, 500, 5, 2.0, 0.1, 1.0),
        *(2.0, 10, 20, 1),
        versions=(1,),
    )
    return replace(told, **changes)


def commit(version: int, answers: int = 1) -> Commit:
    opened_ns = int((NOW_S - 1) * 1e9)
    merged = tuple(
        Consumed(
            *(f"l{n}", 1, version, 1, 2, version - 1, 0, 10, 5, 1000, 0, 5, 1.0, 2.0),
            opened_ns + n * 1_000_000 + 1,
        )
        for n in range(answers)
    )
    return Commit(
        *("run", 1, 0, version, 10, "genesis" if version == 1 else "all_arrived", "syncer", 1),
        opened_ns=opened_ns,
        closed_ns=int(NOW_S * 1e9),
        quorum_s=0.2,
        grace_s=0.3,
        consumed=merged,
        refused=(),
        contrib_floor=1,
        progress=(),
        params_digest=0,
        master_digest=0,
    )


@pytest.fixture
def watch() -> Watch:
    """A watch that has seen one of everything."""
    record = run_record("run", plan((LeafSpec("w", (8, 8)),), 1), "{}")
    watch = Watch(record, RunConfig(), lambda: NOW_S)
    watch.joined(MemberRecord("run", "a", 1, "host", 1, 0), 0, 1)
    watch.committed(commit(1), 1, int(NOW_S * 1e9))
    watch.committed(commit(2), 2, int(NOW_S * 1e9))
    watch.take(pulse())
    watch.take(CheckpointRecord("run", "/there", "d", (1,), 4, 40, 7, 100))
    watch.take(Evaluation("run", "e", 5, 500, (2,), 2.0, 7.4, float("nan"), 64, 7, 9, "text"))
    watch.judge()
    return watch


def scene(watch: Watch) -> Scene:
    return Scene(watch, watch.told, Book(), (), None, {}, NOW_S)


def drawn_of(watch: Watch, drawn: Drawn | None = None) -> Sections:
    return picture(scene(watch), {} if drawn is None else drawn)


@pytest.mark.parametrize("section", ROWS)
def test_every_row_has_a_value_for_every_column(watch: Watch, section: str) -> None:
    rows = drawn_of(watch)[section]
    assert rows
    assert {len(row) for row in rows.values()} == {len(COLUMNS[section])}


def test_it_is_json_without_infinities(watch: Watch) -> None:
    watch.take(pulse(loss=float("inf"), alive_s=3.0, sent_ns=int(NOW_S * 1e9) + 1))
    watch.judge()
    text = json.dumps(drawn_of(watch), allow_nan=False)
    assert json.loads(text)["learners"]["a"][COLUMNS["learners"].index("loss")] is None


def test_a_round_that_is_adopted_later_is_drawn_anew(watch: Watch) -> None:
    drawn: Drawn = {}
    at = COLUMNS["rounds"].index("adopted")
    assert drawn_of(watch, drawn)["rounds"]["0.2"][at] == 0
    watch.take(pulse(versions=(2,), alive_s=3.0))
    assert drawn_of(watch, drawn)["rounds"]["0.2"][at] == 1


def test_a_round_of_very_many_shows_some_of_their_answers(watch: Watch) -> None:
    watch.committed(commit(3, answers=200), 3, int(NOW_S * 1e9))
    row = drawn_of(watch)["rounds"]["0.3"]
    arrived = row[COLUMNS["rounds"].index("arrived_s")]
    assert len(arrived) == MOST_ARRIVALS
    assert (arrived[0], arrived[-1]) == (0.0, 0.199)
    assert row[COLUMNS["rounds"].index("learners")] == 200


def test_a_fragment_has_no_age_while_its_newest_version_is_only_known_of(watch: Watch) -> None:
    def row() -> dict[str, Any]:
        return dict(zip(COLUMNS["fragments"], drawn_of(watch)["fragments"]["0"], strict=True))

    assert (row()["version"], row()["closed_s"], row()["step"]) == (2, NOW_S, 10)
    watch.know(commit(9), 9, int(NOW_S * 1e9))
    assert (row()["version"], row()["closed_s"], row()["reason"]) == (9, None, "")
    watch.committed(commit(9), 9, int(NOW_S * 1e9))
    assert (row()["version"], row()["closed_s"], row()["reason"]) == (9, NOW_S, "all_arrived")


def test_marks_name_learners_that_the_picture_numbers(watch: Watch) -> None:
    watch.take(pulse("l0"))
    watch.judge()
    number = drawn_of(watch)["learners"]["l0"][0]
    assert [mark[1] for mark in marks(scene(watch))] == [number]
    assert marks(scene(watch), after=1) == []


def test_long_text_of_others_is_cut(watch: Watch) -> None:
    watch.joined(MemberRecord("run", "a", 2, "h" * 500, 2, 0), 0, 2)
    watch.take(CheckpointRecord("run", "/" + "p" * 5000, "d", (1,), 4, 40, 8, 100))
    watch.judge()
    assert max(len(text) for text in strings(drawn_of(watch))) <= 601


def strings(value: object) -> list[str]:
    """Return every text in nested plain values, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return []
