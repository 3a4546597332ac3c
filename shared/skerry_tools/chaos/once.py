"""``skerry chaos --once``: one fault, to one process of a cluster that ``skerry up`` keeps here.

It goes by that cluster's table of processes, so it hits no other run of the machine. It needs no
permission of the run: who may give it could as well use ``kill``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum

from skerry.cli.cluster import processes
from skerry.cli.cluster.folder import RunFolder
from skerry.errors import ConfigError
from skerry.service.clusters import RunningCluster


class Once(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    """SIGKILL; ``skerry up`` starts it again."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT after a while."""
    STOP = "stop"
    """SIGTERM: it ends in order, and stays away until ``skerry up`` is given again."""


SIGNALS = {
    Once.KILL: signal.SIGKILL,
    Once.PAUSE: signal.SIGSTOP,
    Once.STOP: signal.SIGTERM,
}


def run_once(
    cluster: RunningCluster, fault: str, name: str, for_s: float, say: Callable[[str], None] = print
) -> None:
    """Do it and say what was done; a pause ends after ``for_s`` seconds, or with this call.

    Raises ConfigError for a fault or a name that there is not, RunInUse while a drill runs.
    """
    folder = RunFolder(cluster.run)
    if fault not in set(Once):
        msg = f"There is no fault {fault!r} for --once: use {', '.join(Once)}."
        raise ConfigError(msg, path="once")
    with folder.drilled():
        entries = {n: e for n, e in processes.read(folder.path).items() if e.alive}
        if name not in entries:
            msg = f"Run {cluster.run!r} has no process {name!r} here: {', '.join(sorted(entries))}."
            raise ConfigError(msg, path="once")
        entry = entries[name]
        os.kill(entry.pid, SIGNALS[Once(fault)])
        match Once(fault):
            case Once.KILL:
                say(f"{name} (pid {entry.pid}) is killed; skerry up starts it again.")
            case Once.STOP:
                say(f"{name} (pid {entry.pid}) is asked to stop, and stays away.")
            case Once.PAUSE:
                say(f"{name} (pid {entry.pid}) is stopped for {for_s:g} s.")
                try:
                    time.sleep(for_s)
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        if entry.alive:
                            os.kill(entry.pid, signal.SIGCONT)
                say(f"{name} goes on.")
