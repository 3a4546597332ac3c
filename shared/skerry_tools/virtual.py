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
from contextlib import contextmanager
from contextvars import Context, ContextVar
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator

    Base = asyncio.BaseEventLoop  # for type checkers, whatever is not there raises: it is abstract
else:
    Base = asyncio.AbstractEventLoop

T = TypeVar("T")

OWNER: ContextVar[str] = ContextVar("owner", default="")


class Stuck(Exception):
    """Nothing is ready and no timer is set: what is awaited will never come."""


class VirtualLoop(Base):
    """The part of an event loop that programs without sockets and threads need."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        self._errors: list[BaseException] = []
        self._generators: WeakSet[AsyncGenerator[Any, Any]] = WeakSet()
        self._closed = False

    # What asyncio calls. Its stubs are generic in the arguments of callbacks, which nothing here
    # needs: hence the ignored overrides.

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override] # see above
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment] # see above

    def call_at(  # type: ignore[override] # see above
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heappush(self._timers, (when, self._count, handle))
        return handle

    def call_later(  # type: ignore[override] # see above
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override] # see above
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override] # see above
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

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        found = error if isinstance(error, BaseException) else RuntimeError(context.get("message"))
        if not self._closed:
            self._errors.append(found)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it among the timers: it is passed over when its time comes."""

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
        self._ready.clear()
        self._timers.clear()
        self._frozen.clear()
        self._closed = True

    @contextmanager
    def _current(self) -> Generator[None]:
        """Be the running loop, to which generators belong that begin meanwhile."""
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._generators.add, self._finish_generator)
        asyncio._set_running_loop(self)  # noqa: SLF001 - the documented hook for other loops
        try:
            yield
        finally:
            asyncio._set_running_loop(None)  # noqa: SLF001 - as above
            sys.set_asyncgen_hooks(*before)

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        """End a generator that was dropped half way."""
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(_close(generator))

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


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
