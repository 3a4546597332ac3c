"""``skerry init`` and ``skerry config show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skerry.cli import config
from skerry.cli.config import Machine, fitting
from skerry.cli.main import app
from skerry.settings.loading import load

LAPTOP = Machine(cores=8, memory_bytes=16 * 2**30, accelerators=0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config.Machine, "this", classmethod(lambda _cls: LAPTOP))
    return tmp_path


def run(*words: str) -> str:
    """Return what a command line prints."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_init_writes_settings_for_the_users_text(folder: Path) -> None:
    (folder / "books").mkdir()
    (folder / "books" / "one.tex").write_text("word " * 50_000)
    assert "3 learners, 325 steps" in run("init", "books", "--learners", "3")
    made = load(folder / "run.toml", environ={}).run
    assert made.data.paths == (str(folder / "books"),)
    assert made.data.suffixes == (".tex",)
    assert (made.sync.learners, made.train.steps, made.model.preset) == (3, 325, "micro")


def test_init_says_where_learners_have_to_share_cores(folder: Path) -> None:
    assert "99 learners share 8 cores" in run("init", "--learners", "99", "--out", "many.toml")
    assert "share" not in run("init", "--learners", "8")
    assert folder.exists()


def test_init_prints_a_command_that_a_shell_reads_as_meant(folder: Path) -> None:
    assert "skerry up 'my run.toml'\n" in run("init", "--out", "my run.toml")
    assert "skerry up 'my run.toml'\n" in (folder / "my run.toml").read_text()


def test_init_leaves_a_file_that_is_there(folder: Path) -> None:
    (folder / "run.toml").write_text("# mine")
    done = CliRunner().invoke(app, ["init"])
    assert (done.exit_code, (folder / "run.toml").read_text()) == (2, "# mine")
    run("init", "--force")
    assert load(folder / "run.toml", environ={}).run.data.source == "stdlib"


@pytest.mark.parametrize(
    ("machine", "preset"),
    [
        (Machine(2, 4 * 2**30, 0), "nano"),
        (LAPTOP, "micro"),
        (Machine(8, 24 * 2**30, 1), "base"),
        (Machine(8, 2 * 2**30, 1), "micro"),
    ],
)
def test_a_model_fits_time_and_memory(machine: Machine, preset: str) -> None:
    assert fitting(machine, 2)[0] == preset


def test_config_show_says_what_set_each_value(folder: Path) -> None:
    (folder / "run.toml").write_text('mode = "diloco"\n[sync]\nh_steps = 6\nlearners = 3\n')
    shown = CliRunner().invoke(
        app,
        ["config", "show", "run.toml", "--set", "train.steps=7", "--json"],
        env={
            "SKERRY_DATA__BATCH": "4",
            "SKERRY_NATS__URL": "nats://me:hush@far:4222",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:hush@far:4318",
        },
    )
    assert shown.exit_code == 0, shown.output
    rows = {row["setting"]: (row["value"], row["origin"]) for row in json.loads(shown.output)}
    assert rows["mode"] == ("diloco", "run.toml")
    assert rows["sync.h_steps"] == (6, "run.toml")
    assert rows["sync.quorum"] == (3, 'mode "diloco"')
    assert rows["train.steps"] == (7, "--set")
    assert rows["data.batch"] == (4, "SKERRY_DATA__BATCH")
    assert rows["train.lr"][1] == "default"
    assert "hush" not in shown.output


def test_what_config_show_prints_is_a_config(folder: Path) -> None:
    (folder / "again.toml").write_text(run("config", "show", "--set", "sync.h_steps=6"))
    assert load(folder / "again.toml", environ={}) == load(sets=["sync.h_steps=6"], environ={})
