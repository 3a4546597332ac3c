"""The supervisor, with real processes that do next to nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.cli.cluster.supervisor import Change, Command, Need, RestartPolicy, ServiceError
from skerry.errors import BrokerUnavailable, ConfigError
from tests.support.builders import until
from tests.support.processes import FAST, STUBBORN, Watched, command, full_disk, is_running


def once(mark: Path, then: str) -> str:
    """A program that does something at its first start only."""
    return (
        f"import pathlib, signal, sys; p = pathlib.Path({str(mark)!r})\n"
        f"if not p.exists(): p.touch(); {then}"
    )


async def test_run_ends_when_all_have_finished_with_their_output_in_their_logs(
    tmp_path: Path, watched: Watched
) -> None:
    hello = command(tmp_path / "logs", "a", "print('hello')")
    supervisor = watched.supervise([hello, command(tmp_path, "b", "")])
    await supervisor.run()
    assert watched.changes("a") == [Change.STARTED, Change.FINISHED]
    assert supervisor.pids() == {}
    assert (tmp_path / "logs" / "a.log").read_text() == "hello\n"


async def test_logs_of_what_runs_are_kept_from_growing(
    tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.cli.cluster.supervisor.LOGS_S", 0.01)
    monkeypatch.setattr("skerry.cli.cluster.folder.LOG_BYTES", 2)
    log, aside = tmp_path / "a.log", tmp_path / "a.log.1"
    async with watched.supervise([command(tmp_path, "a")]).running():
        await until(lambda: aside.exists() and not log.stat().st_size)
    assert aside.read_text() == "up\n"


async def test_a_crash_is_followed_by_a_restart(tmp_path: Path, watched: Watched) -> None:
    await watched.supervise([command(tmp_path, "a", once(tmp_path / "m", "sys.exit(9)"))]).run()
    expected = [Change.STARTED, Change.CRASHED, Change.STARTED, Change.FINISHED]
    assert watched.changes("a") == expected


async def test_an_essential_process_that_keeps_crashing_ends_all_with_its_last_words(
    tmp_path: Path, watched: Watched
) -> None:
    with pytest.raises(ServiceError, match="a cannot run: ValueError: too bad"):
        await watched.supervise([command(tmp_path, "a", "raise ValueError('too bad')")]).run()
    assert watched.count(Change.STARTED) == FAST.attempts


@pytest.mark.parametrize(
    ("kind", "need"),
    [("learner", Need.ALWAYS), ("checkpointer", Need.SETTINGS), ("evaluator", Need.NEVER)],
)
async def test_a_process_that_the_cluster_can_do_without_is_tried_ever_more_rarely(
    tmp_path: Path, watched: Watched, kind: str, need: Need
) -> None:
    crashing = command(tmp_path, "a", "print(1); exit(9)", kind=kind, need=need)
    async with watched.running([crashing], [command(tmp_path, "b", kind="learner")]):
        await until(lambda: watched.count(Change.STARTED) > FAST.attempts + 2)
    delays = [event.delay_s for event in watched.events if event.change is Change.CRASHED]
    assert delays[:4] == [FAST.first_s, FAST.most_s, FAST.hopeless_s, FAST.hopeless_s]


def ending(folder: Path, need: Need, *, kind: str = "", always: bool = False) -> list[Command]:
    """Return ``a``, which crashes until ``b`` has finished, which it does once ``a`` waits long."""
    starts, over = folder / "starts", folder / "over"
    crash = (
        f"import pathlib, sys; pathlib.Path({str(starts)!r}).open('a').write('x')\n"
        f"sys.exit({always} or not pathlib.Path({str(over)!r}).exists())"
    )
    finish = (
        f"import pathlib, time; starts = pathlib.Path({str(starts)!r})\n"
        f"while not starts.exists() or starts.stat().st_size < {FAST.attempts}: time.sleep(0.01)\n"
        f"pathlib.Path({str(over)!r}).touch()"
    )
    return [
        command(folder, "a", crash, kind=kind, need=need),
        command(folder, "b", finish, kind=kind),
    ]


HOPELESS = replace(FAST, hopeless_s=3600.0)


@pytest.mark.parametrize("need", [Need.SETTINGS, Need.NEVER])
async def test_what_waits_is_started_at_once_when_the_others_have_finished(
    tmp_path: Path, watched: Watched, need: Need
) -> None:
    await watched.supervise(ending(tmp_path, need), policy=HOPELESS).run()
    assert watched.changes("a")[-2:] == [Change.STARTED, Change.FINISHED]


@pytest.mark.parametrize(("need", "kind"), [(Need.NEVER, ""), (Need.SETTINGS, "checkpointer")])
async def test_what_nothing_needs_is_given_up_when_it_crashes_after_the_others_have_finished(
    tmp_path: Path, watched: Watched, need: Need, kind: str
) -> None:
    commands = ending(tmp_path, need, kind=kind, always=True)
    await watched.supervise(commands, policy=HOPELESS).run()
    assert watched.changes("a")[-2:] == [Change.STARTED, Change.REFUSED]


async def test_what_has_work_left_is_tried_as_before_after_the_others_have_finished(
    tmp_path: Path, watched: Watched
) -> None:
    """Two that crash do not wake each other."""
    other = command(tmp_path, "c", "raise SystemExit(1)", need=Need.SETTINGS)
    commands = [*ending(tmp_path, Need.SETTINGS, always=True), other]
    task = asyncio.create_task(watched.supervise(commands, policy=HOPELESS).run())

    def waits() -> bool:
        names = [event.name for event in watched.events]
        late = watched.events[names.index("b") + 1 :] if Change.FINISHED in changes() else []
        return {"a", "c"} <= {event.name for event in late if event.delay_s == HOPELESS.hopeless_s}

    def changes() -> list[Change]:
        return [event.change for event in watched.events]

    await until(waits)
    watched.supervisor.ask_stop()
    await task
    assert all(watched.changes(name).count(Change.STARTED) <= FAST.attempts + 2 for name in "ac")


async def test_what_was_killed_for_a_while_stays_away_when_the_others_finish(
    tmp_path: Path, watched: Watched
) -> None:
    mark = tmp_path / "over"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)"
    async with watched.running(
        [command(tmp_path, "a"), command(tmp_path, "b", "print(1, flush=True)\n" + wait)]
    ):
        watched.supervisor.kill("a", back_after_s=3600.0)
        mark.touch()
        await until(lambda: watched.changes("b") == [Change.STARTED, Change.FINISHED])
        await until(lambda: watched.supervisor._over)
    assert watched.changes("a") == [Change.STARTED, Change.CRASHED]


@pytest.mark.parametrize(
    ("crashes", "delay_s"), [(1, 1.0), (2, 2.0), (4, 8.0), (5, 15.0), (6, 300.0), (5000, 300.0)]
)
def test_restarts_are_delayed_twice_as_long_each_time(crashes: int, delay_s: float) -> None:
    assert RestartPolicy().delay_s(crashes) == delay_s


@pytest.mark.parametrize("code", [2, 3])
async def test_final_exit_codes_are_not_restarted(
    tmp_path: Path, watched: Watched, code: int
) -> None:
    program = f"raise SystemExit({code})"
    await watched.supervise([command(tmp_path, "a", program, need=Need.NEVER)]).run()
    assert watched.changes("a") == [Change.STARTED, Change.REFUSED]


@pytest.mark.parametrize("need", [Need.ALWAYS, Need.SETTINGS])
async def test_a_refused_setting_ends_everything_with_its_sentence(
    tmp_path: Path, watched: Watched, need: Need
) -> None:
    bad = "import sys; print('error: x is 3.', file=sys.stderr); sys.exit(2)"
    supervisor = watched.supervise(
        [command(tmp_path, "a")], [command(tmp_path, "b", bad, need=need)]
    )
    with pytest.raises(ServiceError, match=r"b cannot run: x is 3\.") as caught:
        await supervisor.run()
    assert caught.value.exit_code == 2
    assert watched.count(Change.REFUSED) == 0, "the sentence is said once, by the error"
    assert not is_running(watched.events[0].pid)


async def test_a_superseded_learner_does_not_end_the_others(
    tmp_path: Path, watched: Watched
) -> None:
    superseded = command(tmp_path, "a", "print(1); raise SystemExit(3)")
    async with watched.running([superseded, command(tmp_path, "b")]):
        await until(lambda: watched.count(Change.REFUSED) == 1)
        assert set(watched.supervisor.pids()) == {"b"}


async def test_stop_goes_stage_by_stage(tmp_path: Path, watched: Watched) -> None:
    async with watched.running([command(tmp_path, "a")], [command(tmp_path, "b")]):
        pass
    assert [e.name for e in watched.events if e.change is Change.STOPPED] == ["a", "b"]


@pytest.mark.parametrize("forced", [False, True])
async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_or_when_forced(
    tmp_path: Path, watched: Watched, forced: bool
) -> None:
    grace_s = 600.0 if forced else 0.2
    async with watched.running([command(tmp_path, "a", STUBBORN)], grace_s=grace_s):
        watched.supervisor.ask_stop()
        if forced:
            watched.supervisor.force()
    assert watched.events[-1].code == -signal.SIGKILL
    assert not is_running(watched.events[0].pid)


async def test_a_paused_process_ends_in_order(tmp_path: Path, watched: Watched) -> None:
    async with watched.running([command(tmp_path, "a")], grace_s=600.0):
        watched.supervisor.signal("a", signal.SIGSTOP)
    assert watched.events[-1].code == -signal.SIGTERM


async def test_a_killed_process_comes_back_as_another(tmp_path: Path, watched: Watched) -> None:
    async with watched.running([command(tmp_path, "a")]):
        first = watched.supervisor.kill("a", back_after_s=0.05)
        await until(lambda: watched.count(Change.STARTED) == 2)
        assert watched.events[1].change is Change.CRASHED
        assert watched.events[1].delay_s == 0.05
        assert watched.supervisor.pids()["a"] != first


async def test_stop_during_a_delay_does_not_start_again(tmp_path: Path, watched: Watched) -> None:
    async with watched.running([command(tmp_path, "a")]):
        watched.supervisor.kill("a", back_after_s=600.0)
        await until(lambda: watched.count(Change.CRASHED) == 1)
        with pytest.raises(ProcessLookupError, match="a is not running"):
            watched.supervisor.kill("a", back_after_s=0.0)
    assert watched.count(Change.STARTED) == 1


async def test_what_does_not_become_ready_at_first_ends_everything(
    tmp_path: Path, watched: Watched
) -> None:
    async def never(_pid: int) -> None:
        msg = "It does not answer."
        raise BrokerUnavailable(msg, url="")

    supervisor = watched.supervise([replace(command(tmp_path, "a"), ready=never)])
    with pytest.raises(ServiceError, match=r"a cannot run: It does not answer\."):
        async with supervisor.running():
            pytest.fail("it never worked")
    assert not is_running(watched.events[0].pid)


async def test_what_is_unwell_is_started_again_at_once(tmp_path: Path, watched: Watched) -> None:
    starts: list[int] = []

    async def unwell() -> str:
        if len(starts) > 1:
            await asyncio.Event().wait()
        return "It hangs."

    async def ready(pid: int) -> None:
        starts.append(pid)

    kept = replace(command(tmp_path, "a"), ready=ready, unwell=unwell)
    async with watched.supervise([kept]).running():
        await until(lambda: len(starts) == 2)
    restart = watched.events[1]
    assert (restart.change, restart.sentence, restart.delay_s) == (Change.UNWELL, "It hangs.", 0.0)


@pytest.mark.parametrize("works_at_first", [False, True])
async def test_what_cannot_be_started_fails_at_first_and_is_tried_again_later(
    tmp_path: Path, watched: Watched, works_at_first: bool
) -> None:
    works = [True, False, True] if works_at_first else [False]

    def prepare() -> None:
        if not works.pop(0):
            msg = "There is no room."
            raise ConfigError(msg)

    crashing = command(tmp_path, "a", once(tmp_path / "mark", "sys.exit(9)"))
    supervisor = watched.supervise([replace(crashing, prepare=prepare)])
    if not works_at_first:
        with pytest.raises(ConfigError, match="no room"):
            await supervisor.run()
        return
    await supervisor.run()
    failed = watched.events[2]
    assert (failed.change, failed.pid, failed.sentence) == (Change.CRASHED, 0, "There is no room.")
    assert watched.changes("a")[-1] is Change.FINISHED


async def test_a_log_that_cannot_be_made_is_one_sentence(tmp_path: Path, watched: Watched) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match=r"/logs/a\.log cannot be written \(File exists\)"):
        await watched.supervise([command(tmp_path / "logs", "a")]).run()
    with full_disk():
        await watched.supervise([command(tmp_path, "b", "")]).run()


def test_no_child_survives_sigkill_of_the_supervisor(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, pathlib, sys
from skerry.cli.cluster.supervisor import Command, Supervisor
argv = (sys.executable, "-I", "-S", "-c", {STUBBORN!r})
one = Command("a", "a", argv, pathlib.Path({str(tmp_path)!r}) / "a.log", dict(os.environ))
async def main():
    await Supervisor([[one]], lambda event: print(event.pid, flush=True)).run()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert is_running(pid)
        os.kill(supervisor.pid, signal.SIGKILL)
    asyncio.run(until(lambda: not is_running(pid)))
