"""A run's folders: one cluster at a time, found by other commands while it runs."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from skerry.cli.cluster.place import Place, RunInUse, log_file, resting, running
from skerry.cli.cluster.run import prepared
from skerry.cli.page import token_kept
from skerry.errors import ConfigError
from skerry.settings.loading import load
from skerry.settings.models import Settings


def test_a_second_cluster_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    with (
        place.held(),
        pytest.raises(RunInUse, match=f"Process {os.getpid()} runs 'a'"),
        place.held(),
    ):
        pass


def test_a_folder_is_free_again_afterwards(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    with place.held():
        pass
    with place.held():
        assert place.folder.is_dir()


def test_a_second_drill_of_the_same_cluster_is_refused_until_the_first_is_over(
    tmp_path: Path,
) -> None:
    place = Place("a", tmp_path)
    with place.held(), place.drilled():
        with (
            pytest.raises(RunInUse, match=f"Process {os.getpid()} drills 'a' already.*verdict"),
            place.drilled(),
        ):
            pass
        with Place("b", tmp_path).drilled():
            pass
    with place.drilled():
        pass


def test_other_runs_do_not_mind(tmp_path: Path) -> None:
    with Place("a", tmp_path).held(), Place("b", tmp_path).held():
        assert (tmp_path / "b").is_dir()


def test_a_run_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run '\.\./x'"):
        Place("../x", tmp_path)


def test_a_running_cluster_is_found_until_it_ends(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    with place.held(), place.announced("nats://127.0.0.1:5"):
        assert [(c.run, c.url) for c in running(tmp_path)] == [("a", "nats://127.0.0.1:5")]
    assert running(tmp_path) == []


def test_what_a_killed_cluster_left_behind_is_not_found(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    place.folder.mkdir()
    place.cluster.write_text('{"run": "a", "url": "nats://x", "pid": 4194305}')
    assert running(tmp_path) == []


def test_starting_anew_keeps_checkpoints(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    kept = tmp_path / "checkpoints" / "a" / "step-1"
    for folder in (place.broker / "jetstream", place.logs, kept):
        folder.mkdir(parents=True)
    assert place.has_state
    place.start_anew()
    assert not place.has_state
    assert not place.logs.exists()
    assert kept.is_dir()


def test_what_a_command_owns_goes_with_its_run(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "a"
    kept.mkdir(parents=True)
    Place("a", tmp_path).start_anew(kept)
    assert not kept.exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = Place("a", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be written .Not a directory.*of your own"):
        place.held().__enter__()


@contextlib.contextmanager
def full_disk() -> Generator[None]:
    """No file of this process may grow: Python leaves the signal of it to the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def preparing(place: Place) -> Generator[None]:
    prepared(Settings(), "nats://127.0.0.1:5", place)
    yield


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("lock", Place.held),
        ("drill.lock", Place.drilled),
        ("cluster.json", lambda place: place.announced("nats://127.0.0.1:5")),
        ("settings.toml", preparing),
        ("page.token", token_kept),
    ],
)
def test_a_full_disk_is_one_sentence_whatever_is_written(
    tmp_path: Path, name: str, written: Callable[[Place], AbstractContextManager[None]]
) -> None:
    place = Place("a", tmp_path)
    place.folder.mkdir()
    words = rf"/a/{name} cannot be written .File too large.: .* where there is room\.$"
    with pytest.raises(ConfigError, match=words), full_disk(), written(place):
        pass


def test_settings_that_cannot_be_written_leave_the_earlier_ones(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    prepared(Settings(), "nats://127.0.0.1:5", place)
    before = place.settings.read_bytes()
    with pytest.raises(ConfigError), full_disk():
        prepared(Settings(), "nats://127.0.0.1:6", place)
    assert place.settings.read_bytes() == before


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match=r"/logs/a\.log cannot be written \(File exists\)"):
        log_file(tmp_path / "logs" / "a.log")


def test_logs_at_rest_are_found_newest_first(tmp_path: Path) -> None:
    for at_s, run in enumerate(("old", "new")):
        place = Place(run, tmp_path)
        (place.broker / "jetstream").mkdir(parents=True)
        place.settings.touch()
        os.utime(place.settings, (at_s, at_s))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "settings.toml").touch()
    assert [place.run for place in resting(tmp_path)] == ["new", "old"]


def test_starting_anew_begins_new_metrics(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    place.folder.mkdir()
    for name in ("metrics.jsonl", "metrics.jsonl.1"):
        (place.folder / name).write_text("{}\n")
    place.settings.write_text("")
    place.start_anew()
    assert [path.name for path in place.folder.iterdir()] == ["settings.toml"]


def test_services_are_told_where_metrics_go_and_where_the_broker_tells_of_itself(
    tmp_path: Path,
) -> None:
    place = Place("a", tmp_path)
    prepared(Settings(), "nats://127.0.0.1:5", place, "http://127.0.0.1:6")
    found = load(place.settings, (), {}).local
    assert found.telemetry.jsonl == place.folder / "metrics.jsonl"
    assert found.metrics.broker_urls == ("http://127.0.0.1:6",)


def test_what_the_user_has_set_about_metrics_stays(tmp_path: Path) -> None:
    place = Place("a", tmp_path)
    given = load(
        None, [f'telemetry.jsonl="{tmp_path}/mine"', 'metrics.broker="http://b:1, http://c:2"'], {}
    )
    prepared(given, "nats://127.0.0.1:5", place, "http://127.0.0.1:6")
    found = load(place.settings, (), {}).local
    assert found.telemetry.jsonl == tmp_path / "mine"
    assert found.metrics.broker_urls == ("http://b:1", "http://c:2")


def test_a_monitoring_address_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.broker.*http://127\.0\.0\.1:8222"):
        load(None, ["metrics.broker=nats://b:4222"], {})
