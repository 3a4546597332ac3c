"""Standing behind everybody else on a machine."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
ATTEMPTS, PAUSE_S = 50, 0.11


def yield_to_others(by: int) -> None:
    """Make every thread of this process, and those they start from now on, nicer by ``by`` (0-19).

    Linux may share the CPU out between sessions first (``sched_autogroup_enabled``), and then a
    nice process alone in its session yields to nobody: so a session that is ours becomes as nice.
    Between containers neither counts, but their CPU shares. Nothing happens where the system has no
    such thing, or refuses: it is a courtesy. Returns at once.
    """
    if not hasattr(os, "nice"):
        return
    with suppress(OSError):
        niceness = os.nice(by)
        _renice(niceness)
        if os.getsid(0) == os.getpid():
            telling = threading.Thread(target=_tell, args=(niceness,), name="yield", daemon=True)
            telling.start()


def _renice(niceness: int) -> None:
    """Make all threads as nice as this one, those too that begin meanwhile."""
    done = {threading.get_native_id()}
    while new := _threads() - done:
        for thread in new:
            with suppress(OSError):  # it has ended meanwhile
                os.setpriority(os.PRIO_PROCESS, thread, niceness)
        done |= new


def _threads() -> set[int]:
    """Return the threads of this process, as the kernel numbers them."""
    try:
        return {int(entry.name) for entry in TASKS.iterdir()}
    except OSError:
        return set()


def _tell(niceness: int) -> None:
    """Tell the kernel, which takes one such word per tenth of a second from all users together."""
    for _ in range(ATTEMPTS):
        try:
            AUTOGROUP.write_text(f"{niceness}\n", encoding="ascii")
        except BlockingIOError:
            time.sleep(PAUSE_S)
        except OSError:
            return
        else:
            return
