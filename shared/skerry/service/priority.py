"""Lower the priority of a process that should not slow down others."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
ATTEMPTS, PAUSE_S = 50, 0.11


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
        _renice(niceness)
        if os.getsid(0) == os.getpid():
            target = partial(_renice_session, niceness)
            threading.Thread(target=target, name="yield", daemon=True).start()


def _renice(niceness: int) -> None:
    """Give all threads this nice value, also those that begin meanwhile."""
    done = {threading.get_native_id()}
    while new := _threads() - done:
        for thread in new:
            with suppress(OSError):  # one that has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        done |= new


def _threads() -> set[int]:
    """Return the threads of this process, as the kernel numbers them."""
    try:
        return {int(entry.name) for entry in TASKS.iterdir()}
    except OSError:
        return set()


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
