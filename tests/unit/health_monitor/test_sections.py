"""What the page is sent is plain and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.protocol.messages import Commit, Pulse
from skerry.settings.models import RunConfig
from skerry.status.model import RunModel
from skerry_health_monitor.alert_log import AlertLog
from skerry_health_monitor.web.sections import (
    COLUMNS,
    MOST_ARRIVALS,
    Sections,
    marks,
    sections,
)
from tests.support.builders import (
    as_seen,
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    member,
    ns,
    pulse,
    run_record,
)

NOW_S = 1_000.0
ROWS = ("learners", "rounds", "fragments", "checkpoints", "evaluations", "samples", "curve_run")


def beat(learner: str = "a", **changes: Any) -> Pulse:
    base = {"sent_ns": ns(NOW_S), "alive_s": 2.0, "bytes_up": 10, "versions": (1,)}
    return pulse(learner, 5, **(base | changes))


def closed(version: int, answers: int = 1) -> Commit:
    opened_ns = ns(NOW_S - 1)
    merged = tuple(
        consumed(f"l{n}", arrived_ns=opened_ns + n * 1_000_000 + 1) for n in range(answers)
    )
    return commit(version, opened_ns=opened_ns, closed_ns=ns(NOW_S), consumed=merged)


@pytest.fixture
def model() -> RunModel:
    """A model that has seen one of everything."""
    record = run_record("run", plan((LeafSpec("w", (8, 8)),), 1), "{}")
    model = RunModel(record, RunConfig(), lambda: NOW_S)
    model.take(as_seen(member(), NOW_S))
    model.take(as_seen(closed(1), NOW_S, 1))
    model.take(as_seen(closed(2), NOW_S, 2))
    model.take(as_seen(beat(), NOW_S))
    model.take(as_seen(checkpoint_record("/there", versions=(1,), step=4), NOW_S))
    model.take(as_seen(evaluation(5, bits_per_byte=float("nan"), sample="text"), NOW_S))
    return model


def drawn_of(model: RunModel) -> Sections:
    return sections(model.snapshot(), AlertLog())


@pytest.mark.parametrize("section", ROWS)
def test_every_row_has_a_value_for_every_column(model: RunModel, section: str) -> None:
    rows = drawn_of(model)[section]
    assert rows
    assert {len(row) for row in rows.values()} == {len(COLUMNS[section])}


def test_it_is_json_without_infinities(model: RunModel) -> None:
    model.take(as_seen(beat(loss=float("inf"), alive_s=3.0, sent_ns=int(NOW_S * 1e9) + 1), NOW_S))
    text = json.dumps(drawn_of(model), allow_nan=False)
    assert json.loads(text)["learners"]["a"][COLUMNS["learners"].index("loss")] is None


def test_a_round_of_very_many_shows_some_of_their_answers(model: RunModel) -> None:
    model.take(as_seen(closed(3, answers=200), NOW_S, 3))
    row = drawn_of(model)["rounds"]["0.3"]
    arrived = row[COLUMNS["rounds"].index("arrived_s")]
    assert len(arrived) == MOST_ARRIVALS
    assert (arrived[0], arrived[-1]) == (0.0, 0.199)
    assert row[COLUMNS["rounds"].index("learners")] == 200


def test_a_fragment_has_no_age_while_its_newest_version_is_only_known_of(model: RunModel) -> None:
    def row() -> dict[str, Any]:
        return dict(zip(COLUMNS["fragments"], drawn_of(model)["fragments"]["0"], strict=True))

    assert (row()["version"], row()["closed_s"]) == (2, NOW_S)
    model.peek(as_seen(closed(9), NOW_S, 9))
    assert (row()["version"], row()["closed_s"]) == (9, None)
    model.take(as_seen(closed(9), NOW_S, 9))
    assert (row()["version"], row()["closed_s"]) == (9, NOW_S)


def test_marks_name_learners_that_the_page_numbers(model: RunModel) -> None:
    model.take(as_seen(beat("l0"), NOW_S))
    number = drawn_of(model)["learners"]["l0"][0]
    assert [mark[1] for mark in marks(model)] == [number]
    assert marks(model, after=1) == []


def test_long_text_of_others_is_cut(model: RunModel) -> None:
    model.take(as_seen(member(incarnation=2, host="h" * 500), NOW_S))
    model.take(as_seen(checkpoint_record("/" + "p" * 5000, step=4, written_ns=8), NOW_S))
    assert max(len(text) for text in strings(drawn_of(model))) <= 601


def strings(value: object) -> list[str]:
    """Return every text in nested plain values, keys too."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in strings(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return []
