"""Rows of metrics are kept in a bounded file, and handed on to trackers that may fail or hang."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import resource
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from skerry.settings.local import MetricsSettings
from skerry_health_monitor.metrics.outlets import (
    MOST_WAITING,
    Journal,
    Outlet,
    Row,
    Sink,
    outlets,
    tag,
    write_rows,
)
from tests.support.builders import background

if TYPE_CHECKING:
    from pathlib import Path


DEADLINE_S = 20.0
ROW = Row(12.5, 7, {"skerry.run.loss": 2.5, "skerry.loss{learner=a}": 2.75})


class Blocked:
    """A sink that takes no row until it may."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.rows: list[Row] = []
        self.sink = Sink(self.write, lambda: None)

    def write(self, row: Row) -> None:
        self.reached.set()
        self.may_go_on.wait(DEADLINE_S)
        self.rows.append(row)


def rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def test_a_row_is_one_line_with_the_moment_and_every_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run" / "metrics.jsonl", "r", most_bytes=10_000, keep=1)
    journal.write(ROW)
    journal.write(Row(13.5, 8, {"skerry.run.loss": float("nan")}))
    assert rows(journal.path) == [
        {
            "time_s": 12.5,
            "run": "r",
            "step": 7,
            "skerry.run.loss": 2.5,
            "skerry.loss{learner=a}": 2.75,
        },
        {"time_s": 13.5, "run": "r", "step": 8},
    ]


@pytest.mark.parametrize("keep", [0, 2])
def test_files_are_set_aside_and_only_so_many_are_kept(tmp_path: Path, keep: int) -> None:
    journal = Journal(tmp_path / "m.jsonl", "r", most_bytes=1000, keep=keep)
    for step in range(200):
        journal.write(Row(step, step, {"x": 1.0}))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["m.jsonl", "m.jsonl.1.gz", "m.jsonl.2.gz"][: keep + 1]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    kept = [row["step"] for name in reversed(files) for row in rows(tmp_path / name)]
    assert kept == list(range(200 - len(kept), 200)), "the newest, in order, none missing"


def test_files_stay_where_the_next_one_cannot_be_packed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "m.jsonl", "r", most_bytes=1000, keep=3)
    for step in range(200):
        journal.write(Row(step, step, {"x": 1.0}))
    held = {path: path.read_bytes() for path in tmp_path.glob("*.gz")}
    (tmp_path / "m.jsonl.draft").mkdir()
    failed = 0
    while failed < 5:
        try:
            journal.write(Row(200, 200, {"x": 1.0}))
        except IsADirectoryError:
            failed += 1
    assert {path: path.read_bytes() for path in tmp_path.glob("*.gz")} == held
    assert len(held) == 3


def test_a_row_that_is_larger_than_a_file_may_be_has_one_to_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "m.jsonl", "r", most_bytes=10, keep=1)
    for step in (1, 2):
        journal.write(Row(step, step, {"x": 1.0}))
    assert [row["step"] for row in rows(tmp_path / "m.jsonl.1.gz")] == [1]
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [2]


@pytest.mark.parametrize(("most_bytes", "left"), [(100_000, [1, 3]), (200, [3])])
def test_a_disk_that_is_full_leaves_no_half_of_a_row(
    tmp_path: Path, most_bytes: int, left: list[int]
) -> None:
    journal = Journal(tmp_path / "m.jsonl", "r", most_bytes=most_bytes, keep=1)
    journal.write(Row(1, 1, {"x": 1.0}))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.write(Row(2, 2, {"x" * 800: 1.0}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.write(Row(3, 3, {"x": 1.0}))
    assert [row["step"] for row in rows(journal.path)] == left


async def test_rows_go_on_with_the_next_run_of_a_name() -> None:
    ended = Row(2, 9, {}, last=True)
    coming, written = [Row(1, 5, {}), ended, ended, Row(3, 1, {})], list[Row]()
    read = asyncio.Event()

    def current() -> Row:
        if len(coming) == 1:
            read.set()
            return coming[0]
        return coming.pop(0)

    outlet = Outlet("list", lambda: Sink(written.append, lambda: None))
    async with background(write_rows([outlet], current, 0)):
        await read.wait()
    assert [row.step for row in written[:3]] == [5, 9, 1]


def test_what_cannot_be_written_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    settings = MetricsSettings()
    (outlet,) = outlets(settings, tmp_path / "file" / "metrics.jsonl", "r")
    with capture_logs() as said:
        for _ in range(3):
            outlet.offer(ROW)
        outlet.close(DEADLINE_S)
    assert [line["event"] for line in said] == ["metrics_not_written"]


def test_a_sink_that_hangs_holds_nobody_up() -> None:
    blocked = Blocked()
    outlet = Outlet("slow", lambda: blocked.sink)
    outlet.offer(ROW)
    assert blocked.reached.wait(DEADLINE_S)
    with capture_logs() as said:
        for _ in range(MOST_WAITING + 5):
            outlet.offer(ROW)
    assert len(said) == 1
    blocked.may_go_on.set()
    outlet.close(DEADLINE_S)
    assert len(blocked.rows) == MOST_WAITING + 1


def test_closing_gives_up_on_a_sink_that_hangs() -> None:
    blocked = Blocked()
    outlet = Outlet("hung", lambda: blocked.sink)
    outlet.offer(ROW)
    outlet.close(0.01)
    assert blocked.rows == []
    blocked.may_go_on.set()


def test_a_sink_that_cannot_be_opened_is_tried_again() -> None:
    tries: list[int] = []

    def opening() -> Sink:
        tries.append(1)
        if len(tries) < 3:
            msg = "away"
            raise ConnectionError(msg)
        working.may_go_on.set()
        return working.sink

    working = Blocked()
    outlet = Outlet("flaky", opening)
    for _ in range(4):
        outlet.offer(ROW)
    outlet.close(DEADLINE_S)
    assert (len(tries), len(working.rows)) == (3, 2)


def test_tensorboard_gets_every_number_by_step(tmp_path: Path) -> None:
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    settings = MetricsSettings(tensorboard=tmp_path / "board")
    board = outlets(settings, tmp_path / "m.jsonl", "r")[1]
    board.offer(ROW)
    board.close(DEADLINE_S)
    (file,) = (tmp_path / "board" / "r").iterdir()
    told = {
        value.tag: (row.step, value.simple_value)
        for row in events(file.read_bytes(), event)
        for value in row.summary.value
    }
    assert told == {"skerry.run.loss": (7, 2.5), "skerry.loss/a": (7, 2.75)}


def events(data: bytes, event: Any) -> list[Any]:
    """Return the events of a TFRecord file: length, its checksum, bytes, their checksum."""
    found: list[Any] = []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(event.FromString(data[12 : 12 + size]))
        data = data[12 + size + 4 :]
    return found


def test_weights_and_biases_gets_the_run_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[Any, ...]] = []
    begun = SimpleNamespace(
        log=lambda values, step: said.append(("log", values, step)),
        finish=lambda: said.append(("finish",)),
    )

    def init(**given: Any) -> Any:
        said.append(("init", given["project"], given["id"], given["resume"]))
        return begun

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    board = outlets(MetricsSettings(wandb="islands"), tmp_path / "m.jsonl", "r")[1]
    board.offer(ROW)
    board.close(DEADLINE_S)
    assert said == [
        ("init", "islands", "r", "allow"),
        ("log", {"skerry.run.loss": 2.5, "skerry.loss/a": 2.75}, 7),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("settings", "module", "extra"),
    [
        (MetricsSettings(wandb="p"), "wandb", r"\[wandb\]"),
        (MetricsSettings.model_validate({"tensorboard": "b"}), "tensorboardX", r"\[tensorboard\]"),
    ],
)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: MetricsSettings,
    module: str,
    extra: str,
) -> None:
    """The file is written all the same."""
    monkeypatch.setitem(sys.modules, module, None)
    with capture_logs() as lines:
        file, tracker = outlets(settings, tmp_path / "m.jsonl", "r")
        for outlet in (file, tracker):
            outlet.offer(Row(1.0, 7, {"a": 1.0}))
            outlet.close(DEADLINE_S)
    (line,) = lines
    assert re.search(extra, line["error"])
    assert (tmp_path / "m.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "grouped"),
    [
        ("skerry.run.loss", "skerry.run.loss"),
        ("skerry.loss{learner=a}", "skerry.loss/a"),
        ("skerry.wire.io{learner=a,direction=up}", "skerry.wire.io/a/up"),
        ("skerry.round.duration{reason=all}.sum", "skerry.round.duration.sum/all"),
    ],
)
def test_trackers_group_a_metric_by_its_name(name: str, grouped: str) -> None:
    assert tag(name) == grouped
