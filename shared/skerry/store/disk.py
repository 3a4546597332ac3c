"""Durable writes, folder locks and the sentences for what a disk refuses."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from typing import TYPE_CHECKING

from skerry.errors import CheckpointCorrupt, StoreError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    if path.read_bytes() != data:
        msg = f"{path} does not read back as it was written: choose another store.path."
        raise CheckpointCorrupt(msg, path=str(path))


def sha256_from_disk(path: Path) -> str:
    """Hash a file that was just synced, asking the kernel to forget its cached pages first."""
    with path.open("rb") as handle:
        if sys.platform == "linux":
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(handle, "sha256").hexdigest()


def fsync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def root_lock(root: Path) -> Generator[None]:
    """Keep ``sweep`` from seeing a draft between the making of its folder and of its lock."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def try_lock(folder: Path) -> Generator[bool]:
    """Yield whether nobody alive holds this folder; holds it meanwhile."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(handle)


@contextmanager
def refusals(path: Path) -> Generator[None]:
    try:
        yield
    except CheckpointCorrupt:
        raise
    except OSError as error:
        raise refused(path, error) from error


def refused(path: Path, error: OSError) -> StoreError:
    """Say what the disk refused and what helps, by errno."""
    why = error.strerror or str(error)
    if error.errno in {ENOSPC, EDQUOT, EFBIG}:
        free = _free_bytes(path)
        msg = (
            f"No room for a checkpoint below {path.parent} ({why}; {free / 1e6:.0f} MB free): "
            "free some space, set checkpoint.keep_newest lower, or point store.path elsewhere; "
            "earlier checkpoints are untouched."
        )
    else:
        msg = f"Cannot write {path} ({why}): make it writable or point store.path elsewhere."
    refused = StoreError(msg)
    refused.errno = error.errno
    return refused


def _free_bytes(path: Path) -> int:
    for folder in path.parents:
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0


def unreadable(path: Path, error: OSError) -> StoreError:
    why = error.strerror or str(error)
    refused = StoreError(f"Cannot read {path} ({why}): check the path and its permissions.")
    refused.errno = error.errno
    return refused
