"""What ``list`` and ``verify`` print."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from skerry.store.manifest import outer_file
from skerry_checkpointer.__main__ import checkpoints as app

runner = CliRunner()


def test_list_prints_one_line_per_checkpoint(saved: Path) -> None:
    result = runner.invoke(app, ["list", "--set", f"store.path={saved.parent.parent}"])
    assert result.exit_code == 0
    assert saved.name in result.stdout


def test_list_as_json_holds_what_a_program_needs(saved: Path) -> None:
    result = runner.invoke(app, ["list", "--json", "--set", f"store.path={saved.parent.parent}"])
    (found,) = json.loads(result.stdout)
    assert (found["path"], found["step"], found["tokens"]) == (str(saved), 7, 70)


def test_list_of_one_run_leaves_others_out(saved: Path) -> None:
    where = ["--set", f"store.path={saved.parent.parent}", "--json"]
    for run, count in (("run", 1), ("other", 0)):
        result = runner.invoke(app, ["list", "--run", run, *where])
        assert len(json.loads(result.stdout)) == count


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    result = runner.invoke(app, ["list", "--set", f"store.path={tmp_path}"])
    assert (result.exit_code, result.stdout) == (0, f"No checkpoints below {tmp_path}.\n")


def test_verify_says_that_a_checkpoint_is_whole(saved: Path) -> None:
    result = runner.invoke(app, ["verify", str(saved)])
    assert result.exit_code == 0
    assert "is whole: run run, step 7" in result.stdout


def test_verify_of_a_damaged_one_names_the_file_and_fails(saved: Path) -> None:
    (saved / outer_file(0)).write_bytes(b"")
    result = runner.invoke(app, ["verify", str(saved)])
    assert result.exit_code == 1
    assert str(saved / outer_file(0)) in result.stderr
    assert "Traceback" not in result.output


def test_verify_as_json_tells_both_outcomes(saved: Path) -> None:
    whole = runner.invoke(app, ["verify", "--json", str(saved)])
    (saved / outer_file(0)).write_bytes(b"")
    damaged = runner.invoke(app, ["verify", "--json", str(saved)])
    assert (whole.exit_code, json.loads(whole.stdout)["ok"]) == (0, True)
    assert (damaged.exit_code, json.loads(damaged.stdout)["ok"]) == (1, False)


def test_a_path_without_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = runner.invoke(app, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: There is no checkpoint at")
