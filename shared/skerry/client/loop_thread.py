"""An event loop in a thread of its own, for a program that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines beside the thread that made it, until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        context = copy_context()  # so that the thread's log lines say whose they are
        self._thread = threading.Thread(
            target=context.run, args=(self._loop.run_forever,), name=name, daemon=True
        )
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread; nothing happens once the loop has closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for what it returns; an interrupt cancels it."""
        running = self.begin(coroutine)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, and end the thread."""
        with suppress(RuntimeError):
            self.begin(_cancel_others()).result()
        self.call(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
