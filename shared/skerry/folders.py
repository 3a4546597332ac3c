"""Folders that this machine's owner has named: what a run may have this process read, and write.

A run's config names weights by digest only. They are read from a folder that this process was given
with ``model.path``, never from one that the config of a run names. It names text and tokenizers by
path; they are read only below what this process's own settings name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from errno import ELOOP, ENOENT, ENOTDIR
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

from skerry.errors import ConfigError, SkerryError

DRAFT, LOCK = ".draft-", ".lock"

_offered: list[Path] = []
_allowed: set[str] = set()


def offer(folder: str) -> None:
    """Let this process read weights from a folder."""
    _offered.append(Path(folder).expanduser())


def offered() -> tuple[Path, ...]:
    """Return the folders, the newest first."""
    return tuple(reversed(_offered))


def allow(names: Iterable[str]) -> None:
    """Let this process read text at these paths, patterns and bucket addresses, and below them."""
    _allowed.update(filter(None, names))


def is_allowed(name: str) -> bool:
    """Return True if this process may read the text of this name that somebody else chose."""
    if name in _allowed:
        return True
    if ".." in name.split("/") or "\0" in name:  # up from where a pattern's link leads
        return False
    if "://" in name:
        return any(name.startswith(f"{root.rstrip('/')}/") for root in _allowed if "://" in root)
    roots = [Path(root).expanduser().resolve() for root in _allowed if "://" not in root]
    try:  # what a pattern matches may be a link, or lie behind one
        paths = [Path(name).expanduser(), *matching(name)]
    except (OSError, ValueError):  # too long a name, or no pattern
        return False
    return all(any(path.resolve().is_relative_to(root) for root in roots) for path in paths)


def from_here(name: str) -> str:
    """Return a relative path or pattern as an absolute one, and any other name as it is."""
    if not name or "://" in name or name.startswith("~"):
        return name
    return os.path.abspath(name)  # noqa: PTH100 - it may be a pattern, and its links stay links


def mode_of(path: Path) -> int:
    """Return the mode of what is at a path, 0 for nothing; OSError where it cannot be looked at.

    Path.exists would raise that, too, but from Python 3.14 on it returns False.
    """
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in {ENOENT, ENOTDIR, ELOOP}:
            return 0
        raise


def matching(name: str) -> list[Path]:
    """Return the file or folder of this name, or those that it matches as a pattern.

    Raises ConfigError for a name that can be neither.
    """
    path = Path(name).expanduser()
    try:
        if mode_of(path):
            return [path]
        return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except (OSError, ValueError) as error:  # too long a name, ** beside other letters
        why = error.strerror if isinstance(error, OSError) else error
        msg = f"{name[:80]} names no files ({why}): correct data.paths, or the command."
        raise ConfigError(msg, path="data.paths") from error


@contextmanager
def _held(draft: Path) -> Generator[None]:
    """Lock a draft until its process ends; BlockingIOError if another one holds it."""
    with (draft / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _left(path: Path) -> bool:
    """Return True for the draft of a process that was killed."""
    if path.name.startswith(DRAFT):
        with suppress(BlockingIOError), _held(path):
            return True
    return False


@contextmanager
def writing(folder: Path) -> Generator[Path]:
    """Yield a draft below a folder; its files move up once all of them are written.

    A failure or an interruption leaves nothing, a kill only a draft, which the next one removes.
    ``folder`` may be a mounted disk, which nothing can be renamed onto. Raises ConfigError for a
    folder that holds anything else, and where it cannot be written.
    """
    try:
        is_new = not folder.exists()
        if not is_new and (not folder.is_dir() or not all(map(_left, folder.iterdir()))):
            msg = f"{folder} is not empty: name a new folder."
            raise ConfigError(msg, path="out")
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            rmtree(left)
        try:
            with TemporaryDirectory(prefix=DRAFT, dir=folder) as name, _held(draft := Path(name)):
                yield draft
                files = sorted({*draft.iterdir()} - {draft / LOCK}, reverse=True)
                for file in files:  # config.json after others
                    file.rename(folder / file.name)
        finally:
            if is_new:
                with suppress(OSError):  # it holds what was written
                    folder.rmdir()
    except SkerryError:  # some are OSErrors too
        raise
    except OSError as error:
        msg = f"Cannot write {folder} ({error.strerror or error}): mend that, or name another."
        raise ConfigError(msg, path="out") from error
