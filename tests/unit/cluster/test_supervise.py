"""The supervisor, with real processes that do next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.cli.cluster.supervise import Backoff, Change, Command, Event, ServiceError, Supervisor

FAST = Backoff(first_s=0.01, most_s=0.02, healthy_s=60.0, attempts=3)
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\n"
    "while True: signal.pause()"
)


def command(folder: Path, name: str, code: str, *, essential: bool = True) -> Command:
    argv = (sys.executable, "-I", "-S", "-c", code)
    return Command(name, argv, folder / f"{name}.log", dict(os.environ), essential)


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" Z")
    return False


async def until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # another process's state sends us no event


class Watched:
    """A supervisor whose events are kept."""

    def __init__(self, *stages: list[Command], grace_s: float = 10.0) -> None:
        self.events: list[Event] = []
        self.supervisor = Supervisor(stages, self.events.append, FAST, grace_s)

    def changes(self, name: str) -> list[Change]:
        return [event.change for event in self.events if event.name == name]

    def count(self, change: Change) -> int:
        return [event.change for event in self.events].count(change)


async def test_run_ends_when_all_have_finished(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", ""), command(tmp_path, "b", "")])
    await watched.supervisor.run()
    assert watched.changes("a") == [Change.STARTED, Change.FINISHED]
    assert watched.supervisor.pids() == {}


async def test_output_goes_to_the_log_of_the_service(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path / "logs", "a", "print('hello')")])
    await watched.supervisor.run()
    assert (tmp_path / "logs" / "a.log").read_text() == "hello\n"


async def test_a_crash_is_followed_by_a_restart(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        f"import pathlib, sys; p = pathlib.Path({str(mark)!r})\n"
        "if not p.exists(): p.touch(); sys.exit(9)"
    )
    watched = Watched([command(tmp_path, "a", code)])
    await watched.supervisor.run()
    expected = [Change.STARTED, Change.CRASHED, Change.STARTED, Change.FINISHED]
    assert watched.changes("a") == expected


async def test_crashing_for_ever_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", "raise ValueError('too bad')")])
    with pytest.raises(ServiceError, match="a cannot run: ValueError: too bad"):
        await watched.supervisor.run()
    assert watched.count(Change.STARTED) == FAST.attempts


@pytest.mark.parametrize("code", [2, 3])
async def test_final_exit_codes_are_not_restarted(tmp_path: Path, code: int) -> None:
    watched = Watched([command(tmp_path, "a", f"raise SystemExit({code})", essential=False)])
    await watched.supervisor.run()
    assert watched.changes("a") == [Change.STARTED, Change.REFUSED]


async def test_a_refused_setting_ends_everything_with_its_sentence(tmp_path: Path) -> None:
    bad = "import sys; print('error: x is 3.', file=sys.stderr); sys.exit(2)"
    watched = Watched([command(tmp_path, "a", FOREVER)], [command(tmp_path, "b", bad)])
    with pytest.raises(ServiceError, match=r"b cannot run: x is 3\.") as caught:
        await watched.supervisor.run()
    assert caught.value.exit_code == 2
    assert watched.count(Change.REFUSED) == 0, "the sentence is said once, by the error"
    assert not alive(watched.events[0].pid)


async def test_a_superseded_learner_does_not_end_the_others(tmp_path: Path) -> None:
    watched = Watched(
        [command(tmp_path, "a", "raise SystemExit(3)"), command(tmp_path, "b", FOREVER)]
    )
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: watched.count(Change.REFUSED) == 1)
    assert set(watched.supervisor.pids()) == {"b"}
    watched.supervisor.ask_stop()
    await running


async def test_stop_goes_stage_by_stage(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", FOREVER)], [command(tmp_path, "b", FOREVER)])
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: all((tmp_path / f"{n}.log").exists() for n in "ab"))
    await until(lambda: all((tmp_path / f"{n}.log").read_text() for n in "ab"))
    watched.supervisor.ask_stop()
    await running
    assert [e.name for e in watched.events if e.change is Change.STOPPED] == ["a", "b"]


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", STUBBORN)], grace_s=0.2)
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: (tmp_path / "a.log").exists() and bool((tmp_path / "a.log").read_text()))
    watched.supervisor.ask_stop()
    await running
    assert watched.events[-1].code == -signal.SIGKILL


async def test_a_forced_stop_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", STUBBORN)], grace_s=600.0)
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: (tmp_path / "a.log").exists() and bool((tmp_path / "a.log").read_text()))
    watched.supervisor.ask_stop()
    watched.supervisor.force()
    async with asyncio.timeout(20.0):
        await running
    assert not alive(watched.events[0].pid)


async def test_a_killed_process_comes_back_as_another(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", FOREVER)])
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: watched.count(Change.STARTED) == 1)
    first = watched.supervisor.kill("a", back_after_s=0.05)
    await until(lambda: watched.count(Change.STARTED) == 2)
    assert watched.events[1].change is Change.CRASHED
    assert watched.events[1].delay_s == 0.05
    assert watched.supervisor.pids()["a"] != first
    watched.supervisor.ask_stop()
    await running


async def test_stop_during_backoff_does_not_start_again(tmp_path: Path) -> None:
    watched = Watched([command(tmp_path, "a", FOREVER)])
    running = asyncio.ensure_future(watched.supervisor.run())
    await until(lambda: watched.count(Change.STARTED) == 1)
    watched.supervisor.kill("a", back_after_s=600.0)
    await until(lambda: watched.count(Change.CRASHED) == 1)
    watched.supervisor.ask_stop()
    async with asyncio.timeout(20.0):
        await running
    assert watched.count(Change.STARTED) == 1


def test_no_child_survives_sigkill_of_the_supervisor(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, pathlib, sys
from skerry.cli.cluster.supervise import Command, Supervisor
argv = (sys.executable, "-I", "-S", "-c", {STUBBORN!r})
one = Command("a", argv, pathlib.Path({str(tmp_path)!r}) / "a.log", dict(os.environ))
asyncio.run(Supervisor([[one]], lambda event: print(event.pid, flush=True)).run())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert alive(pid)
        supervisor.kill()
    asyncio.run(until(lambda: not alive(pid)))
