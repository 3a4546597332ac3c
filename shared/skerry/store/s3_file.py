"""A file that lies in a bucket in parts: read front to back, every part checked as it comes."""

from __future__ import annotations

import hashlib
import io
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

import obstore

from skerry.errors import CheckpointCorrupt
from skerry.store.s3_client import refusals
from skerry.store.s3_layout import PARTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from _typeshed import WriteableBuffer
    from obstore.store import S3Store as Client

    from skerry.store.s3_layout import PartRef


class PartsFile(io.RawIOBase):
    """Holds one part and fetches the next one meanwhile.

    Reading raises CheckpointCorrupt when a part is not what the entry says.
    """

    def __init__(self, client: Client, parts: Sequence[PartRef], where: str) -> None:
        super().__init__()
        self._client = client
        self._parts = parts
        self._where = where
        self._starts = [0, *accumulate(part.size for part in parts)]
        self._at = 0
        self._fetched: dict[int, Future[bytes]] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="s3-read")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._starts[-1]}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        if self._at >= self._starts[-1]:
            return 0
        index = next(i for i, end in enumerate(self._starts[1:]) if self._at < end)
        data, start = self._part(index), self._at - self._starts[index]
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(data) - start)
        target[:count] = data[start : start + count]
        self._at += count
        return count

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._fetched.clear()
        super().close()

    def _part(self, index: int) -> bytes:
        for wanted in (index, index + 1):
            if wanted < len(self._parts) and wanted not in self._fetched:
                self._fetched[wanted] = self._threads.submit(self._fetch, self._parts[wanted])
        for old in [i for i in self._fetched if i not in (index, index + 1)]:
            del self._fetched[old]
        return self._fetched[index].result()

    def _fetch(self, part: PartRef) -> bytes:
        with refusals(self._where):
            data = bytes(obstore.get(self._client, f"{PARTS}/{part.key}").bytes())
        if len(data) != part.size or hashlib.sha256(data).hexdigest() != part.sha256:
            msg = f"{self._where} is damaged (part {part.key[:12]}…): use another checkpoint."
            raise CheckpointCorrupt(msg, path=self._where)
        return data
