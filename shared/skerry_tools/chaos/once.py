"""``skerry chaos --once``: one fault, to one process of a cluster that ``skerry up`` keeps here.

It goes by that cluster's table of processes, so it hits no other run of the machine. It needs no
permission of the run: who may give it could as well use ``kill``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager

from skerry.cli.cluster import processes
from skerry.cli.cluster.folder import RunFolder
from skerry.errors import ConfigError
from skerry.service.clusters import RunningCluster
from skerry.service.interrupts import Interrupted
from skerry_tools.chaos.healing import resume

SIGNALS = {
    "kill": (signal.SIGKILL, "is killed; skerry up starts it again."),
    "pause": (signal.SIGSTOP, "is stopped for {for_s:g} s."),
    "stop": (signal.SIGTERM, "is asked to stop, and stays away."),
}
"""What is done to a process, and what is said of it."""
ENDS = signal.SIGTERM, signal.SIGHUP
"""What ends this command beside Ctrl-C: a time limit, a terminal that is closed."""


def run_once(cluster: RunningCluster, fault: str, name: str, for_s: float) -> None:
    """Do it and say what was done; a pause ends after ``for_s`` seconds, or with this call.

    Raises ConfigError for an unknown fault or name, RunInUse while a drill runs.
    """
    folder = RunFolder(cluster.run)
    if fault not in SIGNALS:
        msg = f"There is no fault {fault!r} for --once: use {', '.join(SIGNALS)}."
        raise ConfigError(msg, path="once")
    with folder.drilled():
        entries = {n: e for n, e in processes.read(folder.path).items() if e.alive}
        if name not in entries:
            msg = f"Run {cluster.run!r} has no process {name!r} here: {', '.join(sorted(entries))}."
            raise ConfigError(msg, path="once")
        entry = entries[name]
        number, said = SIGNALS[fault]
        said = f"{name} (pid {entry.pid}) {said.format(for_s=for_s)}"
        if number is not signal.SIGSTOP:
            os.kill(entry.pid, number)
            print(said)
            return
        with _raising():
            try:
                os.kill(entry.pid, number)
                print(said)
                time.sleep(for_s)
            finally:
                resume(entry)
        print(f"{name} goes on.")


@contextmanager
def _raising() -> Generator[None]:
    """Have what ends this process raise Interrupted, once: what it has stopped is to go on."""
    handled = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]

    def end(by: int, _frame: object) -> None:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise Interrupted(by)

    before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
