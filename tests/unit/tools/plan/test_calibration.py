"""What a run's ledger and rows teach, and that a known run is predicted again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skerry.algorithm.goodput import Cause
from skerry.errors import ConfigError
from skerry.protocol.messages import MemberRecord
from skerry.settings.models import RunConfig
from skerry_health_monitor.metrics.sinks import Journal, Row
from skerry_tools.plan.calibration import (
    NEVER_S,
    Incarnation,
    RunHistory,
    answer,
    fit,
    history,
    predict,
    read_rows,
)
from skerry_tools.plan.simulation import Faults, simulate
from skerry_tools.plan.simulation_answer import as_toml, setup_of

RUN, BEGAN_S = "real", 1_000_000.0
LOST_S = 2 * 19.0 + 10.0 + 20.0 + 1.0
"""Of 400 s of two learners: two starts, being down, a restart and what was done again."""


def member(learner: str, incarnation: int, at_s: float) -> MemberRecord:
    return MemberRecord(RUN, learner, incarnation, "host", round((BEGAN_S + at_s) * 1e9), 0)


def row(
    at_s: float, ratios: dict[str, float], learners: dict[str, dict[str, float]]
) -> dict[str, float]:
    found = {"time_s": BEGAN_S + at_s, "skerry.goodput.ratio": ratios["train"]}
    for cause in Cause:
        found[f"skerry.badput.ratio{{cause={cause}}}"] = ratios.get(cause, 0.0)
    for name, values in learners.items():
        found[f"skerry.learner.incarnation{{learner={name}}}"] = values["incarnation"]
        found[f"skerry.learner.silence{{learner={name}}}"] = 0.0
        found[f"skerry.step.time{{learner={name}}}"] = values.get("step", 0.5)
        for use in ("train", "compile", "recover", "idle", "replay", "wait"):
            found[f"skerry.learner.time{{learner={name},use={use}}}"] = values.get(use, 0.0)
    return found


MEMBERS = [member("a", 1, 0.0), member("b", 1, 0.0), member("b", 2, 112.0)]
RATIOS = {"train": 0.83, Cause.COMPILE: 0.12, Cause.IDLE: 0.01, Cause.DOWN: 0.04}
START = {"compile": 17.0, "recover": 1.0}
AGAIN = {"compile": 18.0, "recover": 2.0}
ROWS = [
    row(100.0, RATIOS, {
        "a": {"incarnation": 1, "train": 82.0, "step": 0.4, **START},
        "b": {"incarnation": 1, "train": 80.0, "step": 0.6, **AGAIN},
    }),
    row(200.0, RATIOS, {
        "a": {"incarnation": 1, "train": 178.0, "idle": 4.0, "step": 0.4, **START},
        "b": {"incarnation": 2, "train": 69.0, "replay": 1.0, "step": 0.6, **AGAIN},
    }),
]  # fmt: skip

NO_ROWS = [
    "{not a row", "[1]", '{"time_s": 1, "run": "other"}', '{"run": "real", "time_s": NaN}',
    '{"run": "real", "time_s": 1, "skerry.goodput.ratio": "much", "x{=": 1}',
    f'{{"run": "real", "time_s": 1{"0" * 400}, "skerry.goodput.ratio": Infinity}}',
]  # fmt: skip


def known(rows: list[dict[str, float]] = ROWS) -> RunHistory:
    """Two learners for 200 s; b dies at 100 s, is back at 110 s and trains at 130 s."""
    lines = [json.dumps({"run": RUN, "step": 1, **one}) for one in rows]
    return history(RUN, MEMBERS, [], [*lines, *NO_ROWS])


def values(run: RunHistory) -> dict[str, float]:
    return {one.name: one.value for one in fit(run)}


def test_a_run_teaches_what_it_shows() -> None:
    assert values(known()) == pytest.approx({
        "wall": 200.0, "first_start": 19.0, "step": 0.5, "spread": 0.2, "restart": 20.0,
        "replay": 1.0, "idle": 4.0 / (178 + 80 + 69 + 4), "upload": 0.0, "down": 10.0,
        "down_spread": 1e-3, "between_failures": 178 + 80 + 69,
    })  # fmt: skip


def test_the_same_run_is_predicted() -> None:
    found = predict(known(), known(), RunConfig())
    expected = (400.0 - LOST_S) / 400.0 * (1.0 - values(known())["idle"])
    assert found.outcome.goodput == pytest.approx(expected, abs=1e-6)
    assert found.off_points == pytest.approx(100 * (expected - 0.83))
    given = answer(found)
    assert f"{found.off_points:+.1f} points" in given.text[0]
    shares = json.loads(json.dumps(given.json, allow_nan=False))["figures"]["compared"]
    assert shares["starting"]["measured"]["value"] == pytest.approx(0.12)
    assert shares["away"]["predicted"]["value"] == pytest.approx(10.0 / 400.0)


def test_a_fault_plan_is_laid_upon_the_first_restart() -> None:
    happened = predict(known(), known(), RunConfig())
    away = next(one for one in happened.faults.absences[1] if one.restart)
    planned = Faults({1: [type(away)(7.0, 7.0 + away.end_s - away.begin_s)]}, {0: [(1.0, 2.0)]})
    found = predict(known(), known(), RunConfig(), faults=planned)
    assert found.outcome.goodput == pytest.approx(happened.outcome.goodput)
    assert found.faults.cut == {0: ((away.begin_s - 6.0, away.begin_s - 5.0),)}


def test_a_run_without_failures_teaches_no_law() -> None:
    one = {"incarnation": 1, "train": 90.0, "compile": 10.0}
    rows = [json.dumps({"run": RUN, **row(100.0, {"train": 0.9, Cause.COMPILE: 0.1}, {"a": one})})]
    calm = history(RUN, [member("a", 1, 0.0)], [], rows)
    assert values(calm)["between_failures"] == NEVER_S
    assert simulate(predict(calm, calm, RunConfig()).scenario).failures == 0


def test_what_a_run_taught_is_a_scenario_that_can_be_kept(tmp_path: Path) -> None:
    away = 'outages=[{"learners": [1], "begin": "1 min", "lasts": "2 min"}]'
    asked = predict(known(), known(), RunConfig(), ["simulation.days=0.1", away]).scenario
    path = tmp_path / "like-real.toml"
    path.write_text(as_toml(asked), "utf-8")
    again = setup_of(str(path), [])
    assert again.question.tables == asked.question.tables.model_copy(update={"kind": "simulation"})
    assert again.question.run.sync == asked.question.run.sync
    assert again.question.tables.status["pauses.upscale_s"].startswith("fitted")
    assert simulate(again).goodput == simulate(asked).goodput


def test_a_run_that_never_trained_or_files_that_cannot_be_read_teach_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        history(RUN, [member("a", 1, 0.0)], [], [])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_rows(tmp_path / "none.jsonl"))
    (tmp_path / "metrics.jsonl").write_text("{}\n", "utf-8")
    (tmp_path / "metrics.jsonl.1.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_rows(tmp_path / "metrics.jsonl"))


def test_rows_that_the_monitor_has_set_aside_come_first(tmp_path: Path) -> None:
    written = Journal(tmp_path / "metrics.jsonl", RUN, most_bytes=200, keep=12)
    for step in range(60):
        written.write(Row(BEGAN_S + step, step, {"x": 1.0}))
    assert (tmp_path / "metrics.jsonl.10.gz").exists(), "2 comes before 10"
    steps = [json.loads(line)["step"] for line in read_rows(written.path)]
    assert len(steps) > 24
    assert steps == list(range(60 - len(steps), 60))


def test_a_run_teaches_the_same_from_the_monitors_own_file(tmp_path: Path) -> None:
    written = Journal(tmp_path / "metrics.jsonl", RUN, most_bytes=1500, keep=8)
    for one in ROWS:
        written.write(Row(one["time_s"], 1, {k: v for k, v in one.items() if k != "time_s"}))
    assert (tmp_path / "metrics.jsonl.1.gz").exists()
    assert fit(history(RUN, MEMBERS, [], read_rows(written.path))) == fit(known())


def test_a_start_that_never_trained_counts_as_time_away() -> None:
    """Learner b was killed again while it compiled, and no row ever saw that start."""
    before = known()
    killed = Incarnation("b", 2, BEGAN_S + 112.0)
    back = Incarnation("b", 3, BEGAN_S + 200.0, {"train": 50.0, "compile": 20.0}, 0.6)
    first = [life for life in before.lives if life.number == 1]
    lives = (*first, killed, back)
    found = RunHistory(RUN, before.joined_s, lives, before.ratios, before.ended_s)
    again = predict(found, found, RunConfig())
    assert values(found)["restart"] == pytest.approx(20.0)
    lost_s = 2 * 19.0 + (130.0 - 100.0) + 20.0
    kept = 1.0 - values(found)["idle"]
    assert again.outcome.goodput == pytest.approx((400.0 - lost_s) / 400.0 * kept, abs=1e-6)
