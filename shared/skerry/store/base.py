"""Where checkpoints lie: a port for folders of files that appear whole or not at all.

An *entry* is a named set of files plus one manifest. It exists from the moment its manifest is in
place, which is written last; until then nobody sees it. The port asks for nothing that an object
store cannot do (a file goes up in parts, the manifest is a create-only put), so that one contract
suite runs on every adapter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from skerry.errors import StoreError

MANIFEST = "manifest.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")

Buffer = bytes | bytearray | memoryview


def checked_name(name: str) -> str:
    """Return ``name`` if an entry or a file may be called that; StoreError says what may."""
    if not NAME.fullmatch(name):
        msg = f"{name!r} cannot name a checkpoint: use letters, digits, '_', '.' and '-'."
        raise StoreError(msg)
    return name


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an entry as it was read back: its length in bytes and its SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class Draft(Protocol):
    """An entry in the making; invisible to readers until ``commit``."""

    def append(self, file: str, data: Buffer) -> None:
        """Add bytes to the end of a file, which begins with its first append.

        Raises StoreError when the store has no room; the draft can then only be discarded.
        """
        ...

    def drop(self, file: str) -> None:
        """Forget a file, if there is one of that name; it may then be begun anew."""
        ...

    def seal(self) -> tuple[StoredFile, ...]:
        """Make every file durable and return what it is, as the store itself has it.

        Raises CheckpointCorrupt when a file is not there as it was written.
        """
        ...

    def commit(self, manifest: bytes, name: str | None = None) -> str:
        """Write the manifest last, make the entry visible and return the name it got.

        Seals the draft first where that was not done. ``name`` replaces the one that the draft was
        begun with. A name that somebody else took meanwhile gets a suffix: ``name-2``, ``name-3``,
        …
        """
        ...

    def discard(self) -> None:
        """Throw away what was written; does nothing after ``commit``."""
        ...


class Store(Protocol):
    """A folder of entries."""

    def where(self, name: str) -> str:
        """Return where a person finds the entry."""
        ...

    def names(self) -> list[str]:
        """Return the names of all whole entries, sorted."""
        ...

    def draft(self, name: str) -> Draft:
        """Begin an entry that would like to be called ``name``."""
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Open one file of an entry for reading; StoreError if there is no such entry or file."""
        ...

    def delete(self, name: str) -> bool:
        """Remove an entry, at once for readers; False if it was gone already."""
        ...

    def sweep(self) -> list[str]:
        """Remove what writers that died have left, and return its names; live drafts stay."""
        ...
