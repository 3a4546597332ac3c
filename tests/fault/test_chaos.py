"""A short drill on real processes: every fault fires, and nothing that was promised is broken."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from skerry.cli.cluster import clock
from skerry.cli.cluster.processes import read
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.healing import BACK_S
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.builders import wait_until
from tests.support.local_cluster import chaos, cluster, pids
from tests.support.processes import SKERRY, skerry

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(1200)]

PLANS = Path(__file__).parents[2] / "infra" / "chaos"
PLAN = PLANS / "short.json"


def test_a_cluster_survives_a_drill_with_everything_in_it(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    arguments = ("--syncers", "2")
    with cluster(tmp_path, "drill", tiny_config, jax_cache, *arguments):
        told, said = chaos(tmp_path, "drill", "--plan", str(PLAN), "--quiet-s", "2")
        up = (tmp_path / "up.log").read_text()
    story = f"{json.dumps(told, indent=1)}\n{said}\n{up}"
    planned = [fault["kind"] for fault in json.loads(PLAN.read_text())["faults"]]
    assert [fault["kind"] for fault in told["faults"]] == planned
    assert all(fault["fired"] for fault in told["faults"]), story
    assert all(check["ok"] for check in told["checks"]), story
    assert {check["name"] for check in told["checks"]} >= {
        "learner-1 contributes",
        "learner-2 contributes",
        "a syncer that runs commits",
        "a checkpoint verifies",
        "nothing acknowledged was lost",
        "the ledger verifies",
        "the window replays",
        "everything is healed",
        "every kind of fault fired",
    }


def test_a_cluster_goes_on_under_hostile_messages_of_every_kind(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    """The flood last: its contributions are refused for as long as the others take."""
    kinds = sorted(plans.HOSTILE, key=lambda kind: (kind is Kind.CONTRIB_FLOOD, kind))
    faults = tuple(Fault(4.0 * at, kind, "learner") for at, kind in enumerate(kinds))
    plan = tmp_path / "hostile.json"
    plan.write_text(plans.dumps(FaultPlan(1, faults, heal_s=300.0)))
    with cluster(tmp_path, "hostile", tiny_config, jax_cache, "--syncers", "2"):
        told, said = chaos(tmp_path, "hostile", "--plan", str(plan), "--quiet-s", "2")
        up = (tmp_path / "up.log").read_text()
    story = f"{json.dumps(told, indent=1)}\n{said}\n{up}"[-20_000:]
    assert [fault["kind"] for fault in told["faults"] if fault["fired"]] == kinds, story
    assert all(check["ok"] for check in told["checks"]), story


@pytest.mark.skipif(clock.library() is None, reason="libfaketime is not installed")
def test_clocks_that_jump_break_no_promise(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    """A drill of its own: with libfaketime every process is slower, all through a longer drill."""
    few = ("--learners", "1", "--no-evaluator", "--set", "chaos.clocks=true")
    with cluster(tmp_path, "clocks", tiny_config, jax_cache, *few):
        plan = str(PLANS / "clocks.json")
        told, said = chaos(tmp_path, "clocks", "--plan", plan, "--quiet-s", "1")
    story = f"{json.dumps(told, indent=1)}\n{said}"
    assert {fault["target"] for fault in told["faults"]} == {"learner-1", "syncer"}
    assert all(fault["fired"] for fault in told["faults"]), story
    assert all("off by" in fault["proof"] for fault in told["faults"]), story
    assert all(check["ok"] for check in told["checks"]), story


LASTING = {
    "format": 1,
    "seed": 1,
    "heal_s": 600.0,
    "faults": [
        {"at_s": 0.0, "kind": "slow", "target": "learner:1", "duration_s": 600.0, "amount": 0.1},
        {"at_s": 0.1, "kind": "pause", "target": "learner:0", "duration_s": 600.0, "amount": 0.0},
    ],
}
RUN = "left"
COMMAND = (*SKERRY, "chaos", "--run", RUN)


def test_the_faults_of_a_killed_drill_are_healed_by_command_and_by_the_next_drill(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    plan = tmp_path / "lasting.json"
    plan.write_text(json.dumps(LASTING))
    drill = (*COMMAND, "--plan", str(plan), "--quiet-s", "0")

    def paused() -> bool:
        held = read(tmp_path / ".skerry" / RUN).get("learner-1")
        return held is not None and held.paused

    with cluster(tmp_path, RUN, tiny_config, jax_cache):
        process = subprocess.Popen([*drill, "--json"], cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            wait_until(paused, "pausing the learner", 120.0)
        finally:
            process.kill()
            process.wait()
        assert paused()
        assert healed(tmp_path) == [
            "The way of learner-2 to the broker was cut or slow, and is open.",
            "learner-1 was stopped, and goes on.",
        ]
        before = steps(tmp_path)
        wait_until(lambda: steps(tmp_path) > before, "training on", 120.0)
        assert healed(tmp_path) == []

        os.kill(pids(tmp_path, RUN)["broker"], signal.SIGSTOP)  # it cannot even be asked any more
        terminal, hung_up = terminal_of(drill, tmp_path)
        try:
            wait_until(paused, "pausing the learner again", 120.0)
            said = os.read(terminal, 1 << 20).decode()
            assert "Left by an earlier drill: broker was stopped, and goes on." in said
            os.close(terminal)  # a session that is gone: its kernel sends SIGHUP
            assert hung_up.wait(60 + BACK_S) == 128 + signal.SIGHUP  # it heals first
        finally:
            hung_up.kill()
            hung_up.wait()
        assert not paused()
        assert healed(tmp_path) == []


def healed(folder: Path) -> list[str]:
    """Heal the run by command, and return what that says it has undone."""
    told = json.loads(skerry(folder, "chaos", "--run", RUN, "--heal", "--json").stdout)
    assert told["wrong"] == []
    return list(told["healed"])


def steps(folder: Path) -> int:
    """Return how far the learner that was paused has come."""
    told = json.loads(skerry(folder, "status", "--run", RUN, "--json").stdout)
    return next(int(row["step"]) for row in told["learners"] if row["name"] == "learner-1")


IN_ITS_TERMINAL = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def terminal_of(command: tuple[str, ...], folder: Path) -> tuple[int, subprocess.Popen[bytes]]:
    """Start a command in a terminal of its own; return the other end of that, and the process.

    It hears when that terminal is gone, even where these tests run under ``nohup``.
    """
    ours, its = pty.openpty()
    become = (SKERRY[0], "-c", IN_ITS_TERMINAL, *command)
    process = subprocess.Popen(become, cwd=folder, stdin=its, stdout=its, stderr=its)
    os.close(its)
    return ours, process
