"""Start a command that cannot outlive the process that asked for it.

Run by path and without site-packages (15 ms): ``python -I -S child.py PARENT_PID COMMAND...``.
The kernel kills the command when its parent dies, however the parent dies; the setting survives
``exec``. A ``preexec_fn`` would do the same, but is not safe once the parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to its parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("error: The process that started this one is gone.")
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main()
