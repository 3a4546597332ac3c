"""Loading the compiled codec and merge, once for all processes that share numba's cache."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from skerry.algorithm import backend

COMPILES_S = 60.0
"""How long at most a process waits for another one, which may be stopped, to compile."""


def load_kernels() -> None:
    """Import the kernels, and compile them the first time, before the first round needs them.

    Compiling takes 13 s of CPU, and services start together: the first one does it for all that
    share its ``NUMBA_CACHE_DIR``.
    """
    with ExitStack() as held:
        with suppress(KeyError, OSError):  # nothing is shared, or nothing can be kept
            lock = Path(os.environ["NUMBA_CACHE_DIR"], ".compiling")
            _wait_for(held.enter_context(lock.open("ab")))
        backend.cpu()
        backend.merger()


def _wait_for(lock: IO[bytes]) -> None:
    ends_s = time.monotonic() + COMPILES_S
    while time.monotonic() < ends_s:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.05)  # a lock sends no event
