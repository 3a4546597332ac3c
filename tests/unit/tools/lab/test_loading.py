"""From files and the command line to a scenario; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import ConfigError
from skerry_tools.lab.scenario import REFERENCE, LabScenario, load

FILE = """
seed = 3
[sync]
h_steps = 16
[link]
latency_s = 0.1
[failures]
islands = ["a"]
every_s = 30.0
[[islands]]
name = "a"
step_s = 0.2
[[islands]]
name = "b"
joins = 0.25
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(FILE)
    return path


def test_nothing_said_is_the_small_reference_model() -> None:
    scenario = load(environ={})
    assert scenario.run.model == REFERENCE
    assert (scenario.run.data.batch, scenario.run.data.seq_len) == (4, 64)
    assert len(scenario.fleet) == scenario.run.sync.learners == 2


def test_a_file_says_islands_links_and_failures(file: Path) -> None:
    scenario = load(file, environ={})
    assert scenario.name == "two"
    assert scenario.seed == 3
    assert scenario.run.sync.h_steps == 16
    assert scenario.link.latency_s == 0.1
    assert scenario.failures.islands == ("a",)
    assert [island.step_s for island in scenario.islands] == [0.2, 0.1]


def test_a_run_is_laid_out_for_the_islands_that_are_there_from_the_start(file: Path) -> None:
    assert load(file, environ={}).run.sync.learners == 1


def test_a_runs_own_file_is_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "micro"\n[nats]\nurl = "nats://h:1"\n[data]\nbatch = 2\n')
    scenario = load(path, environ={})
    assert scenario.run.model.preset == "micro"
    assert scenario.run.model.layers is None
    assert scenario.run.data.batch == 2


def test_later_sources_win(file: Path) -> None:
    environ = {"SKERRY_SYNC__H_STEPS": "20", "SKERRY_TRAIN__STEPS": "60"}
    scenario = load(file, ["train.steps=70", "link.latency_s=0.2"], seed=9, environ=environ)
    assert scenario.run.sync.h_steps == 20
    assert scenario.run.train.steps == 70
    assert scenario.link.latency_s == 0.2
    assert scenario.seed == 9


def test_as_many_learners_as_asked_for() -> None:
    scenario = load(None, ["mode=streaming"], learners=5, environ={})
    assert len(scenario.fleet) == scenario.run.sync.learners == scenario.run.sync.quorum == 5


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("link.latency=1", r"link\.latency \(from --set\) is not a setting: did you mean link\.l"),
        ("link.latency_s=-1", r"link\.latency_s \(from --set\) is -1, but it must be at least 0"),
        ("sync.h_step=1", r"sync\.h_step \(from --set\) is not a setting"),
        ("sync.quorum=5", r"sync\.quorum is 5"),
        ('failures.islands=["x"]', r"failures\.islands has 'x', which is no island"),
        ('islands=[{name="a"},{name="a"}]', r"islands has 'a' 2 times"),
        ('islands=[{name="a",step_s=0}]', r"islands\.0\.step_s \(from --set\) is 0, but it must"),
        ('islands=[{name="a",speed=2}]', r"islands\.0\.speed \(from --set\) is 2"),
        ('islands=[{name="a",joins=0.5}]', "0 that are there from the start, but sync.quorum is 1"),
        ('islands=[{name="a",leaves=0.1},{name="b",joins=0.5,leaves=0.2}]', "let it leave later"),
        ('islands=[{name="a b"}]', "'a b' cannot be part of a subject"),
    ],
)
def test_what_is_wrong_is_named(said: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(None, [said], environ={})


def test_learners_and_islands_exclude_each_other(file: Path) -> None:
    with pytest.raises(ConfigError, match="--learners"):
        load(file, learners=2, environ={})


def test_equal_scenarios_have_equal_digests() -> None:
    assert LabScenario(seed=1).digest == LabScenario(seed=1).digest != LabScenario(seed=2).digest
