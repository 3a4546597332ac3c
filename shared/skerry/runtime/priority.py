"""Standing behind everybody else on a machine."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
TASKS = Path("/proc/self/task")
ATTEMPTS, PAUSE_S = 10, 0.11


def yield_to_others(by: int) -> None:
    """Make every thread of this process, and those they start from now on, nicer by ``by`` (0-19).

    Linux may share the CPU out between sessions first (``sched_autogroup_enabled``), and then a
    nice process alone in its session yields to nobody: so a session that is ours becomes as nice.
    Nothing happens where the system has no such thing.
    """
    if not hasattr(os, "nice"):
        return
    niceness = os.nice(by)
    for thread in _threads():
        with suppress(OSError):  # it has ended meanwhile
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _write(f"{niceness}\n")


def _threads() -> list[int]:
    """Return the threads of this process but the calling one, as the kernel numbers them."""
    try:
        found = [int(entry.name) for entry in TASKS.iterdir()]
    except OSError:
        return []
    return [thread for thread in found if thread != threading.get_native_id()]


def _write(text: str) -> None:
    """Tell the kernel, which takes one such word of an ordinary user per tenth of a second."""
    for _ in range(ATTEMPTS):
        try:
            AUTOGROUP.write_text(text, encoding="ascii")
        except BlockingIOError:
            time.sleep(PAUSE_S)
        else:
            return
