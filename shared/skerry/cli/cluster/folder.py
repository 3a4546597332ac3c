"""Where a run lives on this machine: all below ``.skerry`` in the working folder, with its logs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from skerry.cli.cluster.processes import TABLE
from skerry.errors import ConfigError
from skerry.protocol.subjects import TOKEN, checked_token
from skerry.service.clusters import ANNOUNCEMENT, LOCK, LOGIN, ROOT, RunningCluster
from skerry.service.private import private_file, writing

if TYPE_CHECKING:
    from skerry.settings.local import NatsSettings

PID_BYTES = 32
LOG_BYTES = 64 * 1024**2
"""A log that has grown longer is set aside."""
MOST_LOG_BYTES = 65_536
"""Bytes at the end of a log that are looked at."""
JAX_NOTE = "For simplicity, JAX has removed its internal frames"
"""How the last line of a traceback begins where JAX has shortened it: it is not the error."""


def log_file(path: Path) -> BinaryIO:
    """Open a log to append to, and make its folder; ConfigError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")


def set_aside(log: Path) -> None:
    """Move the contents of a log that is too long to ``NAME.1``, over what was there before.

    The process that appends to the log goes on at its start. If ``NAME.1`` cannot be written,
    nothing moves.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_BYTES:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


class RunInUse(ConfigError):
    """Another process of this machine holds what only one process may hold."""


@contextlib.contextmanager
def _locked(path: Path, taken: str) -> Generator[None]:
    """Lock a file and write our pid into it.

    Raises RunInUse if another process holds it; its message ends with ``taken``. Raises ConfigError
    if the folder cannot be written.
    """
    with writing(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(handle, PID_BYTES, 0).decode("utf-8", "replace").strip() or "?"
            msg = f"Process {holder} {taken}"
            raise RunInUse(msg, path="run") from error
        with writing(path):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run on this machine."""

    run: str
    root: Path = ROOT

    def __post_init__(self) -> None:
        checked_token(self.run, "run")

    @property
    def path(self) -> Path:
        return self.root / self.run

    @property
    def broker(self) -> Path:
        return self.path / "broker"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """Every metric of the run, row by row."""
        return self.path / "metrics.jsonl"

    @property
    def settings(self) -> Path:
        """The resolved settings that the services of this cluster are started with."""
        return self.path / "settings.toml"

    @property
    def processes(self) -> Path:
        """While a cluster runs: its processes, by name."""
        return self.path / TABLE

    @property
    def token(self) -> Path:
        """What the page asks for before it injects faults, in a run that allows them."""
        return self.path / "page.token"

    @property
    def cache(self) -> Path:
        """What the services have compiled; all runs of this folder share it."""
        return self.root / "cache"

    @property
    def has_log(self) -> bool:
        """Return True if a broker has ever stored something here."""
        return (self.broker / "jetstream").is_dir()

    def clear(self) -> None:
        """Remove the log of the run; checkpoints stay, and so does what the services wrote."""
        shutil.rmtree(self.broker, ignore_errors=True)

    def start_afresh(self, checkpoints: Path | None = None) -> None:
        """Remove everything about the run; its checkpoints only for a command that owns them."""
        self.clear()
        shutil.rmtree(self.logs, ignore_errors=True)
        for rows in self.path.glob(f"{self.metrics.name}*"):
            rows.unlink(missing_ok=True)
        if checkpoints is not None:
            shutil.rmtree(checkpoints, ignore_errors=True)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Hold this folder for one cluster; RunInUse if another process holds it."""
        what = f"runs {self.run!r} in {self.path} already"
        return _locked(self.path / LOCK, f"{what}: stop it, or take another name with --run.")

    def read(self) -> contextlib.AbstractContextManager[None]:
        """Hold this folder to read its log; RunInUse while a cluster starts, or another reads."""
        what = f"works with run {self.run!r} in {self.path}"
        return _locked(self.path / LOCK, f"{what}: try again once it has started, or is done.")

    def drilled(self) -> contextlib.AbstractContextManager[None]:
        """Hold this cluster's faults for one drill; RunInUse while another drill runs."""
        what = f"drills {self.run!r} already, and two drills undo each other's faults"
        fix = "wait for its verdict, or end it, which heals what it did."
        return _locked(self.path / "drill.lock", f"{what}: {fix}")

    @contextlib.contextmanager
    def announced(self, nats: NatsSettings, *, proxied: bool = False) -> Generator[None]:
        """Let other commands of this user find the cluster while the context lasts."""
        login = {name: str(getattr(nats, name) or "") for name in LOGIN}
        running = RunningCluster(self.run, os.getpid(), nats.url, login, proxied)
        with private_file(self.path / ANNOUNCEMENT, json.dumps(asdict(running))):
            yield


def resting(root: Path = ROOT) -> list[RunFolder]:
    """Return the folders that hold the log of an earlier run, newest first.

    A folder whose name no run can have, such as a copy, is left out.
    """
    names = (path.parent.name for path in root.glob("*/settings.toml"))
    folders = [RunFolder(name, root) for name in names if TOKEN.fullmatch(name)]
    kept = [(folder.settings.stat().st_mtime, folder) for folder in folders if folder.has_log]
    return [folder for _, folder in sorted(kept, key=lambda pair: -pair[0])]


def shut(run: str | None, root: Path = ROOT) -> Path | None:
    """Return a folder of this run, or of any, that this user may not read; None without one."""
    runs = [root / run] if run else [*root.glob("*")]
    for path in (root, *runs):
        with contextlib.suppress(OSError):
            if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
                return path
    return None


def size_of(log: Path) -> int:
    """Return the length of a log: where the next line will begin."""
    return log.stat().st_size if log.exists() else 0


def last_sentence(log: Path, offset: int) -> str:
    """Return the last error that a process wrote from ``offset`` on, or an empty string.

    Prefers the line that services print for an expected error over the end of a traceback, and
    leaves out the borders of exception groups and what JAX adds.
    """
    lines = [line.strip(" |+-") for line in tail(log, offset) if not line.startswith("{")]
    lines = [line for line in lines if not line.startswith(JAX_NOTE)]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return next(filter(None, (*reversed(errors), *reversed(lines))), "")


def last_event(log: Path, offset: int, event: str) -> dict[str, Any]:
    """Return the newest structured line about ``event`` from ``offset`` on; empty without one."""
    found: dict[str, Any] = {}
    for line in tail(log, offset):
        if line.startswith("{") and f'"{event}"' in line:
            with contextlib.suppress(ValueError):
                fields = cast("dict[str, Any]", json.loads(line))
                found = fields if fields.get("event") == event else found
    return found


def tail(log: Path, offset: int) -> list[str]:
    """Return the newest lines of a log from ``offset`` on, of 64 KiB at most."""
    if not log.exists():
        return []
    size = log.stat().st_size
    kept = offset if offset <= size else 0  # somebody has truncated it meanwhile
    with log.open("rb") as file:
        file.seek(max(kept, size - MOST_LOG_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()
