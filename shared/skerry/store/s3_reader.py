"""Reading objects of a bucket by ranges, front to back, the next range while one is used."""

from __future__ import annotations

import io
from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

import obstore

from skerry.errors import CheckpointCorrupt
from skerry.store.s3_client import refusals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from _typeshed import WriteableBuffer
    from obstore.store import S3Store as Client

RANGE_BYTES = 8 * 1024**2
"""Bytes of one request; a reader holds two of them."""


class Segment(NamedTuple):
    """A range of an object."""

    path: str
    start: int
    size: int


def segments_of(client: Client, path: str) -> list[Segment]:
    """Return the ranges of a whole object; FileNotFoundError if it is not there."""
    size = obstore.head(client, path)["size"]
    starts = range(0, size, RANGE_BYTES)
    return [Segment(path, start, min(RANGE_BYTES, size - start)) for start in starts]


def open_segments(client: Client, segments: Sequence[Segment], where: str) -> BinaryIO:
    """Open the segments, one after another, as one file."""
    return cast("BinaryIO", io.BufferedReader(_SegmentsFile(client, segments, where)))


class _SegmentsFile(io.RawIOBase):
    """Holds one segment and fetches the next one meanwhile."""

    def __init__(self, client: Client, segments: Sequence[Segment], where: str) -> None:
        super().__init__()
        self._client = client
        self._segments = segments
        self._where = where
        self._starts = [0, *accumulate(segment.size for segment in segments)]
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
        index = bisect_right(self._starts, self._at) - 1
        data, start = self._segment(index), self._at - self._starts[index]
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(data) - start)
        target[:count] = data[start : start + count]
        self._at += count
        return count

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._fetched.clear()
        super().close()

    def _segment(self, index: int) -> bytes:
        near = [at for at in (index, index + 1) if at < len(self._segments)]
        self._fetched = {
            at: self._fetched.get(at) or self._threads.submit(self._fetch, self._segments[at])
            for at in near
        }
        return self._fetched[index].result()

    def _fetch(self, segment: Segment) -> bytes:
        path, start, size = segment
        with refusals(self._where):
            data = bytes(obstore.get_range(self._client, path, start=start, length=size))
        if len(data) != size:
            msg = f"{self._where} became shorter while it was read: use another checkpoint."
            raise CheckpointCorrupt(msg, path=self._where)
        return data
