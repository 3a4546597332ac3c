"""A run folder: held by one cluster at a time, private, found by other commands meanwhile."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from skerry.cli.cluster.cluster import ServedBroker, prepared
from skerry.cli.cluster.folder import (
    JAX_NOTE,
    RunFolder,
    RunInUse,
    last_event,
    last_sentence,
    log_file,
    resting,
    set_aside,
    size_of,
)
from skerry.cli.cluster.processes import ProcessTable
from skerry.cli.local_log import log_of
from skerry.errors import ConfigError
from skerry.service.clusters import running
from skerry.service.private import private_file, write_private
from skerry.settings.loading import load
from skerry.settings.local import NatsSettings, Settings
from tests.support.processes import full_disk

URL = "nats://127.0.0.1:5"
NATS = NatsSettings(url=URL, credentials=Path("/run/admin.nk"))


def prepare(
    folder: RunFolder, settings: Settings | None = None, url: str = URL, monitor_url: str = ""
) -> Settings:
    """Write the settings of a cluster's services and return them as a service reads them."""
    nats = NATS.model_copy(update={"url": url})
    broker = ServedBroker(nats, ProcessTable(folder.processes), None, monitor_url)
    prepared(settings or Settings(), broker, folder)
    return load(folder.settings, (), {})


@pytest.mark.parametrize(
    ("hold", "words"),
    [(RunFolder.held, "runs 'a'"), (RunFolder.drilled, "drills 'a' already.*verdict")],
)
def test_a_second_cluster_and_a_second_drill_are_refused_until_the_first_is_over(
    folder: RunFolder, hold: Callable[[RunFolder], AbstractContextManager[None]], words: str
) -> None:
    other = RunFolder("b", folder.root)
    in_use = pytest.raises(RunInUse, match=f"Process {os.getpid()} {words}")
    with hold(folder), hold(other), in_use, hold(folder):
        pass
    with folder.held(), folder.drilled():
        pass


def test_a_run_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run '\.\./x'"):
        RunFolder("../x", tmp_path)


def test_a_running_cluster_is_found_and_entered_until_it_ends(folder: RunFolder) -> None:
    with folder.held(), folder.announced(NATS, proxied=True):
        (found,) = running(folder.root)
        assert (found.run, found.pid, found.proxied) == ("a", os.getpid(), True)
        given = NatsSettings(user="me", password_file=Path("/mine"), connect_timeout_s=3.0)
        assert found.reached_with(given) == NATS.model_copy(update={"connect_timeout_s": 3.0})
    assert running(folder.root) == []
    with (
        folder.held(),
        folder.announced(NatsSettings(url=URL)),
    ):  # named by the user: with their credentials
        (found,) = running(folder.root)
    assert found.reached_with(given) == given.model_copy(update={"url": URL})


@pytest.mark.parametrize("lock", [True, False])
@pytest.mark.parametrize("text", ['{"run": "a", "url": "nats://x", "pid": 1}', "[1]", ""])
def test_what_a_killed_cluster_left_or_came_with_a_folder_is_not_found(
    folder: RunFolder, text: str, *, lock: bool
) -> None:
    """It may name a stranger's broker, and any file of ours as the password for it."""
    (folder.path / "cluster.json").write_text(text)
    if lock:
        (folder.path / "lock").write_text("1\n")
    assert running(folder.root) == []


def test_only_the_owner_can_read_what_may_hold_secrets(tmp_path: Path) -> None:
    folder = RunFolder("new", tmp_path)
    prepare(folder, url="nats://me:secret@127.0.0.1:5")
    with folder.announced(NATS), private_file(folder.token, "x"):
        for path in (folder.settings, folder.path / "cluster.json", folder.token):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {path.name for path in folder.path.iterdir()} == {"settings.toml"}


def test_a_private_file_replaces_one_that_others_could_read(folder: RunFolder) -> None:
    folder.token.write_text("old")
    folder.token.chmod(0o666)
    write_private(folder.token, "new")
    assert (folder.token.read_text(), stat.S_IMODE(folder.token.stat().st_mode)) == ("new", 0o600)


def test_starting_afresh_keeps_checkpoints_unless_the_command_owns_them(tmp_path: Path) -> None:
    folder = RunFolder("a", tmp_path)
    kept = tmp_path / "checkpoints" / "a" / "step-1"
    for path in (folder.broker / "jetstream", folder.logs, kept):
        path.mkdir(parents=True)
    for name in ("metrics.jsonl", "metrics.jsonl.1", "settings.toml"):
        (folder.path / name).write_text("\n")
    assert folder.has_log
    folder.start_afresh()
    assert not folder.has_log
    assert [path.name for path in folder.path.iterdir()] == ["settings.toml"]
    assert kept.is_dir()
    folder.start_afresh(kept.parent)
    assert not kept.exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder("a", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be written .Not a directory.*of your own"):
        folder.held().__enter__()
    with pytest.raises(ConfigError, match=r"/a\.log cannot be written \(File exists\)"):
        log_file(tmp_path / "file" / "a.log")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("lock", RunFolder.held),
        ("drill.lock", RunFolder.drilled),
        ("cluster.json", lambda folder: folder.announced(NATS)),
        ("page.token", lambda folder: private_file(folder.token, "x")),
    ],
)
def test_a_full_disk_is_one_sentence_whatever_is_written(
    folder: RunFolder, name: str, written: Callable[[RunFolder], AbstractContextManager[None]]
) -> None:
    words = rf"/a/{name} cannot be written .File too large.: .* where there is room\.$"
    with pytest.raises(ConfigError, match=words), full_disk(), written(folder):
        pass


def test_settings_that_cannot_be_written_leave_the_earlier_ones(folder: RunFolder) -> None:
    prepare(folder)
    before = folder.settings.read_bytes()
    with pytest.raises(ConfigError, match=r"settings\.toml cannot be written"), full_disk():
        prepare(folder, url="nats://127.0.0.1:6")
    assert folder.settings.read_bytes() == before


def test_logs_at_rest_are_found_newest_first(tmp_path: Path) -> None:
    for at_s, run in enumerate(("old", "new")):
        folder = RunFolder(run, tmp_path)
        (folder.broker / "jetstream").mkdir(parents=True)
        folder.settings.touch()
        os.utime(folder.settings, (at_s, at_s))
    shutil.copytree(tmp_path / "new", tmp_path / "new.before")  # no run has such a name
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "settings.toml").touch()
    assert [folder.run for folder in resting(tmp_path)] == ["new", "old"]


async def test_a_log_that_is_in_use_can_be_read_later(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.cli.local_log.resting", lambda: [folder])
    with folder.held(), pytest.raises(RunInUse, match=f"Process {os.getpid()} works .* try again"):
        async with log_of(load(None, [], {}), None, named=False):
            pytest.fail("it is in use")


def test_services_are_given_the_broker_and_where_metrics_go_unless_the_user_says(
    folder: RunFolder,
) -> None:
    local = prepare(folder, monitor_url="http://127.0.0.1:6").local
    assert local.nats == NATS
    assert local.telemetry.jsonl == folder.path / "metrics.jsonl"
    assert local.metrics.broker_urls == ("http://127.0.0.1:6",)
    assert local.store.path.is_absolute()
    mine = folder.root / "mine"
    given = [f'telemetry.jsonl="{mine}"', 'metrics.broker="http://b:1, http://c:2"']
    local = prepare(folder, load(None, given, {}), monitor_url="http://127.0.0.1:6").local
    assert local.telemetry.jsonl == mine
    assert local.metrics.broker_urls == ("http://b:1", "http://c:2")


def test_a_monitoring_address_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.broker.*http://127\.0\.0\.1:8222"):
        load(None, ["metrics.broker=nats://b:4222"], {})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        ("error: x is 3.\n", "x is 3."),
        ("error: first.\nerror: second.\n{}\n", "second."),
        ("error: x is 3.\nUserWarning: beware\n", "x is 3."),
        ("Traceback (most recent call last):\n  File\nValueError: no\n\n", "ValueError: no"),
        (f"  | TypeError: no\n  | {'-' * 20}\n  | {JAX_NOTE}. Set\n  +---\n", "TypeError: no"),
        ('{"event": "stopped"}\n', ""),
    ],
)
def test_the_expected_error_of_this_start_comes_before_all_else_in_a_log(
    tmp_path: Path, text: str, sentence: str
) -> None:
    log = tmp_path / "a.log"
    assert last_sentence(log, size_of(log)) == ""
    log.write_text("error: old.\n")
    offset = size_of(log)
    with log.open("a") as file:
        file.write(text)
    assert last_sentence(log, offset) == sentence


def test_the_error_in_a_log_that_was_truncated_meanwhile_is_found(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("error: x is 3.\n")
    assert last_sentence(log, 1000) == "x is 3."


def test_a_log_that_is_too_long_is_set_aside_and_its_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.cli.cluster.folder.LOG_BYTES", 4)
    log = tmp_path / "a.log"
    set_aside(log)  # which is not there yet
    with log_file(log) as writer:
        for text in ("long\n", "next\n", "new\n"):
            writer.write(text.encode())
            writer.flush()
            set_aside(log)
    assert (tmp_path / "a.log.1").read_text() == "next\n"
    assert log.read_text() == "new\n"


def test_a_log_stays_whole_where_it_cannot_be_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.cli.cluster.folder.LOG_BYTES", 4)
    (tmp_path / "a.log.1").mkdir()
    log = tmp_path / "a.log"
    log.write_text("long\n")
    set_aside(log)
    assert log.read_text() == "long\n"


def test_the_newest_event_of_a_name_is_found_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    lines = (
        '{"event": "compiled", "seconds": 2.5}',
        '{"event": "x", "of": "compiled"}',
        '{"compiled"',
    )
    log.write_text("\n".join(('{"event": "compiled", "seconds": 9.0}', *lines)))
    assert last_event(log, 0, "compiled") == {"event": "compiled", "seconds": 2.5}
    assert last_event(log, size_of(log), "compiled") == {}
