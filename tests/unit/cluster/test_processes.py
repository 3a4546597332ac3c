"""The table of a cluster's processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.cli.cluster.processes import TABLE, Processes, read


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(command)
    yield process
    process.kill()
    process.wait()


def table(folder: Path) -> Processes:
    return Processes(folder / TABLE)


def test_what_was_started_is_read_back_and_what_ended_is_gone(tmp_path: Path) -> None:
    held = table(tmp_path)
    with held.kept():
        held.started("learner-1", "learner", os.getpid())
        held.started("syncer", "syncer", os.getpid())
        held.ended("syncer", os.getpid())
        found = read(tmp_path)
    assert {name: (e.kind, e.pid) for name, e in found.items()} == {
        "learner-1": ("learner", os.getpid())
    }
    assert found["learner-1"].alive


def test_what_started_before_the_table_was_kept_is_in_it(tmp_path: Path) -> None:
    held = table(tmp_path)
    held.started("broker", "broker", os.getpid())
    assert read(tmp_path) == {}
    with held.kept():
        assert set(read(tmp_path)) == {"broker"}


def test_the_late_end_of_a_process_does_not_hide_its_successor(tmp_path: Path) -> None:
    held = table(tmp_path)
    with held.kept():
        held.started("a", "learner", os.getpid())
        held.ended("a", 1)
        assert set(read(tmp_path)) == {"a"}


def test_no_table_is_left_behind(tmp_path: Path) -> None:
    with table(tmp_path).kept():
        assert (tmp_path / TABLE).exists()
    assert list(tmp_path.iterdir()) == []


def test_another_process_with_the_same_pid_is_not_taken_for_it(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    held = table(tmp_path)
    with held.kept():
        held.started("a", "learner", sleeper.pid)
        entry = read(tmp_path)["a"]
    assert entry.alive
    assert not replace(entry, ticks=entry.ticks - 1).alive


def test_a_paused_and_an_ended_process_are_told_apart(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    held = table(tmp_path)
    with held.kept():
        held.started("a", "learner", sleeper.pid)
        entry = read(tmp_path)["a"]
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert entry.paused
    sleeper.kill()
    sleeper.wait()
    assert not entry.alive
    assert not entry.paused
