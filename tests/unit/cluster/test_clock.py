"""The wall clock of a process, moved from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skerry.cli.cluster import clock

CLOCK = (
    "import sys, time\n"
    "for _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)\n"
)  # fmt: skip
AHEAD_S = 7200.0


@pytest.mark.skipif(clock.library() is None, reason="libfaketime is not installed")
def test_a_moved_clock_moves_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    env = os.environ | clock.environment(tmp_path, "a")
    command = [sys.executable, "-I", "-S", "-c", CLOCK]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        asking, answers = process.stdin, process.stdout

        def clocks() -> tuple[float, float]:
            asking.write("now\n")
            asking.flush()
            wall, monotonic = answers.readline().split()
            return float(wall), float(monotonic)

        assert abs(clocks()[0] - time.time()) < AHEAD_S / 2
        clock.move(tmp_path, "a", AHEAD_S)
        deadline = time.monotonic() + 60
        while clocks()[0] < time.time() + AHEAD_S / 2:
            assert time.monotonic() < deadline, "its clock did not move"
        assert abs(clocks()[1] - time.monotonic()) < AHEAD_S / 2
        assert clock.was_read(tmp_path, "a")
        asking.close()
    clock.sweep(process.pid)
    assert not list(Path("/dev/shm").glob(f"*faketime*_{process.pid}"))  # noqa: S108 - theirs


def test_without_the_library_a_service_starts_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "library", lambda: None)
    assert clock.environment(tmp_path, "a") == {}
    assert not (tmp_path / clock.CLOCKS).exists()
