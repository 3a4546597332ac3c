"""The safetensors format, read and written front to back, with every byte checked on the way in.

Eight bytes of little-endian header length, a JSON header, then the raw tensors. Files written here
open with the ``safetensors`` library, and files of f32 tensors that it wrote open here. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import struct
from io import SEEK_END
from math import prod
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from skerry.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from skerry.store.base import StoredFile

    Vector = NDArray[np.float32]
    OnBytes = Callable[[int], None]

LENGTH = struct.Struct("<Q")
ALIGN = 8
MOST_HEADER_BYTES = 32 * 1024**2
MOST_DIMENSIONS = 32
ITEM = 4
"""Bytes of one value."""


def header(shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str]) -> bytes:
    """Return what comes before the tensors; they follow in the mapping's order, as f32."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + ITEM * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return LENGTH.pack(len(text)) + text


def raw(tensor: Vector) -> memoryview:
    """Return the tensor's bytes in row-major little-endian order, without a copy where it is so."""
    return np.ascontiguousarray(tensor, "<f4").reshape(-1).view(np.uint8).data


def read(
    file: BinaryIO, path: str, expected: StoredFile, on_bytes: OnBytes | None = None
) -> dict[str, Vector]:
    """Return the tensors of a file that is, byte for byte, ``expected``.

    CheckpointCorrupt naming ``path`` otherwise. No more is allocated than the file has, and each
    byte is read once; ``on_bytes`` is called with the number of bytes that have just been read.
    """
    if file.seek(0, SEEK_END) != expected.size:
        raise _damaged(path)
    file.seek(0)
    checked = _Hashed(file, on_bytes)
    try:
        tensors = dict(_tensors(checked, expected.size))
    except (ValueError, struct.error, LookupError, TypeError, RecursionError) as error:
        msg = f"{path} is not a safetensors file of f32 tensors: use another checkpoint."
        raise CheckpointCorrupt(msg, path=path) from error
    if checked.digest.hexdigest() != expected.sha256:
        raise _damaged(path)
    return tensors


class _Hashed:
    """A file that hashes what is read from it."""

    def __init__(self, file: BinaryIO, on_bytes: OnBytes | None) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self.digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(size)
        self.digest.update(data)
        if self._on_bytes is not None:
            self._on_bytes(size)
        return data


def _tensors(file: _Hashed, size: int) -> Iterator[tuple[str, Vector]]:
    """Yield the tensors of a file of ``size`` bytes, which has nothing else after its header."""
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > min(MOST_HEADER_BYTES, size - LENGTH.size):
        raise ValueError(length)
    entries = cast("dict[str, dict[str, object]]", json.loads(file.read(length)))
    entries.pop("__metadata__", None)
    found = sorted((_span(entry), name) for name, entry in entries.items())
    ends = [0, *(end for (_, end), _ in found)]
    if [start for (start, _), _ in found] != ends[:-1] or ends[-1] != size - LENGTH.size - length:
        raise ValueError(size)
    for (start, end), name in found:
        data = np.frombuffer(file.read(end - start), "<f4").astype(np.float32)
        yield name, data.reshape(cast("list[int]", entries[name]["shape"]))


def _span(entry: dict[str, object]) -> tuple[int, int]:
    """Return where a tensor starts and ends; ValueError if that contradicts its shape."""
    start, end = cast("tuple[int, int]", entry["data_offsets"])
    shape = cast("list[int]", entry["shape"])
    sane = len(shape) <= MOST_DIMENSIONS and all(dimension >= 0 for dimension in shape)
    if entry["dtype"] != "F32" or not sane or end - start != ITEM * prod(shape):
        raise ValueError(entry)
    return start, end


def _damaged(path: str) -> CheckpointCorrupt:
    msg = f"{path} is damaged (it is not what the manifest names): use another checkpoint."
    return CheckpointCorrupt(msg, path=path)
