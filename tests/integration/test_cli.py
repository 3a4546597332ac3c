"""The command line with real processes: what it starts, it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.cluster.processes import read
from skerry.log import ledger
from skerry.log.streams import specs
from skerry.service.connect import bus_from
from skerry.settings.loading import to_json
from skerry.settings.models import NatsSettings, RunConfig
from tests.support.nats_server import NatsServer
from tests.support.puppet import run_record

DEADLINE_S = 60.0
KINDS = ("learner", "syncer", "checkpointer", "evaluator", "health-monitor")
SERVICES = (
    "skerry_learner --nats",
    "skerry_syncer",
    "skerry_checkpointer",
    "skerry_learner evaluator",
    "skerry_health_monitor",
)

pytestmark = pytest.mark.nats


def processes(mark: str) -> dict[int, str]:
    """Return every live process that has ``mark`` in its command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if mark in command:
                    found[int(entry.name)] = command
    return found


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {DEADLINE_S} s"
        time.sleep(0.05)  # the kernel tells us nothing about processes that are not our children


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start ``skerry up`` and wait until its broker and all of its services run."""
    run = f"t{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-m", "skerry.cli.main", "up", "--run", run]
    command += ["--set", "health.port=0", "--set", "shutdown_s=5"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def complete() -> bool:
        running = " ".join(processes(run).values())
        return all(name in running for name in (*SERVICES, "nats-server"))

    try:
        until(complete, "starting a cluster")
        yield process, run
    finally:
        for pid in processes(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_ctrl_c_stops_everything(cluster: tuple[subprocess.Popen[str], str]) -> None:
    process, run = cluster
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said
    assert processes(run) == {}
    assert "Traceback" not in said


def test_kill_9_of_the_command_leaves_nothing_running(
    cluster: tuple[subprocess.Popen[str], str],
) -> None:
    process, run = cluster
    process.kill()
    process.wait()
    until(lambda: processes(run) == {}, "ending the orphans")


def test_a_second_cluster_in_the_same_folder_is_refused(
    cluster: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, run = cluster
    second = subprocess.run(
        [sys.executable, "-m", "skerry.cli.main", "up", "--run", run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert f"Process {process.pid} runs '{run}'" in second.stderr
    assert process.poll() is None


def test_the_processes_of_a_cluster_are_told_while_it_runs(
    cluster: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, run = cluster
    folder = tmp_path / ".skerry" / run
    until(lambda: len(read(folder)) == 7, "telling all processes")
    told = read(folder)
    assert {e.kind for e in told.values()} == {*KINDS, "broker"}
    # Asked again, because a process that is just becoming another program has no name for a moment.
    until(lambda: {e.pid for e in told.values()} <= set(processes(run)), "finding all of them")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)
    assert read(folder) == {}


def test_chaos_touches_no_run_that_does_not_allow_it(
    cluster: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    _, run = cluster
    folder = tmp_path / ".skerry" / run
    until(lambda: "health-monitor" in read(folder), "starting the monitor")
    before = set(processes(run))
    stopped = read(folder)["health-monitor"]
    os.kill(stopped.pid, signal.SIGSTOP)
    for what in ((), ("--heal",)):
        done = chaos(tmp_path, "--run", run, *what)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: Run '{run}' does not allow faults")
        assert "nothing was touched" in done.stderr
    assert before <= set(processes(run))
    assert stopped.paused
    os.kill(stopped.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("allowed", "asked", "words"),
    [
        (None, "nobody", "There is no run 'nobody' in this log"),
        (False, "", "does not allow faults, and nothing was touched: only a run that was created"),
        (True, "", "as far as can be heard in 4 s: it is finished, or its services do not run."),
    ],
)
def test_chaos_over_a_broker_refuses_what_is_no_run_at_work_that_allows_it(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    allowed: bool | None,
    asked: str,
    words: str,
) -> None:
    if allowed is not None:
        asyncio.run(_declare(shared_nats.url, run_id, allow=allowed))
    done = chaos(tmp_path, "--nats", shared_nats.url, "--run", asked or run_id)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["--nats={}", "--set=nats.url={}"])
def test_chaos_over_a_broker_that_is_not_there_is_one_sentence(tmp_path: Path, how: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        url = f"nats://127.0.0.1:{unheard.getsockname()[1]}"
        done = chaos(tmp_path, how.format(url), "--set", "nats.connect_timeout_s=1", "--run", "r")
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert url in done.stderr
    assert len(done.stderr.splitlines()) == 1


def chaos(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skerry.cli.main", "chaos", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_full_disk_is_one_sentence(tmp_path: Path, command: str) -> None:
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
    become = "os.execv(sys.executable, [sys.executable, '-m', 'skerry.cli.main', sys.argv[1]])"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit} {become}", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/.skerry/")
    assert "lock cannot be written (File too large): start this command in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_status_of_a_log_as_json(shared_nats: NatsServer, run_id: str, tmp_path: Path) -> None:
    asyncio.run(_declare(shared_nats.url, run_id))
    command = [sys.executable, "-m", "skerry.cli.main", "status", "--run", run_id]
    done = subprocess.run(
        [*command, "--nats", shared_nats.url, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["run"]["run"] == run_id
    assert told["run"]["finished"] is False
    assert told["learners"][0]["name"] == "a"


def test_top_off_a_terminal_is_shown_once_and_plain(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    asyncio.run(_declare(shared_nats.url, run_id))
    command = [sys.executable, "-m", "skerry.cli.main", "top", "--run", run_id]
    done = subprocess.run(
        [*command, "--nats", shared_nats.url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{run_id}  no parameters yet  step 0/")
    assert "a#1" in done.stdout
    assert "\x1b" not in done.stdout


def test_status_of_an_unknown_run_is_one_sentence(shared_nats: NatsServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skerry.cli.main", "status", "--run", "nobody", "--once"]
    done = subprocess.run(
        [*command, "--nats", shared_nats.url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: There is no run 'nobody'")


def test_doctor_passes_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "skerry.cli.main", "doctor", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"]) == (0, True), told


async def _declare(url: str, run: str, *, allow: bool = False) -> None:
    config = RunConfig.model_validate({"chaos": {"allow": allow}})
    cut = plan([LeafSpec("w", (64, 256))], config.sync.fragments)
    async with bus_from(NatsSettings(url=url), "test") as bus:
        await bus.declare(specs(run))
        await ledger.create_run(bus, run_record(run, cut, to_json(config)))
        await ledger.join(bus, run, "a", "here", time.time_ns())
