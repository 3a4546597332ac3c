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
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from psutil import process_iter

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.cluster.processes import BROKER, read
from skerry.log import ledger
from skerry.log.streams import specs
from skerry.service.entry import bus_from
from skerry.settings.loading import to_json
from skerry.settings.local import NatsSettings
from skerry.settings.models import RunConfig
from tests.support.builders import run_record, wait_until
from tests.support.keyed import refusals
from tests.support.nats_server import NatsServer
from tests.support.processes import SKERRY, call, skerry

DEADLINE_S = 60.0
SERVICES = {"learner-1", "learner-2", "syncer", "checkpointer", "evaluator", "health-monitor"}

pytestmark = pytest.mark.nats


def processes(mark: str) -> dict[int, str]:
    """Return the command line of every live process that has ``mark`` in it."""
    lines = {one.pid: " ".join(one.info["cmdline"] or ()) for one in process_iter(["cmdline"])}
    return {pid: line for pid, line in lines.items() if mark in line}


@dataclass(frozen=True)
class RunningUp:
    """``skerry up`` with its broker and all of its services."""

    process: subprocess.Popen[str]
    run: str
    cwd: Path

    @property
    def folder(self) -> Path:
        return self.cwd / ".skerry" / self.run

    def ended(self) -> str:
        """Return what it said, once it has ended."""
        return self.process.communicate(timeout=DEADLINE_S)[0]


@contextlib.contextmanager
def cluster(cwd: Path, *arguments: str, run: str = "") -> Generator[RunningUp]:
    run = run or f"t{uuid.uuid4().hex[:12]}"
    command = [*SKERRY, "up", "--run", run, *arguments]
    command += ["--set", "health.port=0", "--set", "shutdown_s=5"]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    up = RunningUp(process, run, cwd)

    def complete() -> bool:
        return {e.name for e in read(up.folder).values() if e.alive} == {*SERVICES, BROKER}

    try:
        wait_until(complete, "starting a cluster")
        yield up
    finally:
        for pid in processes(run):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.drill
def test_a_cluster_is_alone_in_its_folder_private_and_safe_and_ctrl_c_ends_it(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as up:
        lets_other_commands_in_and_keeps_its_keys_private(up)
        with resting_learners(up):
            refuses_a_second_cluster(up)
            is_touched_by_no_chaos_that_it_does_not_allow(up)
        ends_with_all_that_it_started(up, times=1)


@contextlib.contextmanager
def resting_learners(up: RunningUp) -> Generator[None]:
    """Stop the learners for as long as the block lasts: training would take all of the CPU."""
    learners = [entry.pid for entry in read(up.folder).values() if entry.kind == "learner"]
    for pid in learners:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in learners:
            os.kill(pid, signal.SIGCONT)


def refuses_a_second_cluster(up: RunningUp) -> None:
    second = skerry(up.cwd, "up", "--run", up.run)
    assert second.returncode == 2
    assert f"Process {up.process.pid} runs '{up.run}'" in second.stderr
    assert up.process.poll() is None


def lets_other_commands_in_and_keeps_its_keys_private(up: RunningUp) -> None:
    wait_until((up.folder / "cluster.json").exists, "announcing the cluster")

    def has_a_run() -> bool:
        shown = skerry(up.cwd, "status", "--set", "nats.connect_timeout_s=10")
        assert "refused the login" not in shown.stderr
        return shown.returncode == 0

    wait_until(has_a_run, "creating the run")
    seeds = [path.read_text().strip() for path in (up.folder / "broker" / "keys").glob("*.nk")]
    assert len(seeds) > len(processes(up.run)) - 2, "each service has a key of its own"
    for path in up.folder.rglob("*"):
        text = path.read_text(errors="replace") if path.is_file() else ""
        if any(seed in text for seed in seeds):
            assert not path.stat().st_mode & 0o077, f"others may read {path}"
    assert refusals(up.folder / "broker") == [], "each service may do what it does"


def is_touched_by_no_chaos_that_it_does_not_allow(up: RunningUp) -> None:
    before = set(processes(up.run))
    stopped = read(up.folder)["health-monitor"]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        for what in ((), ("--heal",)):
            done = skerry(up.cwd, "chaos", "--run", up.run, *what)
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: Run '{up.run}' does not allow faults")
            assert "nothing was touched" in done.stderr
        assert before <= set(processes(up.run))
        assert stopped.paused
    finally:
        os.kill(stopped.pid, signal.SIGCONT)


def ends_with_all_that_it_started(up: RunningUp, times: int) -> None:
    for _ in range(times):
        up.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    said = up.ended()
    assert up.process.returncode == 130, said
    assert processes(up.run) == {}
    assert read(up.folder) == {}
    assert "Stopping: each service finishes what it has begun." in said
    assert "Traceback" not in said


@pytest.mark.drill
def test_ctrl_c_twice_stops_everything_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path) as up:
        ends_with_all_that_it_started(up, times=2)


@pytest.mark.drill
def test_kill_9_of_the_command_leaves_nothing_running_and_the_same_command_goes_on(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as up:
        wait_until(lambda: skerry(tmp_path, "status").returncode == 0, "creating the run")
        up.process.kill()
        up.process.wait()
        wait_until(lambda: processes(up.run) == {}, "ending the orphans")
    with cluster(tmp_path, run=up.run) as again:
        again.process.send_signal(signal.SIGINT)
        assert f"Going on with run {up.run} as the log has it." in again.ended()


def test_a_broker_that_runs_already_is_used_and_left_alone(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    asyncio.run(_declare(shared_nats.url, run_id, finished=True))
    done = skerry(tmp_path, "up", "--run", run_id, "--nats", shared_nats.url)
    assert done.returncode == 0, done.stderr
    assert f"broker {shared_nats.url}, logs in" in done.stdout
    assert f"Run {run_id} is finished already: --run NAME starts another one." in done.stdout
    assert not (tmp_path / ".skerry" / run_id / "broker").exists()


@pytest.mark.drill
@pytest.mark.parametrize(
    ("allowed", "asked", "words"),
    [
        (None, "unknown", "There is no run 'unknown' in this log"),
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
    done = skerry(tmp_path, "chaos", "--nats", shared_nats.url, "--run", asked or run_id)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["--nats={}", "--set=nats.url={}"])
def test_chaos_over_a_broker_that_is_not_there_is_one_sentence(tmp_path: Path, how: str) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        url = f"nats://127.0.0.1:{unheard.getsockname()[1]}"
        given = (how.format(url), "--set", "nats.connect_timeout_s=1", "--run", "r")
        done = skerry(tmp_path, "chaos", *given)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert url in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_full_disk_is_one_sentence(tmp_path: Path, command: str) -> None:
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
    become = "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = call(sys.executable, "-c", f"{limit} {become}", *SKERRY[1:], command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/.skerry/")
    assert "lock cannot be written (File too large): start this command in" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_status_of_a_log_as_json(shared_nats: NatsServer, run_id: str, tmp_path: Path) -> None:
    asyncio.run(_declare(shared_nats.url, run_id))
    done = skerry(tmp_path, "status", "--run", run_id, "--nats", shared_nats.url, "--json")
    report = json.loads(done.stdout)
    assert report["run"]["run"] == run_id
    assert report["run"]["finished"] is False
    assert report["learners"][0]["name"] == "a"


def test_top_off_a_terminal_is_shown_once_and_plain(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    asyncio.run(_declare(shared_nats.url, run_id))
    done = skerry(tmp_path, "top", "--run", run_id, "--nats", shared_nats.url)
    assert done.stdout.startswith(f"{run_id}  no parameters yet  step 0/")
    assert "a#1" in done.stdout
    assert "\x1b" not in done.stdout


def test_status_of_an_unknown_run_is_one_sentence(shared_nats: NatsServer, tmp_path: Path) -> None:
    done = skerry(tmp_path, "status", "--run", "unknown", "--nats", shared_nats.url)
    assert done.returncode == 2
    assert done.stderr.startswith("error: There is no run 'unknown'")


def test_a_run_is_created_once_and_without_its_text(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    asked = ["--nats", shared_nats.url, "--set", "data.source=text"]
    asked += ["--set", 'data.paths=["nowhere.txt"]']
    first = skerry(tmp_path, "create", run_id, *asked)
    again = skerry(tmp_path, "create", run_id, *asked, "--set", "sync.quorum=2")
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    assert f"Run '{run_id}' is created: " in first.stdout
    assert "is in this log already" in again.stdout
    assert '"ignored": ["sync.quorum"]' in again.stderr


def test_doctor_passes_on_this_machine(tmp_path: Path) -> None:
    done = skerry(tmp_path, "doctor", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (0, True), report


async def _declare(url: str, run: str, *, allow: bool = False, finished: bool = False) -> None:
    config = RunConfig.model_validate({"chaos": {"allow": allow}})
    cut = plan([LeafSpec("w", (64, 256))], config.sync.fragments)
    async with bus_from(NatsSettings(url=url), "test") as bus:
        await bus.declare(specs(run))
        record = await ledger.create_run(bus, run_record(run, cut, to_json(config)))
        await ledger.join(bus, run, "a", "here", time.time_ns())
        if finished:
            await ledger.finish_run(bus, record)
