"""Where a run lives on this machine: everything below ``.skerry`` in the working folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from skerry.cli.cluster.processes import TABLE
from skerry.errors import ConfigError, SkerryError
from skerry.protocol.subjects import checked_token

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(".skerry")
CACHE = "cache"
PID_BYTES = 32


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn the OSError of a write to the run's folder into a ConfigError that says what to do."""
    try:
        yield
    except SkerryError:  # some are OSErrors, too, and say what to do
        raise
    except OSError as error:
        msg = (
            f"{path.absolute()} cannot be written ({error.strerror or error}): start this command "
            "in a folder of your own, where there is room."
        )
        raise ConfigError(msg, path="run") from error


def log_file(path: Path, mode: Literal["ab", "wb"] = "ab") -> BinaryIO:
    """Open a log, and make its folder; ConfigError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode)


class RunInUse(ConfigError):
    """Another process of this machine does in the same folder what one alone may do."""


@contextlib.contextmanager
def _kept(path: Path) -> Generator[str]:
    """Lock a file, write our pid into it, and yield nothing; or the pid of who has it locked."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        holder = ""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, PID_BYTES, 0).decode("utf-8", "replace").strip() or "?"
        else:
            with writing(path):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield holder
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one run."""

    run: str
    root: Path = ROOT

    def __post_init__(self) -> None:
        checked_token(self.run, "run")

    @property
    def folder(self) -> Path:
        return self.root / self.run

    @property
    def lock(self) -> Path:
        """Locked by the process that runs a cluster here; holds its pid."""
        return self.folder / "lock"

    @property
    def broker(self) -> Path:
        return self.folder / "broker"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def metrics(self) -> Path:
        """Every metric of the run, row by row."""
        return self.folder / "metrics.jsonl"

    @property
    def settings(self) -> Path:
        """The resolved settings that the services of this cluster are started with."""
        return self.folder / "settings.toml"

    @property
    def cluster(self) -> Path:
        """While a cluster runs: where its broker listens."""
        return self.folder / "cluster.json"

    @property
    def processes(self) -> Path:
        """While a cluster runs: its processes, by name."""
        return self.folder / TABLE

    @property
    def token(self) -> Path:
        """What a person must know to strike learners from the page of a run that allows it."""
        return self.folder / "page.token"

    @property
    def cache(self) -> Path:
        return self.root / CACHE

    @property
    def has_state(self) -> bool:
        """Whether a broker has ever kept something here."""
        return (self.broker / "jetstream").is_dir()

    def clear(self) -> None:
        """Remove the log of the run; checkpoints stay, and so does what the services wrote."""
        shutil.rmtree(self.broker, ignore_errors=True)

    def start_anew(self, checkpoints: Path | None = None) -> None:
        """Remove everything about the run; its checkpoints only for a command that owns them."""
        self.clear()
        shutil.rmtree(self.logs, ignore_errors=True)
        for rows in self.folder.glob(f"{self.metrics.name}*"):
            rows.unlink(missing_ok=True)
        if checkpoints is not None:
            shutil.rmtree(checkpoints, ignore_errors=True)

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Keep this run's folder for one cluster.

        Raises RunInUse if somebody else has it, ConfigError if it cannot be written.
        """
        with _kept(self.lock) as holder:
            if holder:
                msg = (
                    f"Process {holder} runs {self.run!r} in {self.folder} "
                    "already: stop it, or take another name with --run."
                )
                raise RunInUse(msg, path="run")
            yield

    @contextlib.contextmanager
    def drilled(self) -> Generator[None]:
        """Keep this cluster's faults for one drill.

        Raises RunInUse while another one is at work, ConfigError if the folder cannot be written.
        """
        with _kept(self.folder / "drill.lock") as holder:
            if holder:
                msg = (
                    f"Process {holder} drills {self.run!r} already, and two drills undo each "
                    "other's faults: wait for its verdict, or end it, which heals what it did."
                )
                raise RunInUse(msg, path="run")
            yield

    @contextlib.contextmanager
    def announced(self, url: str) -> Generator[None]:
        """Tell other commands where the broker listens, for as long as the cluster runs."""
        told = {"run": self.run, "url": url, "pid": os.getpid()}
        try:
            with writing(self.cluster):
                self.cluster.write_text(json.dumps(told))
            yield
        finally:
            self.cluster.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Announced:
    """A cluster that runs on this machine."""

    run: str
    url: str
    pid: int


def resting(root: Path = ROOT) -> list[Place]:
    """Return where the logs of earlier runs lie in this folder, newest first."""
    places = [Place(path.parent.name, root) for path in root.glob("*/settings.toml")]
    kept = [(place.settings.stat().st_mtime, place) for place in places if place.has_state]
    return [place for _, place in sorted(kept, key=lambda pair: -pair[0])]


def running(root: Path = ROOT) -> list[Announced]:
    """Return the clusters that were started in this folder and still run, newest first."""
    found: list[tuple[float, Announced]] = []
    for path in root.glob("*/cluster.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            told = cast("dict[str, Any]", json.loads(path.read_text()))
            cluster = Announced(str(told["run"]), str(told["url"]), int(told["pid"]))
            os.kill(cluster.pid, 0)
            found.append((path.stat().st_mtime, cluster))
    return [cluster for _, cluster in sorted(found, key=lambda pair: -pair[0])]
