"""The table of a cluster's processes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.cli.cluster.processes import TABLE, ProcessTable, read


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    return ProcessTable(tmp_path / TABLE)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_started_processes_are_read_back_and_ended_ones_are_gone(
    tmp_path: Path, table: ProcessTable
) -> None:
    table.started("broker", "broker", os.getpid())
    assert read(tmp_path) == {}, "the file is not kept yet"
    with table.kept():
        table.started("learner-1", "learner", os.getpid())
        table.started("syncer", "syncer", os.getpid())
        table.ended("syncer", os.getpid())
        table.ended("learner-1", 1)  # the late end of an earlier process
        found = read(tmp_path)
    assert {(e.name, e.kind, e.pid) for e in found.values()} == {
        ("broker", "broker", os.getpid()),
        ("learner-1", "learner", os.getpid()),
    }
    assert found["learner-1"].alive
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_a_process_that_has_ended_already_is_left_out(tmp_path: Path, table: ProcessTable) -> None:
    with table.kept():
        table.started("a", "learner", 2**22 + 1)
        assert read(tmp_path) == {}


def test_another_process_with_the_same_pid_is_not_alive(
    tmp_path: Path, table: ProcessTable
) -> None:
    with table.kept():
        table.started("a", "learner", os.getpid())
        entry = read(tmp_path)["a"]
    assert entry.alive
    assert not replace(entry, since_boot_s=entry.since_boot_s - 0.01).alive


def test_paused_and_ended_processes_differ(
    tmp_path: Path, table: ProcessTable, sleeper: subprocess.Popen[bytes]
) -> None:
    with table.kept():
        table.started("a", "learner", sleeper.pid)
        entry = read(tmp_path)["a"]
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert entry.paused
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not entry.alive, "dead, but not reaped"
    sleeper.wait()
    assert not entry.alive
    assert not entry.paused
