"""Durable writes, safe reads, folder locks, and the sentences for what a disk refuses."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import sys
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, EINVAL, ENOSPC, EXDEV
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store.base import StoredFile, room_for

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from skerry.store.base import Buffer, OnBytes

READ_BYTES = 32 * 1024**2


def write_durably(path: Path, data: Sequence[Buffer]) -> StoredFile:
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


def open_inside(root: Path, path: Path) -> BinaryIO:
    """Open a regular file below ``root``; OSError for a link that leads out of it or a device."""
    target = os.path.realpath(path, strict=True)
    if not Path(target).is_relative_to(os.path.realpath(root)):
        raise OSError(EXDEV, "it is a link that leads out of its folder")
    handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(EINVAL, "it is not a regular file")
    return os.fdopen(handle, "rb")


def read_inside(root: Path, path: Path, most: int, on_bytes: OnBytes | None) -> memoryview:
    """Return the first ``most`` bytes of a file below ``root``; OSError as ``open_inside``."""
    with open_inside(root, path) as file:
        data = room_for(min(os.fstat(file.fileno()).st_size, most), str(path))
        for start in range(0, len(data), READ_BYTES):
            piece = data[start : start + READ_BYTES]
            piece[:] = file.read(len(piece)).ljust(len(piece))  # what is missing breaks the digest
            if on_bytes is not None:
                on_bytes(len(piece))
    return data


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
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
    """Lock a folder and yield True, or yield False while a living process holds its lock."""
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
    """Turn what the disk refuses into one sentence with the fix."""
    try:
        yield
    except CheckpointCorrupt:
        raise
    except OSError as error:
        raise refused(path, error) from error


def refused(path: Path, error: OSError) -> StoreError:
    """Say what the disk refused to write and what helps."""
    why = error.strerror or str(error)
    if error.errno in {ENOSPC, EDQUOT, EFBIG}:
        return _with_errno(
            error,
            f"No room for a checkpoint below {path.parent} ({why}; {_free_bytes(path) / 1e6:.0f} MB"
            " free): free some space, set checkpoint.keep_newest lower, or point store.path"
            " elsewhere; earlier checkpoints are untouched.",
        )
    msg = f"Cannot write {path} ({why}): make it writable or point store.path elsewhere."
    return _with_errno(error, msg)


def unreadable(path: Path, error: OSError) -> StoreError:
    """Say what the disk refused to read and what helps."""
    why = error.strerror or str(error)
    return _with_errno(error, f"Cannot read {path} ({why}): check the path and its permissions.")


def _with_errno(error: OSError, sentence: str) -> StoreError:
    refused = StoreError(sentence)
    refused.errno = error.errno
    return refused


def _free_bytes(path: Path) -> int:
    for folder in path.parents:
        with suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0
