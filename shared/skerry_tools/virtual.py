"""An event loop whose time is virtual: where nothing is ready, the clock moves to the next timer.

Everything on it runs in one thread and in one order, so a program that takes time, randomness and
I/O from its arguments does the same each time. Work for threads runs at once, in line.

What runs on the loop belongs to an owner, a name that tasks inherit. An owner can be frozen, as a
process is by SIGSTOP: its callbacks wait, its timers ring late, and the clock goes on without it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

OWNER: ContextVar[str] = ContextVar("owner", default="")


class Stuck(Exception):
    """Nothing is ready and no timer is set: what is awaited will never come."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The part of an event loop that programs without sockets and threads need."""

    _ready: deque[asyncio.Handle]
    _asyncgen_firstiter_hook: Callable[[Any], None]
    _asyncgen_finalizer_hook: Callable[[Any], None]

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self._errors: list[BaseException] = []

    def __del__(self) -> None:
        """Say nothing of a loop that was not closed: it holds nothing of the system."""

    # what asyncio calls

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override] # its stubs are generic in the arguments
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Keep timers of one time in the order in which they were set."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (when, self._count, handle))
        return handle

    def run_in_executor(  # type: ignore[override] # as above
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do the work now; a thread would have been done at some time before the next event."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to who awaits it
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        found = error if isinstance(error, BaseException) else RuntimeError(context.get("message"))
        if not self.is_closed():
            self._errors.append(found)

    def _check_closed(self) -> None:
        """Let what is dropped after the end call into the void."""

    def _write_to_self(self) -> None:
        """Do nothing: there is one thread, and it is awake."""

    # what a simulation calls

    def freeze(self, owner: str) -> None:
        """Stop everything that belongs to this owner."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: str) -> None:
        """Let an owner go on: what became due meanwhile is run now, in order."""
        self._ready.extend(self._frozen.pop(owner, ()))

    def run_until(self, end: asyncio.Future[T], deadline_s: float) -> bool:
        """Run until the future is done; False if the virtual clock reaches the deadline first.

        Raises Stuck when nothing can ever happen again, and what a callback raised outside tasks.
        """
        with self._current():
            while not end.done():
                if not self._step(deadline_s):
                    return False
        return True

    def settle(self) -> None:
        """Run everything that is ready, without moving the clock: what was cancelled ends in order.

        To be called once before ``close``, so that nothing is dropped half way.
        """
        with self._current():
            while self._ready:
                self._step(self._now_s)

    def close(self) -> None:
        """Forget everything that was still to come."""
        super().close()
        self._timers.clear()
        self._frozen.clear()

    @contextmanager
    def _current(self) -> Generator[None]:
        """Be the running loop, to which generators belong that begin meanwhile."""
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, _leave_open)
        asyncio._set_running_loop(self)  # noqa: SLF001 - the documented hook for other loops
        try:
            yield
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001 - as above
            sys.set_asyncgen_hooks(*before)

    def _step(self, deadline_s: float) -> bool:
        """Run everything that is ready, moving the clock first where nothing is."""
        ready, timers = self._ready, self._timers
        if not ready and not self._advance(deadline_s):
            return False
        while timers and timers[0][0] <= self._now_s:
            ready.append(heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled() and not (self._frozen and self._holds(handle)):
                handle._run()  # noqa: SLF001 - what a loop does with a handle
        if self._errors:
            raise self._errors.pop()
        return True

    def _advance(self, deadline_s: float) -> bool:
        """Move the clock to the next timer; False if that lies beyond the deadline."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heappop(timers)
        if not timers:
            msg = f"Nothing is ready and no timer is set at {self._now_s:.3f} s."
            raise Stuck(msg)
        if timers[0][0] > deadline_s:
            return False
        self._now_s = max(self._now_s, timers[0][0])
        return True

    def _holds(self, handle: asyncio.Handle) -> bool:
        """Put a callback of a frozen owner aside; False for anybody else's."""
        context: Context = handle._context  # type: ignore[attr-defined] # noqa: SLF001 - public from 3.12 on
        held = self._frozen.get(context.get(OWNER, ""))
        if held is None:
            return False
        held.append(handle)
        return True


def _leave_open(generator: object) -> None:
    """Close no generator that is dropped half way: nothing of a process runs after its death."""
    del generator
