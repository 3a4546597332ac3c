"""The processes of a local cluster, in a file of its run folder that other commands read.

The file is written whole and renamed, so that a reader never sees half of it. A pid may belong to
another process by now, so an entry also holds when its process was started.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from skerry.errors import ConfigError
from skerry.service.private import write_private

TABLE = "processes.json"
BROKER = "broker"
ENDED = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})
STOPPED = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process; ``kind`` is its service or ``broker``.

    ``since_boot_s`` is when the kernel started it: setting the wall clock does not change that.
    """

    name: str
    kind: str
    pid: int
    since_boot_s: float

    @property
    def which(self) -> str:
        """Words that tell two starts of it apart."""
        return f"pid {self.pid}"

    @property
    def status(self) -> str:
        """Return psutil's status of the process; empty once it has ended."""
        try:
            if since_boot_s(self.pid) != self.since_boot_s:
                return ""
            status = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return ""
        return "" if status in ENDED else str(status)

    @property
    def alive(self) -> bool:
        return bool(self.status)

    @property
    def paused(self) -> bool:
        """Return True while it is stopped by SIGSTOP."""
        return self.status in STOPPED


class ProcessTable:
    """The processes of one cluster, kept in a file while ``kept`` lasts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, ProcessEntry] = {}
        self._kept = False

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        self._kept = True
        self._write()
        try:
            yield
        finally:
            self._kept = False
            self.path.unlink(missing_ok=True)

    def started(self, name: str, kind: str, pid: int) -> None:
        """Add a process, or replace the one of that name."""
        with contextlib.suppress(psutil.NoSuchProcess):  # its end is reported next
            self._entries[name] = ProcessEntry(name, kind, pid, since_boot_s(pid))
        self._write()

    def ended(self, name: str, pid: int) -> None:
        """Remove a process, unless another one has taken its name."""
        if name in self._entries and self._entries[name].pid == pid:
            del self._entries[name]
            self._write()

    def _write(self) -> None:
        rows = [asdict(entry) for entry in self._entries.values()]
        # A full disk must not stop what keeps the processes running: the next change is written.
        with contextlib.suppress(ConfigError):
            if self._kept:
                write_private(self.path, json.dumps(rows, indent=1) + "\n")


def read(folder: Path) -> dict[str, ProcessEntry]:
    """Return the processes of the cluster that runs in this folder by name; empty without one."""
    try:
        rows = json.loads((folder / TABLE).read_text("utf-8"))
        return {row["name"]: ProcessEntry(**row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def since_boot_s(pid: int) -> float:
    """Return when a process was started, in seconds since the machine's; psutil.NoSuchProcess."""
    booted_s = psutil.boot_time()  # refreshes what create_time adds to the kernel's ticks
    return round(psutil.Process(pid).create_time() - booted_s, 2)
