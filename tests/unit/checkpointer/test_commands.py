"""What ``list`` and ``verify`` print."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from skerry.store.checkpoint import outer_file
from skerry_checkpointer.__main__ import checkpoints as app


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_list_prints_one_line_per_checkpoint_and_json_of_one_run(saved: Path) -> None:
    where = ("--set", f"store.path={saved.parent.parent}")
    shown = run("list", *where)
    assert (shown.exit_code, saved.name in shown.stdout) == (0, True)
    (found,) = json.loads(run("list", "--run", "run", "--json", *where).stdout)
    assert (found["path"], found["step"], found["tokens"]) == (str(saved), 7, 70)
    assert json.loads(run("list", "--run", "other", "--json", *where).stdout) == []


def test_list_shows_what_is_wrong_with_a_damaged_one(saved: Path) -> None:
    (saved / "manifest.json").write_bytes(b"{}")
    where = ("--set", f"store.path={saved.parent.parent}")
    assert "unreadable" in run("list", *where).stdout
    (found,) = json.loads(run("list", "--json", *where).stdout)
    assert "is damaged" in found["error"]


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    result = run("list", "--set", f"store.path={tmp_path}")
    assert (result.exit_code, result.stdout) == (0, f"No checkpoints below {tmp_path}.\n")


def test_verify_says_whether_a_checkpoint_is_whole_and_which_file_is_damaged(saved: Path) -> None:
    whole = run("verify", saved)
    assert (whole.exit_code, "is whole: run run, step 7" in whole.stdout) == (0, True)
    assert json.loads(run("verify", "--json", saved).stdout)["ok"]
    (saved / outer_file(0)).write_bytes(b"")
    damaged, as_json = run("verify", saved), run("verify", "--json", saved)
    assert (damaged.exit_code, as_json.exit_code) == (1, 1)
    assert str(saved / outer_file(0)) in damaged.stderr
    assert "Traceback" not in damaged.output
    assert not json.loads(as_json.stdout)["ok"]


def test_a_path_without_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: There is no checkpoint at")
