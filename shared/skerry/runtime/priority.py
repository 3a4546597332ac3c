"""Standing behind everybody else on a machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")
ATTEMPTS, PAUSE_S = 10, 0.11


def yield_to_others(by: int) -> None:
    """Make this process, and the threads it starts from now on, nicer by ``by`` (0 to 19).

    Linux may share the CPU out between sessions first (``sched_autogroup_enabled``), and then a
    nice process alone in its session yields to nobody: so a session that is ours becomes as nice.
    Nothing happens where the system has no such thing.
    """
    if not hasattr(os, "nice"):
        return
    niceness = os.nice(by)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _write(f"{niceness}\n")


def _write(text: str) -> None:
    """Tell the kernel, which takes one such word of an ordinary user per tenth of a second."""
    for _ in range(ATTEMPTS):
        try:
            AUTOGROUP.write_text(text, encoding="ascii")
        except BlockingIOError:
            time.sleep(PAUSE_S)
        else:
            return
