"""asyncio's task group as of Python 3.13, its time, and calls in threads.

Before 3.13, two faults of the group end a service that should live, or keep one alive that should
end:

- A group whose task fails while its end waits for it leaves a cancellation counted in the waiting
  task. On Python 3.11.2, Debian's, every later ``asyncio.timeout`` of that task then comes out as
  a cancellation, which no ``except TimeoutError`` catches.
- A cancellation from outside that meets a task's error is dropped in favour of the error: what
  handles that runs on as if it had not been asked to end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_ASKED: ContextVar[threading.Event | None] = ContextVar("_ASKED", default=None)
"""Set once the call of ``in_thread`` that this thread computes has been cancelled."""
_COUNTED: ContextVar[Computations | None] = ContextVar("_COUNTED", default=None)


class TaskGroup(asyncio.TaskGroup):  # noqa: TID251 - the one that is to be used instead
    """``asyncio.TaskGroup`` as in Python 3.13: it takes back its own cancellation, and no other.

    A cancellation from outside that met an error comes again at the next ``await``.
    """

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        self._outstanding = task.cancelling() if task is not None else 0
        return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asked = self._asked()
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            task = asyncio.current_task()
            if task is not None and sys.version_info < (3, 13):
                if self._asked() and not asked:
                    task.uncancel()
                if task.cancelling() > self._outstanding:
                    task.uncancel()
                    task.cancel()
            raise

    def _asked(self) -> bool:
        """Return True if the group has cancelled its own waiting task."""
        return bool(getattr(self, "_parent_cancel_requested", False))


@dataclass(slots=True)
class Computations:
    """How many calls of ``computed`` are under way, of one task and of those that it began."""

    count: int = 0


def count_computations(into: Computations) -> None:
    """Count there what this task computes from now on, and the tasks that it begins."""
    _COUNTED.set(into)


async def computed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a computation that may take minutes in a thread, so that no watcher calls it stuck."""
    counted = _COUNTED.get() or Computations()
    counted.count += 1
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    finally:
        counted.count -= 1


async def in_thread(blocking: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread; a cancellation waits for it, so that no two overlap.

    A long call ends sooner where it asks ``end_if_cancelled`` now and then.
    """
    asked = threading.Event()

    def called() -> T:
        _ASKED.set(asked)  # in this call's copy of the context
        return blocking(*args, **kwargs)

    task = asyncio.ensure_future(asyncio.to_thread(called))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        asked.set()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # else asyncio reports it, with a traceback, as never retrieved
        raise
    return task.result()


def end_if_cancelled() -> None:
    """Raise CancelledError in a call of ``in_thread`` that has been cancelled; else do nothing."""
    asked = _ASKED.get()
    if asked is not None and asked.is_set():
        raise asyncio.CancelledError


def pause(seconds: float) -> None:
    """Let a thread sleep; in a call of ``in_thread`` raise CancelledError once it is cancelled."""
    (_ASKED.get() or threading.Event()).wait(seconds)
    end_if_cancelled()


def now_s() -> float:
    """Return the event loop's time, which simulations replace."""
    return asyncio.get_running_loop().time()


async def happens(event: asyncio.Event, within_s: float | None) -> bool:
    """Wait for an event, for ``within_s`` at most; return True if it is set by then."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False
