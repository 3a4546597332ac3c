"""What ``list`` and ``verify`` print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from skerry.log.memory import MemoryBroker
from skerry.store.checkpoint import snapshot_file
from skerry.store.finding import FROM_ENVIRONMENT
from skerry.store.local import LocalStore
from skerry_checkpointer.__main__ import checkpoints as app
from skerry_checkpointer.commands import print_restored
from tests.support.checkpoints import begun, save


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


def test_list_prints_one_line_per_checkpoint_and_json_of_one_run(saved: Path) -> None:
    where = ("--set", f"store.path={saved.parent.parent}")
    shown = run("list", *where)
    assert (shown.exit_code, saved.name in shown.stdout) == (0, True)
    (found,) = json.loads(run("list", "--run", "run", "--json", *where).stdout)
    assert (found["path"], found["step"], found["tokens"]) == (str(saved), 7, 70)
    assert json.loads(run("list", "--run", "other", "--json", *where).stdout) == []


def test_list_cuts_no_name_where_a_terminal_is_narrow(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = run("list", "--set", f"store.path={saved.parent.parent}").stdout
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_list_shows_what_is_wrong_with_a_damaged_one(saved: Path) -> None:
    (saved / "manifest.json").write_bytes(b"{}")
    where = ("--set", f"store.path={saved.parent.parent}")
    shown = run("list", *where).stdout
    assert "unreadable" in shown
    assert "digest does not match" in shown, "in one line, below the table"
    (found,) = json.loads(run("list", "--json", *where).stdout)
    assert "is damaged" in found["error"]


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path) -> None:
    result = run("list", "--set", f"store.path={tmp_path}")
    assert (result.exit_code, result.stdout) == (0, f"No checkpoints below {tmp_path}.\n")


def test_verify_says_whether_a_checkpoint_is_whole_and_which_file_is_damaged(saved: Path) -> None:
    whole = run("verify", saved)
    assert (whole.exit_code, "is whole: run run, step 7" in whole.stdout) == (0, True)
    assert json.loads(run("verify", "--json", saved).stdout)["ok"]
    (saved / snapshot_file(0)).write_bytes(b"")
    damaged, as_json = run("verify", saved), run("verify", "--json", saved)
    assert (damaged.exit_code, as_json.exit_code) == (1, 1)
    assert str(saved / snapshot_file(0)) in damaged.stderr
    assert "Traceback" not in damaged.output
    assert not json.loads(as_json.stdout)["ok"]


def test_a_path_without_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: There is no checkpoint at")


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("exact", "said"),
    [
        (False, "What learners had at version 3 goes on with the outer optimizer of version 1; "),
        (True, ", back at its snapshots of version 1."),
    ],
)
async def test_a_restore_says_from_which_versions_the_run_goes_on(
    store: LocalStore, capsys: pytest.CaptureFixture[str], exact: bool, said: str
) -> None:
    scripted = await begun()
    await scripted.commit_all()
    for _ in range(2):
        await scripted.commit(1, whole=False)
    where = store.where(await save(scripted, store))
    bus = MemoryBroker().connect()
    how = {"put_back": False, "exact": exact}
    await print_restored(bus, where, "again", [], FROM_ENVIRONMENT, **how)
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line


@pytest.mark.usefixtures("silent")
async def test_a_run_that_lost_nothing_is_said_to_have_been_left_as_it_was(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = await begun()
    await scripted.commit_all()
    where = store.where(await save(scripted, store))
    how = {"put_back": True, "exact": False}
    await print_restored(scripted.bus, where, "run", [], FROM_ENVIRONMENT, **how)
    assert "and none was written" in capsys.readouterr().out
