"""Start a command that cannot outlive the process that asked for it.

Run by path and without site-packages (15 ms): ``python -I -S child.py PARENT_PID SIGNAL COMMAND``.
The kernel sends the signal to the command when its parent dies, however that dies; the setting
survives ``exec``. A ``preexec_fn`` would do the same, but is not safe once the parent has threads.

SIGXFSZ is blocked: a file that may not grow becomes a write error, as on a full disk, and the
pending signal shows that a write was refused.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process to its parent, then become the command."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("error: The process that started this one is gone.")
    os.execvp(command[0], command)  # noqa: S606 - becoming the command is the point


if __name__ == "__main__":
    main()
