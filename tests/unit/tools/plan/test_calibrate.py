"""What a run's ledger and rows teach, and that a run made by the simulator is learnt back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skerry.algorithm.goodput import Cause
from skerry.errors import ConfigError
from skerry.protocol.messages import MemberRecord
from skerry.settings.models import RunConfig
from skerry_health_monitor.metrics.sinks import Journal, Row
from skerry_tools.plan import calibrate, journal, prediction, scenario
from skerry_tools.plan.process import Use
from skerry_tools.plan.simulate import simulate

RUN, BEGAN_S = "real", 1_000_000.0
CONFIG = RunConfig()


def member(learner: str, incarnation: int, at_s: float) -> MemberRecord:
    return MemberRecord(RUN, learner, incarnation, "host", round((BEGAN_S + at_s) * 1e9), 0)


def row(at_s: float, ratios: dict[str, float], learners: dict[str, dict[str, float]]) -> str:
    told: dict[str, object] = {"time_s": BEGAN_S + at_s, "run": RUN, "step": 1}
    told["skerry.goodput.ratio"] = ratios["train"]
    for cause in Cause:
        told[f"skerry.badput.ratio{{cause={cause}}}"] = ratios.get(cause, 0.0)
    for name, values in learners.items():
        told[f"skerry.learner.incarnation{{learner={name}}}"] = values["incarnation"]
        told[f"skerry.learner.silence{{learner={name}}}"] = values.get("silence", 0.0)
        told[f"skerry.step.time{{learner={name}}}"] = values.get("step", 0.5)
        for use in ("train", "compile", "recover", "idle", "replay", "wait"):
            told[f"skerry.learner.time{{learner={name},use={use}}}"] = values.get(use, 0.0)
    return json.dumps(told)


MEMBERS = [member("a", 1, 0.0), member("b", 1, 0.0), member("b", 2, 112.0)]


def known() -> calibrate.Evidence:
    """Two learners for 200 s; learner-b dies at 100 s, is back at 110 s and trains at 130 s."""
    return calibrate.evidence(RUN, MEMBERS, [], known_rows())


def known_rows() -> list[str]:
    ratios = {"train": 0.83, Cause.COMPILE: 0.12, Cause.IDLE: 0.01, Cause.DOWN: 0.04}
    return [
        row(100.0, ratios, {
            "a": {"incarnation": 1, "train": 82.0, "compile": 17.0, "recover": 1.0, "step": 0.4},
            "b": {"incarnation": 1, "train": 80.0, "compile": 18.0, "recover": 2.0, "step": 0.6},
        }),
        "{not a row",
        json.dumps({"time_s": 1, "run": "other"}),
        row(200.0, ratios, {
            "a": {"incarnation": 1, "train": 178.0, "compile": 17.0, "recover": 1.0, "idle": 4.0,
                  "step": 0.4},
            "b": {"incarnation": 2, "train": 69.0, "compile": 18.0, "recover": 2.0, "idle": 0.0,
                  "replay": 1.0, "step": 0.6},
        }),
    ]  # fmt: skip


def test_a_run_teaches_what_it_shows() -> None:
    found = calibrate.fit(known())
    assert found.learners == 2
    assert found.wall_s == pytest.approx(200.0)
    assert found.step_s == pytest.approx(0.5)
    assert found.spread == pytest.approx(0.2)
    assert found.start_s == pytest.approx(19.0)
    assert found.restart_s == pytest.approx(20.0)
    assert found.down_s == pytest.approx(10.0)
    assert found.replay_s == pytest.approx(1.0)
    assert found.idle == pytest.approx(4.0 / (178 + 80 + 69 + 4))
    assert found.mtbi_s == pytest.approx(178 + 80 + 69)


def test_the_same_run_is_told_again() -> None:
    told = prediction.predict(known(), known(), CONFIG)
    lost = 2 * 19.0 + 10.0 + 20.0 + 1.0
    expected = (400.0 - lost) / 400.0 * (1.0 - told.calibration.idle)
    assert told.outcome.goodput == pytest.approx(expected, abs=1e-6)
    assert told.off_points == pytest.approx(100 * (expected - 0.83))
    assert told.actual.split[Use.UPSCALE] == pytest.approx(0.12)
    said = "\n".join(prediction.lines(told))
    assert f"{told.off_points:+.1f} points" in said
    json.dumps(prediction.as_json(told), allow_nan=False)


def test_a_run_without_failures_teaches_no_law() -> None:
    ratios = {"train": 0.9, Cause.COMPILE: 0.1}
    one = {"incarnation": 1, "train": 90.0, "compile": 10.0}
    calm = calibrate.evidence(RUN, [member("a", 1, 0.0)], [], [row(100.0, ratios, {"a": one})])
    found = calibrate.fit(calm)
    assert found.mtbi_s == calibrate.NEVER_S
    assert found.seen["restart_s"] == 0
    assert simulate(prediction.scenario_of(calm, CONFIG)).failures == 0


def test_what_a_run_taught_is_a_scenario_that_can_be_kept(tmp_path: Path) -> None:
    asked = prediction.scenario_of(known(), CONFIG, [
        "simulation.days=0.1",
        'outages=[{"learners": [1], "begin": "1 min", "lasts": "2 min"}]',
    ])  # fmt: skip
    path = tmp_path / "like-real.toml"
    path.write_text(scenario.as_toml(asked), "utf-8")
    again = scenario.read(str(path))
    assert again.scene == asked.scene
    assert again.run.sync == asked.run.sync
    assert again.status["pauses.upscale_s"].startswith("fitted")
    assert simulate(again).goodput == simulate(asked).goodput


def test_a_run_that_never_trained_teaches_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--metrics"):
        calibrate.evidence(RUN, [member("a", 1, 0.0)], [], [])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(journal.read_rows(tmp_path / "none.jsonl"))


def test_rows_that_the_monitor_has_set_aside_come_first(tmp_path: Path) -> None:
    written = Journal(tmp_path / "metrics.jsonl", RUN, most_bytes=200, keep=12)
    for step in range(60):
        written.write(Row(BEGAN_S + step, step, {"x": 1.0}))
    assert (tmp_path / "metrics.jsonl.10.gz").exists(), "2 comes before 10"
    steps = [json.loads(line)["step"] for line in journal.read_rows(written.path)]
    assert len(steps) > 24
    assert steps == list(range(60 - len(steps), 60))


def test_a_run_teaches_the_same_from_files_that_were_set_aside(tmp_path: Path) -> None:
    written = Journal(tmp_path / "metrics.jsonl", RUN, most_bytes=1500, keep=8)
    for one in known_rows():
        row = journal.parsed(one, RUN)
        if row is not None:
            at_s, step = row.pop("time_s"), row.pop("step")
            written.write(Row(at_s, step, {k: v for k, v in row.items() if k != "run"}))
    assert (tmp_path / "metrics.jsonl.1.gz").exists()
    rows = journal.read_rows(written.path)
    again = calibrate.evidence(RUN, MEMBERS, [], rows)
    assert calibrate.fit(again) == calibrate.fit(known())


def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n", "utf-8")
    (tmp_path / "metrics.jsonl.1.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(journal.read_rows(path))


def test_a_start_that_came_to_nothing_counts_as_time_away() -> None:
    """Learner b was killed again while it compiled, and no row ever saw that start."""
    before = known()
    killed = journal.Life("b", 2, BEGAN_S + 112.0, {}, 0.0)
    back = journal.Life("b", 3, BEGAN_S + 200.0, {"train": 50.0, "compile": 20.0}, 0.6)
    first = [life for life in before.lives if life.incarnation == 1]
    found = calibrate.Evidence(
        RUN, before.joined_s, (*first, killed, back), before.ratios, before.ended_s
    )
    told = prediction.predict(found, found, CONFIG)
    assert told.calibration.restart_s == pytest.approx(20.0)
    lost = 2 * 19.0 + (130.0 - 100.0) + 20.0
    kept = 1.0 - told.calibration.idle
    assert told.outcome.goodput == pytest.approx((400.0 - lost) / 400.0 * kept, abs=1e-6)
