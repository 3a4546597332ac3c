"""Checkpoints on a local disk: temporary folder, fsync, read back, manifest last, rename.

Writers mark their folder with an advisory lock that the kernel drops when they die, so that
``sweep`` tells a crashed writer's leftovers from a draft that another process is still writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from contextlib import suppress
from errno import EEXIST, ENOTEMPTY
from itertools import count
from typing import TYPE_CHECKING, BinaryIO

from skerry.errors import CheckpointCorrupt
from skerry.store.base import MANIFEST, NAME, StoredFile, checked_name
from skerry.store.disk import (
    fsync_folder,
    refusals,
    refused,
    root_lock,
    sha256_from_disk,
    try_lock,
    unreadable,
    write_durably,
)

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.store.base import Buffer

PARTIAL = ".partial-"


class LocalStore:
    """A folder whose subfolders are entries; implements Store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def where(self, name: str) -> str:
        return str(self.root / name)

    def names(self) -> list[str]:
        """Return the subfolders that have a manifest; a root that is not there holds none."""
        try:
            found = [e.name for e in os.scandir(self.root) if NAME.fullmatch(e.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.root, error) from error
        return sorted(n for n in found if _has_manifest(self.root / n))

    def draft(self, name: str) -> LocalDraft:
        """Make the temporary folder of an entry; StoreError if the root cannot be written."""
        return LocalDraft(self.root, checked_name(name))

    def open(self, name: str, file: str) -> BinaryIO:
        path = self.root / checked_name(name) / checked_name(file)
        try:
            return path.open("rb")
        except OSError as error:
            raise unreadable(path, error) from error

    def delete(self, name: str) -> bool:
        """Rename the entry out of sight, then remove its files."""
        doomed = self.root / f"{PARTIAL}{checked_name(name)}-{uuid.uuid4().hex[:12]}"
        try:
            with root_lock(self.root):
                (self.root / name).rename(doomed)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise refused(self.root / name, error) from error
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def sweep(self) -> list[str]:
        with refusals(self.root):
            return self._sweep() if self.root.is_dir() else []

    def _sweep(self) -> list[str]:
        swept: list[str] = []
        with root_lock(self.root):
            for path in sorted(self.root.glob(f"{PARTIAL}*")):
                with try_lock(path) as dead:
                    if dead:
                        shutil.rmtree(path, ignore_errors=True)
                        swept.append(path.name)
        return swept


def _has_manifest(folder: Path) -> bool:
    """Tell whether a folder is an entry: where we may not look it counts as one, not as nothing.

    Whoever then reads it is told why it cannot be read, and takes no older one for the newest.
    """
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        return True


class _Open:
    """A file being written and the hash of what went in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = path.open("xb")
        self.digest = hashlib.sha256()


class LocalDraft:
    """A temporary folder that becomes an entry; implements Draft."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._folder = root / f"{PARTIAL}{name}-{uuid.uuid4().hex[:12]}"
        self._files: dict[str, _Open] = {}
        self._over = False
        with refusals(self._folder):
            root.mkdir(parents=True, exist_ok=True)
            with root_lock(root):
                self._folder.mkdir()
                self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, file: str, data: Buffer) -> None:
        path = self._folder / checked_name(file)
        with refusals(path):
            if file not in self._files:
                self._files[file] = _Open(path)
            self._files[file].handle.write(data)
            self._files[file].digest.update(data)

    def drop(self, file: str) -> None:
        written = self._files.pop(file, None)
        if written is not None:
            with suppress(OSError):  # a buffered rest may not fit on the disk: it is thrown away
                written.handle.close()
            written.path.unlink(missing_ok=True)

    def seal(self) -> tuple[StoredFile, ...]:
        sealed: list[StoredFile] = []
        for file, written in self._files.items():
            path = written.path
            with refusals(path):
                written.handle.flush()
                os.fsync(written.handle.fileno())
                written.handle.close()
                stored = StoredFile(file, path.stat().st_size, sha256_from_disk(path))
            if stored.sha256 != written.digest.hexdigest():
                msg = (
                    f"{path} does not read back as it was written: "
                    "the disk or its cable is failing, choose another store.path."
                )
                raise CheckpointCorrupt(msg, path=str(path))
            sealed.append(stored)
        return tuple(sealed)

    def commit(self, manifest: bytes, name: str | None = None) -> str:
        if name is not None:
            self._name = checked_name(name)
        if not all(written.handle.closed for written in self._files.values()):
            self.seal()
        with refusals(self._folder):
            write_durably(self._folder / MANIFEST, manifest)
            os.fsync(self._lock)
            taken = self._rename()
            fsync_folder(self._root)
        self._over = True
        os.close(self._lock)
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
        if self._over:
            return
        self._over = True
        for written in self._files.values():
            with suppress(OSError):  # a buffered rest may not fit on the disk: it is thrown away
                written.handle.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
