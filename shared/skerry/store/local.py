"""Checkpoints on a local disk: temporary folder, fsync, read back, manifest last, rename.

A writer holds an advisory lock on its temporary folder. The kernel drops it when the process dies:
``sweep`` deletes a dead writer's leftovers, and no draft in progress.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EEXIST, EFBIG, EINVAL, ENOSPC, ENOTEMPTY, EXDEV
from itertools import count
from pathlib import Path
from typing import BinaryIO

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.folders import mode_of
from skerry.store.base import (
    MANIFEST,
    NAME,
    Buffer,
    StoredFile,
    checked_name,
    fsync_folder,
    room_for,
)

PARTIAL = ".partial-"
READ_BYTES = 32 * 1024**2


class LocalStore:
    """A folder whose subfolders are entries; implements Store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def where(self, name: str) -> str:
        return str(self.root / name)

    def names(self) -> list[str]:
        """Return the subfolders that have a manifest; a root that does not exist has none."""
        return [p.name for p in self._below() if _may_be(stat.S_ISREG, p / MANIFEST)]

    def folders(self) -> list[str]:
        return [path.name for path in self._below() if _may_be(stat.S_ISDIR, path)]

    def _below(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.root, error) from error

    def draft(self, name: str) -> LocalDraft:
        return LocalDraft(self.root, checked_name(name))

    def read(self, name: str, file: str, most: int) -> memoryview:
        path = self.root / checked_name(name) / checked_name(file)
        try:
            with _open_inside(self.root, path) as handle:
                data = room_for(min(os.fstat(handle.fileno()).st_size, most), str(path))
                for start in range(0, len(data), READ_BYTES):
                    piece = data[start : start + READ_BYTES]
                    piece[:] = handle.read(len(piece)).ljust(len(piece))  # the digest will tell
        except StoreError:  # which is an OSError too
            raise
        except OSError as error:
            raise _unreadable(path, error) from error
        return data

    def delete(self, name: str) -> bool:
        """Rename the entry out of sight, then remove its files."""
        doomed = self.root / f"{PARTIAL}{checked_name(name)}-{uuid.uuid4().hex[:12]}"
        with _refusals(self.root / name):
            try:
                with _locked(self.root):
                    (self.root / name).rename(doomed)
            except FileNotFoundError:
                return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def sweep(self) -> list[str]:
        swept: list[str] = []
        with _refusals(self.root):
            if not stat.S_ISDIR(mode_of(self.root)):
                return []
            with _locked(self.root):
                for path in sorted(self.root.glob(f"{PARTIAL}*")):
                    with suppress(OSError), _locked(path, fcntl.LOCK_NB):  # else its writer lives
                        shutil.rmtree(path, ignore_errors=True)
                        swept.append(path.name)
        return swept


def _may_be(kind: Callable[[int], bool], path: Path) -> bool:
    """Return True if a path is of this kind, or if we may not look.

    Reading it then says why it cannot be read; without it, an older one would pass for the newest.
    """
    try:
        return kind(mode_of(path))
    except OSError:
        return True


class LocalDraft:
    """A temporary folder that becomes an entry; implements Draft."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._folder = root / f"{PARTIAL}{name}-{uuid.uuid4().hex[:12]}"
        self._over = False
        with _refusals(self._folder):
            self._is_first = not mode_of(root)
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root):  # no sweep may see the folder before its lock
                self._folder.mkdir()
                self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, file: str, data: Sequence[Buffer]) -> StoredFile:
        path = self._folder / checked_name(file)
        with _refusals(path):
            return _write_durably(path, data)

    def commit(self, manifest: bytes) -> str:
        self.write(MANIFEST, [manifest])
        with _refusals(self._folder):
            os.fsync(self._lock)
            taken = self._rename()
            fsync_folder(self._root)
        self._end()
        return taken

    def _rename(self) -> str:
        name = self._name
        for attempt in count(2):
            try:
                # A folder cannot be renamed onto one that holds files: a taken name is refused.
                self._folder.rename(self._root / name)
                break
            except OSError as error:
                if error.errno not in {EEXIST, ENOTEMPTY}:
                    raise
                name = f"{self._name}-{attempt}"
        return name

    def discard(self) -> None:
        if not self._over:
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._is_first:
                with suppress(OSError):  # another draft is there by now
                    self._root.rmdir()
            self._end()

    def _end(self) -> None:
        self._over = True
        os.close(self._lock)


def _write_durably(path: Path, data: Sequence[Buffer]) -> StoredFile:
    """Write a file, sync it and read it back; CheckpointCorrupt if it comes back differently."""
    digest = hashlib.sha256()
    with path.open("wb") as handle:
        for piece in data:
            handle.write(piece)
            digest.update(piece)
        handle.flush()
        os.fsync(handle.fileno())
        size = handle.tell()
    if sha256_from_disk(path) != digest.hexdigest():
        msg = (
            f"{path} does not read back as it was written: "
            "the disk or its cable is failing, choose another store.path."
        )
        raise CheckpointCorrupt(msg, path=str(path))
    return StoredFile(path.name, size, digest.hexdigest())


def sha256_from_disk(path: Path) -> str:
    """Hash a file that was just synced, after asking the kernel to drop its cached pages."""
    with path.open("rb") as handle:
        if sys.platform == "linux":
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a regular file below ``root``; OSError for a link that leaves ``root``, or a device."""
    target = os.path.realpath(path, strict=True)
    if not Path(target).is_relative_to(os.path.realpath(root)):
        raise OSError(EXDEV, "it is a link that leads out of its folder")
    handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(EINVAL, "it is not a regular file")
    return os.fdopen(handle, "rb")


@contextmanager
def _locked(folder: Path, how: int = 0) -> Generator[None]:
    """Lock a folder for one process; with LOCK_NB, OSError while another holds the lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(handle)


@contextmanager
def _refusals(path: Path) -> Generator[None]:
    """Raise an OSError of a write as a StoreError that says what to do."""
    try:
        yield
    except CheckpointCorrupt:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno not in {ENOSPC, EDQUOT, EFBIG}:
            msg = f"Cannot write {path} ({why}): make it writable or point store.path elsewhere."
        else:
            free = f"{_free_bytes(path) / 1e6:.0f} MB free"
            msg = (
                f"No room for a checkpoint below {path.parent} ({why}; {free}): free some space"
                " or point store.path elsewhere; earlier checkpoints are untouched."
            )
        raise StoreError(msg) from error


def _unreadable(path: Path, error: OSError) -> StoreError:
    why, fix = error.strerror or str(error), "check the path and its permissions"
    if isinstance(error, FileNotFoundError):
        fix = "it may have been thinned out meanwhile; name another checkpoint, or try again"
    return StoreError(f"Cannot read {path} ({why}): {fix}.")


def _free_bytes(path: Path) -> int:
    for folder in path.parents:
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0
