"""The checkpoint store port: folders of files that appear whole or not at all.

An *entry* is a named folder of files plus one manifest, which is written last: an entry exists if
and only if its manifest exists. The port asks for nothing that an object store cannot do, so one
contract suite runs on every adapter (``tests/contract/test_store.py``).

To add a store, write ``kinds/<scheme>.py`` with ``open_store(url, access) -> Store``: settings,
commands and messages then know the scheme. Add it to the contract suite.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from skerry.errors import StoreError

MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
"""The names that entries and files may have: never ``..``, never a path."""
MOST_MANIFEST_BYTES = 64 * 1024**2
"""No larger manifest is written or read."""

Buffer = bytes | bytearray | memoryview


def checked_name(name: str) -> str:
    """Return ``name`` if an entry or a file may have it; StoreError if not."""
    if not NAME.fullmatch(name):
        msg = f"{name!r} cannot name a checkpoint: use letters, digits, '_', '.' and '-'."
        raise StoreError(msg)
    return name


def room_for(size: int, where: str) -> memoryview:
    """Return memory for a file; StoreError if this machine has too little."""
    try:
        return memoryview(bytearray(size))
    except (MemoryError, OverflowError) as error:
        msg = f"{where} has {size} bytes, more than fit into this machine's memory."
        raise StoreError(msg) from error


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an entry: its name, its length in bytes and its SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class Draft(Protocol):
    """An entry that is being written, invisible to readers until ``commit``."""

    def write(self, file: str, data: Sequence[Buffer]) -> StoredFile:
        """Store one file whole, replacing an earlier one of that name, and return its record.

        Raises StoreError when the store refuses it, for lack of room for example, and
        CheckpointCorrupt when it does not read back; the draft can then only be discarded.
        """
        ...

    def commit(self, manifest: bytes) -> str:
        """Write the manifest last, make the entry visible and return its name.

        A name that is taken gets a suffix: ``name-2``, ``name-3``, …
        """
        ...

    def discard(self) -> None:
        """Delete what was written; does nothing after ``commit``."""
        ...


class Store(Protocol):
    """A folder of entries."""

    def where(self, name: str) -> str:
        """Return the address of an entry, or of a folder below."""
        ...

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        ...

    def folders(self) -> list[str]:
        """Return the names of the folders below, sorted: one for each run in a store's root."""
        ...

    def draft(self, name: str) -> Draft:
        """Begin an entry of that name; StoreError if the store cannot be written."""
        ...

    def read(self, name: str, file: str, most: int) -> memoryview:
        """Return one file of an entry, or its first ``most`` bytes where it has more.

        Raises StoreError if it is not there, or does not fit into this machine's memory.
        """
        ...

    def delete(self, name: str) -> bool:
        """Delete an entry, at once for readers; False if it was not there."""
        ...

    def sweep(self) -> list[str]:
        """Delete the drafts of writers that died and return their names; live drafts stay."""
        ...
