"""The service shell: what ends a service, and how; waiting for a run; yielding to others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import BrokerUnavailable, RunNotFound, StateLost, StorageFull, first_cause
from skerry.log import ledger, recovery
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.service import shell
from skerry.service.shell import (
    AUTOGROUP,
    LoopLostError,
    ShutdownTimeoutError,
    arrive,
    outlast,
    serve,
    touching,
)
from tests.support.builders import run_record
from tests.support.scripted_run import ScriptedRun

RECORD = run_record("run", plan([LeafSpec("w", (4, 4))], 1), "{}")


class Drain:
    """A drain that remembers that it was called, and may take for ever."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.called = asyncio.Event()
        self.hangs = hangs

    async def __call__(self) -> None:
        self.called.set()
        if self.hangs:
            await asyncio.Event().wait()


async def forever() -> None:
    await asyncio.Event().wait()


async def done() -> None:
    await asyncio.sleep(0)


async def fails() -> None:
    msg = "no such run"
    raise RunNotFound(msg)


async def signals_itself() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await forever()


@pytest.mark.parametrize("loop", [done, signals_itself], ids=["its_end", "a_signal"])
async def test_what_ends_a_loop_ends_the_service_after_its_drain(loop: shell.Loop) -> None:
    drain = Drain()
    await serve({"work": loop, "idle": forever}, drain=drain, shutdown_s=5)
    assert drain.called.is_set()


async def test_one_that_stays_waits_for_a_signal_after_its_work_and_only_for_one() -> None:
    staying = asyncio.create_task(serve({"work": done}, shutdown_s=5, stays=True))
    ended, _ = await asyncio.wait({staying}, timeout=0.2)
    assert not ended
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await staying
        await serve({"work": signals_itself}, shutdown_s=5, stays=True)


async def test_drain_that_hangs_is_given_up_at_the_deadline() -> None:
    with pytest.raises(ShutdownTimeoutError, match=r"within 0\.05 s.*broker answer"):
        await serve({"work": done}, drain=Drain(hangs=True), shutdown_s=0.05)


async def test_second_signal_skips_the_drain() -> None:
    drain = Drain(hangs=True)
    serving = asyncio.create_task(serve({"work": signals_itself}, drain=drain, shutdown_s=60))
    await drain.called.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await serving


async def test_loop_that_fails_ends_the_others_and_its_error_comes_out() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        await serve({"work": fails, "idle": forever}, shutdown_s=5)
    assert isinstance(first_cause(raised.value), RunNotFound)


async def test_loop_that_is_cancelled_without_a_reason_ends_the_service_with_an_error() -> None:
    """A task group takes a stray cancellation for an end; the service would do nothing, ever."""

    async def strays() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # a library's cancellation that was dropped, and stays counted
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.wait_for(serve({"work": strays, "idle": forever}, shutdown_s=5), 10)
    assert [type(error) for error in raised.value.exceptions] == [LoopLostError]


def ending_with(*ends: BaseException | str) -> Callable[[], Awaitable[str]]:
    """Return a session that ends like that, one time after the other."""
    left = list(ends)

    async def session() -> str:
        end = left.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    return session


async def test_a_session_is_run_again_while_the_broker_is_away_or_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    away = BrokerUnavailable("It is away.", url="nats://b")
    full = ExceptionGroup("tasks", [StorageFull("It is full.")])
    assert await outlast(ending_with(away, full, away, "over")) == "over"


@pytest.mark.parametrize("grouped", [False, True])
async def test_any_other_end_of_a_session_is_raised_with_its_cause(grouped: bool) -> None:
    why, other = KeyError("run"), RunNotFound("There is no run.")
    other.__cause__ = why
    end = ExceptionGroup("tasks", [other]) if grouped else other
    with pytest.raises(RunNotFound) as caught:
        await outlast(ending_with(end))
    assert caught.value is other
    assert caught.value.__cause__ is (end if grouped else why)


async def test_a_service_that_comes_before_its_run_says_once_that_it_waits() -> None:
    bus = MemoryBroker().connect()
    with capture_logs() as logs:
        waiting = asyncio.create_task(arrive(bus, "run"))
        async with asyncio.timeout(5):
            await asyncio.sleep(0.05)
            await bus.declare(specs("run"))
            await ledger.create_run(bus, RECORD)
            assert await waiting == RECORD
            assert await arrive(bus, "run") == RECORD
    assert [line["event"] for line in logs] == ["waits_for_run"]


async def test_run_that_lost_its_ledger_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LOOK_PAUSES_S", (0.0,) * 8)
    bus = MemoryBroker().connect()
    await (await ScriptedRun.begin(bus, "run")).commit_all()
    del bus.broker.streams["SKERRY_run_LEDGER"]
    with pytest.raises(StateLost, match="has lost its record in the ledger"):
        await asyncio.wait_for(arrive(bus, "run"), 5)


ASK = """
import os, threading
from skerry.service.shell import AUTOGROUP, yield_to_others
over = threading.Event()
other = threading.Thread(target=over.wait)
other.start()
yield_to_others(7)
[t.join() for t in threading.enumerate() if t.name == "yield"]
print(os.nice(0), os.getpriority(os.PRIO_PROCESS, other.native_id),
      AUTOGROUP.read_text() if AUTOGROUP.exists() else "")
over.set()
"""


def niceness(*, own_session: bool) -> str:
    """Return the niceness of a process that yields, of its thread, and of its session."""
    words = [sys.executable, "-c", ASK]
    return subprocess.check_output(words, text=True, start_new_session=own_session).strip()


def test_a_service_that_yields_is_nicer_than_before_with_all_its_threads() -> None:
    before = int(subprocess.check_output(["nice"], text=True))
    own, thread, *_ = niceness(own_session=False).split()
    assert own == str(min(19, before + 7))
    assert thread == own or sys.platform != "linux"


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel shares out by process")
def test_its_own_session_is_as_nice_and_somebody_elses_is_left_alone() -> None:
    own = niceness(own_session=True)
    assert own.endswith(f"nice {own.split()[0]}")
    assert niceness(own_session=False).endswith(AUTOGROUP.read_text().strip())


async def test_a_file_is_touched_while_the_event_loop_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "ALIVE_S", 0.0)
    alive = tmp_path / "alive"

    async def main() -> None:
        for _ in range(2):
            while not alive.exists():  # noqa: ASYNC110 - a file sends no event
                await asyncio.sleep(0)
            alive.unlink()

    await asyncio.wait_for(touching(alive, main()), 20)


async def test_a_file_that_cannot_be_touched_is_said_and_ends_nothing(tmp_path: Path) -> None:
    with capture_logs() as logs:
        await touching(tmp_path / "no" / "alive", asyncio.sleep(0.01))
    assert logs[0]["event"] == "alive_file_not_written"
