"""Reading a file once and knowing at its end whether every byte was what it should be."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.store.base import StoredFile

READ_BYTES = 4 * 1024**2


class CheckedFile:
    """A file that hashes what is read from it, front to back, so that it is read only once.

    ``on_bytes`` is told how many bytes came, as they come.
    """

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None] | None = None) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._digest = hashlib.sha256()
        self._at = 0

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes, fewer where the file ends."""
        data = self._file.read(size)
        self._digest.update(data)
        self._at += len(data)
        if self._on_bytes is not None:
            self._on_bytes(len(data))
        return data

    def skip_to(self, offset: int) -> None:
        """Read on to ``offset``; ValueError if it lies behind what has been read."""
        if offset < self._at:
            raise ValueError(offset)
        while self._at < offset and self.read(min(READ_BYTES, offset - self._at)):
            pass

    def matches(self, expected: StoredFile) -> bool:
        """Read what is left and tell whether the file is the one that was written."""
        while self.read(READ_BYTES):
            pass
        return self._at == expected.size and self._digest.hexdigest() == expected.sha256
