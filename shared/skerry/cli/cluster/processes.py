"""The processes of a local cluster, in a file of its run folder that other commands read.

Whoever starts the processes keeps the file; it is written whole and renamed, so that a reader never
sees half of it. A pid alone may be another process by now: the start time tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Generator

TABLE = "processes.json"
BROKER = "broker"
RUNNING = frozenset("RSDI")
STOPPED = frozenset("Tt")


@dataclass(frozen=True, slots=True)
class Entry:
    """One process that runs: ``kind`` is its service or ``broker``, ``started_ns`` wall clock.

    ``ticks`` is the kernel's own start time of the pid, 0 where ``/proc`` does not tell.
    """

    name: str
    kind: str
    pid: int
    started_ns: int
    ticks: int = 0

    @property
    def which(self) -> str:
        """Which of its starts this is, in words."""
        return f"pid {self.pid}"

    @property
    def state(self) -> str:
        """The state letter of ``/proc`` (R, S, T, ...); empty once this process has ended."""
        letter, ticks = stat_of(self.pid)
        return letter if ticks == self.ticks and letter not in {"Z", "X"} else ""

    @property
    def alive(self) -> bool:
        return bool(self.state)

    @property
    def paused(self) -> bool:
        """Whether it was stopped by SIGSTOP and has not been resumed."""
        return self.state in STOPPED


class Processes:
    """The table of one cluster's processes, kept in a file while ``kept`` lasts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        self._kept = False

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Keep the file from now on, and remove it at the end."""
        self._kept = True
        self._write()
        try:
            yield
        finally:
            self._kept = False
            self.path.unlink(missing_ok=True)

    def started(self, name: str, kind: str, pid: int) -> None:
        """Note that a process has been started, or started again."""
        self._entries[name] = Entry(name, kind, pid, time.time_ns(), stat_of(pid)[1])
        self._write()

    def ended(self, name: str, pid: int) -> None:
        """Note that a process has ended, unless another has taken its place."""
        held = self._entries.get(name)
        if held is not None and held.pid == pid:
            del self._entries[name]
            self._write()

    def _write(self) -> None:
        if not self._kept:
            return
        rows = [asdict(entry) for entry in self._entries.values()]
        draft = self.path.with_suffix(".draft")
        # A full disk must not stop what keeps the processes running: the next change is written.
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.path)


def read(folder: Path) -> dict[str, Entry]:
    """Return the processes of the cluster that runs in this folder, by name; none if none does."""
    try:
        rows = cast("list[dict[str, Any]]", json.loads((folder / TABLE).read_text("utf-8")))
        return {row["name"]: Entry(**row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def stat_of(pid: int) -> tuple[str, int]:
    """Return the state letter and the start ticks of a pid; ``("", 0)`` if there is no such one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError):
        return ("S", 0) if not Path("/proc/self").exists() and _exists(pid) else ("", 0)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
