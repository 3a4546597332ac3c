"""The shell every service runs in: named loops, one stop, ordered drain, bounded exit."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.errors import BrokerUnavailable, SkerryError, StorageFull, first_cause
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

log = structlog.get_logger()

RECANCEL_S = 1.0
RETRY_S = 1.0

T = TypeVar("T")
Loop = Callable[[], Awaitable[None]]


class ShutdownTimeoutError(SkerryError, TimeoutError):
    """Draining took longer than the deadline; a restart sends what was not acknowledged."""


class LoopLostError(SkerryError, RuntimeError):
    """A part of the service was cancelled without a reason: it must be started again."""


async def serve(loops: Mapping[str, Loop], *, drain: Loop | None = None, shutdown_s: float) -> None:
    """Run every loop until a signal comes or one of them returns, then cancel the rest and drain.

    A loop that returns says that the service's work is done; one that raises ends the service with
    that error. Raises ShutdownTimeoutError when draining takes longer than ``shutdown_s``; a second
    signal skips the drain.
    """
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    running = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, on_signal)
    try:
        await _run(loops, stop)
        if drain is not None:
            await _bounded(drain, hurry, shutdown_s)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)


async def outlast(
    session: Callable[[], Awaitable[T]],
    passing: tuple[type[SkerryError], ...] = (BrokerUnavailable, StorageFull),
    event: str = "session_restarts",
) -> T:
    """Run a session again whenever it ends for a ``passing`` reason; return what it returns.

    By default: whenever the broker was away or full. Raises the cause of any other end.
    """
    while True:
        try:
            return await session()
        except (SkerryError, BaseExceptionGroup) as error:
            cause = first_cause(error)
            if not isinstance(cause, passing):
                if cause is error:
                    raise
                raise cause from error
            log.warning(event, cause=str(cause))
            del cause  # its traceback holds the session's frames, and those all its vectors
        await asyncio.sleep(RETRY_S)


async def _run(loops: Mapping[str, Loop], stop: asyncio.Event) -> None:
    ending = asyncio.Event()

    async def guarded(name: str, loop: Loop) -> None:
        try:
            await loop()
        except asyncio.CancelledError as error:
            if ending.is_set():
                raise
            ending.set()
            # A task group takes a stray cancellation for an end: the service would live on without
            # its work, and no supervisor could know. The task's own count of cancellations is of no
            # use: libraries leave some uncounted.
            msg = f"The {name} loop was cancelled without a reason: start the service again."
            raise LoopLostError(msg) from error
        except BaseException:
            ending.set()
            raise
        stop.set()

    async with TaskGroup() as group:
        tasks = [group.create_task(guarded(name, loop), name=name) for name, loop in loops.items()]
        try:
            await stop.wait()
        finally:
            ending.set()
        pending = set(tasks)
        while pending:
            for task in pending:
                task.cancel()
            # Again if need be: before Python 3.12 asyncio.wait_for may swallow a cancellation.
            _, pending = await asyncio.wait(pending, timeout=RECANCEL_S)


async def _bounded(drain: Loop, hurry: asyncio.Event, shutdown_s: float) -> None:
    draining = asyncio.ensure_future(drain())
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait(
            {draining, hurried}, timeout=shutdown_s, return_when=asyncio.FIRST_COMPLETED
        )
        if draining.done():
            draining.result()
        elif not hurried.done():
            msg = f"The service could not finish its work within {shutdown_s:g} s of being stopped."
            raise ShutdownTimeoutError(msg)
    finally:
        draining.cancel()
        hurried.cancel()
        await asyncio.gather(draining, hurried, return_exceptions=True)
