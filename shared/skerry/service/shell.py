"""The shell every service runs in: named loops, one stop, ordered drain, bounded exit."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.errors import BrokerUnavailable, SkerryError, StorageFull, first_cause
from skerry.log import ledger
from skerry.log.recovery import find_run
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord

log = structlog.get_logger()

ALIVE_S = 5.0
RECANCEL_S = 1.0
RETRY_S = 1.0
AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
ATTEMPTS, PAUSE_S = 50, 0.11

T = TypeVar("T")
Loop = Callable[[], Awaitable[None]]


class ShutdownTimeoutError(SkerryError, TimeoutError):
    """Draining took longer than the deadline; a restart sends what was not acknowledged."""


class LoopLostError(SkerryError, RuntimeError):
    """A part of the service was cancelled without a reason: it must be started again."""


async def serve(
    loops: Mapping[str, Loop],
    *,
    drain: Loop | None = None,
    shutdown_s: float,
    stays: bool = False,
) -> None:
    """Run every loop until a signal comes or one of them returns, then cancel the rest and drain.

    A loop that returns says that the service's work is done; one that raises ends the service with
    that error. Raises ShutdownTimeoutError when draining takes longer than ``shutdown_s``; a second
    signal skips the drain. With ``stays`` it waits for a signal at the end, if none has come.
    """
    stop, hurry, signalled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()
        signalled.set()

    running = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        running.add_signal_handler(number, on_signal)
    try:
        await run_loops(loops, stop)
        if drain is not None:
            await _bounded(drain, hurry, shutdown_s)
        if stays and not signalled.is_set():
            log.info("stays", hint="its work is done: it waits for a signal")
            await signalled.wait()
    finally:
        for number in signals:
            running.remove_signal_handler(number)


async def touching(alive: Path | None, main: Awaitable[T]) -> T:
    """Await ``main``, and touch a file every ``ALIVE_S`` as long as the event loop turns.

    By its age a supervisor sees that a process hangs, whether the broker can be reached or not.
    """
    if alive is None:
        return await main

    task = asyncio.create_task(_touch(alive))
    try:
        return await main
    finally:
        task.cancel()


async def _touch(path: Path) -> None:
    while True:
        try:
            path.touch()  # noqa: ASYNC240 - a loop that waits for its disk hangs
        except OSError as error:
            log.warning("alive_file_not_written", file=str(path), cause=str(error))
        await asyncio.sleep(ALIVE_S)


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


async def run_loops(loops: Mapping[str, Loop], stop: asyncio.Event) -> None:
    """Run every loop until ``stop`` is set or one of them returns, then cancel the rest.

    Raises the error of a loop that fails, in an exception group.
    """
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
            msg = (
                f"The service could not finish its work within {shutdown_s:g} s of being stopped:"
                " does its broker answer, or a region's hub? What was acknowledged is kept."
            )
            raise ShutdownTimeoutError(msg)
    finally:
        draining.cancel()
        hurried.cancel()
        await asyncio.gather(draining, hurried, return_exceptions=True)


async def arrive(bus: Bus, run: str) -> RunRecord:
    """Return the run's record, waiting until a learner has created it or a checkpoint restored it.

    Raises StateLost where the record is gone while the log still holds state of the run: it would
    never come.
    """
    record = await find_run(bus, run, waits=True)
    if record is not None:
        return record
    hint = f"no such run yet: a learner or `skerry create {run}` creates it; is the run id right?"
    log.warning("waits_for_run", run=run, hint=hint)
    return await ledger.wait_run(bus, run)


def yield_to_others(by: int) -> None:
    """Raise the nice value of every thread of this process by ``by`` (0-19), and of later ones.

    Linux may first share the CPU between sessions (``sched_autogroup_enabled``), where a process
    that is alone in its session yields to no other: a session of our own becomes as nice. Between
    containers neither counts, only their CPU shares. Where the system has no such thing, or
    refuses, nothing happens. Returns at once.
    """
    if not hasattr(os, "nice"):
        return
    with suppress(OSError):
        niceness = os.nice(by)
        done = {threading.get_native_id()}
        with suppress(OSError):  # no such files but on Linux
            while new := {int(entry.name) for entry in TASKS.iterdir()} - done:
                for thread in new:  # also those that begin meanwhile
                    with suppress(OSError):  # one that has ended meanwhile
                        os.setpriority(os.PRIO_PROCESS, thread, niceness)
                done |= new
        if os.getsid(0) == os.getpid():
            target = partial(_renice_session, niceness)
            threading.Thread(target=target, name="yield", daemon=True).start()


def _renice_session(niceness: int) -> None:
    """Renice our session; the kernel takes one request per tenth of a second from all users."""
    for _ in range(ATTEMPTS):
        try:
            AUTOGROUP.write_text(f"{niceness}\n", encoding="ascii")
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return
        else:
            return
