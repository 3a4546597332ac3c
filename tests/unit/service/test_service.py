"""The service shell: what ends a service, and how."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from skerry.errors import (
    BrokerUnavailable,
    ConfigError,
    RunNotFound,
    SkerryError,
    StorageFull,
    first_cause,
)
from skerry.service import shell
from skerry.service.entry import exit_on_error, run_service
from skerry.service.shell import LoopLostError, ShutdownTimeoutError, outlast, serve


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


async def test_loop_that_returns_ends_the_service_after_its_drain() -> None:
    drain = Drain()
    await serve({"work": done, "idle": forever}, drain=drain, shutdown_s=5)
    assert drain.called.is_set()


async def test_signal_cancels_the_loops_and_drains() -> None:
    drain = Drain()
    await serve({"work": signals_itself, "idle": forever}, drain=drain, shutdown_s=5)
    assert drain.called.is_set()


async def test_drain_that_hangs_is_given_up_at_the_deadline() -> None:
    with pytest.raises(ShutdownTimeoutError, match=r"within 0\.05 s"):
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


def test_our_error_comes_before_others_of_its_group() -> None:
    ours = ConfigError("wrong")
    group = BaseExceptionGroup("g", [ValueError("x"), BaseExceptionGroup("h", [OSError(), ours])])
    assert first_cause(group) is ours


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("Set a.b."), 2), (SkerryError("Broken."), 1), (RunNotFound("None."), 2)],
)
def test_our_error_is_one_sentence_and_its_exit_code(
    error: SkerryError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_service(main())
    assert raised.value.code == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_defect_keeps_its_traceback() -> None:
    defect = BaseExceptionGroup("g", [ZeroDivisionError()])
    with pytest.raises(BaseExceptionGroup), exit_on_error():
        raise defect


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


AWAY = BrokerUnavailable("It is away.", url="nats://b")


async def ending_with(*ends: BaseException | str) -> str:
    """Outlast sessions that end like that, one after the other, and return what the last returns.

    Sessions that are left over are a failure.
    """
    left = list(ends)

    async def session() -> str:
        end = left.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    try:
        return await outlast(session)
    finally:
        assert not left


async def test_a_session_is_run_again_while_the_broker_is_away_or_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    full = ExceptionGroup("tasks", [StorageFull("It is full.")])
    assert await ending_with(AWAY, full, AWAY, "over") == "over"


@pytest.mark.parametrize("grouped", [False, True])
async def test_any_other_end_of_a_session_is_raised_with_its_cause(grouped: bool) -> None:
    why, other = KeyError("run"), RunNotFound("There is no run.")
    other.__cause__ = why
    end = ExceptionGroup("tasks", [other]) if grouped else other
    with pytest.raises(RunNotFound) as caught:
        await ending_with(end)
    assert caught.value is other
    assert caught.value.__cause__ is (end if grouped else why)
