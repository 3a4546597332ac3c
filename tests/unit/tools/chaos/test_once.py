"""``skerry chaos --once``: one fault, to one process of this folder's cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from skerry.cli import viewer
from skerry.cli.cluster.folder import RunFolder, RunInUse
from skerry.cli.cluster.processes import TABLE, ProcessTable
from skerry.errors import ConfigError
from skerry.service.clusters import ANNOUNCEMENT, RunningCluster
from skerry_tools.chaos.command import ChaosOptions, run_chaos

CLUSTER = RunningCluster("r", os.getpid(), "nats://127.0.0.1:1")


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that a cluster in this folder calls learner-1."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("r").path
    folder.mkdir(parents=True)
    (folder / ANNOUNCEMENT).write_text(json.dumps(asdict(CLUSTER)))
    argv = [sys.executable, "-S", "-c", "input()"]
    with (
        RunFolder("r").held(),
        subprocess.Popen(argv, stdin=subprocess.PIPE) as process,
    ):
        table = ProcessTable(folder / TABLE)
        table._kept = True
        table.started("learner-1", "learner", process.pid)
        yield process
        process.kill()


@pytest.mark.parametrize(("fault", "by"), [("kill", signal.SIGKILL), ("stop", signal.SIGTERM)])
def test_a_process_is_ended_by_its_signal(
    victim: subprocess.Popen[bytes],
    fault: str,
    by: signal.Signals,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_chaos(ChaosOptions(once=(fault, "learner-1")))
    assert victim.wait() == -by
    assert f"learner-1 (pid {victim.pid})" in capsys.readouterr().out
    assert viewer._processes("r") == []


def test_a_pause_ends_by_itself(
    victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def say(_: str) -> None:
        os.waitid(os.P_PID, victim.pid, os.WSTOPPED | os.WCONTINUED)
        seen.append(psutil.Process(victim.pid).status())

    assert [row["name"] for row in viewer._processes("r")] == ["learner-1"]
    monkeypatch.setattr("builtins.print", say)
    run_chaos(ChaosOptions(once=("pause", "learner-1"), duration_s=0.01))
    assert seen[0] == psutil.STATUS_STOPPED != seen[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_pause_ends_with_its_command(victim: subprocess.Popen[bytes], number: int) -> None:
    words = ("chaos", "--once", "pause", "learner-1", "--duration-s", "600")
    before = signal.signal(number, signal.SIG_DFL)  # nohup has it ignored, and that is inherited
    with subprocess.Popen([sys.executable, "-m", "skerry_tools", *words]) as command:
        signal.signal(number, before)
        os.waitid(os.P_PID, victim.pid, os.WSTOPPED)
        command.send_signal(number)
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
    assert command.returncode == 128 + number


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ChaosOptions(once=("kil", "learner-1")), "use kill, pause, stop"),
        (ChaosOptions(once=("kill", "learner-9")), "no process 'learner-9' here: learner-1"),
        (ChaosOptions(once=("kill", "learner-1"), nats="nats://far:4222"), "leave out --nats"),
        (ChaosOptions(once=("pause", "learner-1"), duration_s=float("nan")), "duration_s is nan"),
    ],
)
def test_what_cannot_be_done_is_refused(
    victim: subprocess.Popen[bytes], options: ChaosOptions, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_chaos(options)
    with RunFolder("r").drilled(), pytest.raises(RunInUse):
        run_chaos(ChaosOptions(once=("kill", "learner-1")))
    assert victim.poll() is None
