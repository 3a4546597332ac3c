"""Checkpoints on a local disk: temporary folder, fsync, read back, manifest last, rename.

A writer holds an advisory lock on its temporary folder, which the kernel drops when the process
dies, so that ``sweep`` deletes the leftovers of a dead writer and no draft in progress.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from errno import EEXIST, ENOTEMPTY
from itertools import count
from typing import TYPE_CHECKING

from skerry.errors import StoreError
from skerry.store.base import MANIFEST, NAME, checked_name
from skerry.store.disk import (
    fsync_folder,
    read_inside,
    refusals,
    refused,
    root_lock,
    try_lock,
    unreadable,
    write_durably,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.store.base import Buffer, OnBytes, StoredFile

PARTIAL = ".partial-"


class LocalStore:
    """A folder whose subfolders are entries; implements Store."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def where(self, name: str) -> str:
        return str(self.root / name)

    def names(self) -> list[str]:
        """Return the subfolders that have a manifest; a root that does not exist has none."""
        return [path.name for path in self._below() if _may_have_manifest(path)]

    def folders(self) -> list[str]:
        return [path.name for path in self._below() if path.is_dir()]

    def _below(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if NAME.fullmatch(path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.root, error) from error

    def draft(self, name: str) -> LocalDraft:
        return LocalDraft(self.root, checked_name(name))

    def read(self, name: str, file: str, most: int, on_bytes: OnBytes | None = None) -> memoryview:
        path = self.root / checked_name(name) / checked_name(file)
        try:
            return read_inside(self.root, path, most, on_bytes)
        except StoreError:  # which is an OSError too
            raise
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
                with try_lock(path) as is_dead:
                    if is_dead:
                        shutil.rmtree(path, ignore_errors=True)
                        swept.append(path.name)
        return swept


def _may_have_manifest(folder: Path) -> bool:
    """Return True also for a folder that we may not look into.

    Reading it then says why it cannot be read; otherwise an older one would pass for the newest.
    """
    try:
        return (folder / MANIFEST).is_file()
    except OSError:
        return True


class LocalDraft:
    """A temporary folder that becomes an entry; implements Draft."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._folder = root / f"{PARTIAL}{name}-{uuid.uuid4().hex[:12]}"
        self._over = False
        with refusals(self._folder):
            root.mkdir(parents=True, exist_ok=True)
            with root_lock(root):
                self._folder.mkdir()
                self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, file: str, data: Sequence[Buffer]) -> StoredFile:
        path = self._folder / checked_name(file)
        with refusals(path):
            return write_durably(path, data)

    def commit(self, manifest: bytes) -> str:
        self.write(MANIFEST, [manifest])
        with refusals(self._folder):
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
            self._end()

    def _end(self) -> None:
        self._over = True
        os.close(self._lock)
