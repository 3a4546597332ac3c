"""The safetensors format, read and written a tensor at a time so that memory stays flat.

Eight bytes of little-endian header length, a JSON header, then the raw tensors. Files written here
open with the ``safetensors`` library and the other way round; only F32 is used. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from skerry.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from skerry.store.checked import CheckedFile

LENGTH = struct.Struct("<Q")
ALIGN = 8
LARGEST_HEADER = 100_000_000
ITEM = 4


class Readable(Protocol):
    """What a header is read from."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file and what shape it has."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)


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


def raw(tensor: NDArray[np.float32]) -> memoryview:
    """Return the tensor's bytes in row-major little-endian order, without a copy where it is so."""
    return np.ascontiguousarray(tensor, "<f4").reshape(-1).view(np.uint8).data


def index(file: Readable, path: str) -> dict[str, TensorInfo]:
    """Read the header; CheckpointCorrupt naming ``path`` if it makes no sense."""
    try:
        return _parsed(file)
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise _senseless(path) from error


def _parsed(file: Readable) -> dict[str, TensorInfo]:
    (length,) = LENGTH.unpack(file.read(LENGTH.size))
    if length > LARGEST_HEADER:
        raise ValueError(length)
    entries = cast("dict[str, dict[str, object]]", json.loads(file.read(length)))
    entries.pop("__metadata__", None)
    return {name: _info(name, entry, LENGTH.size + length) for name, entry in entries.items()}


def _info(name: str, entry: dict[str, object], start: int) -> TensorInfo:
    first, last = cast("tuple[int, int]", entry["data_offsets"])
    info = TensorInfo(name, tuple(cast("list[int]", entry["shape"])), start + first)
    sane = first >= 0 and all(dimension >= 0 for dimension in info.shape)
    if entry["dtype"] != "F32" or last - first != ITEM * info.size or not sane:
        raise ValueError(name)
    return info


def read_all(file: CheckedFile, path: str, size: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield every tensor of a file of ``size`` bytes with its name, front to back.

    CheckpointCorrupt naming ``path`` if the header makes no sense or the file ends early.
    """
    found = index(file, path).values()
    for info in sorted(found, key=lambda info: (info.offset, info.size)):
        if info.offset + ITEM * info.size > size:
            raise _ends_early(path, info.name)
        try:
            file.skip_to(info.offset)
        except ValueError as error:
            raise _senseless(path) from error
        data = file.read(ITEM * info.size)
        if len(data) != ITEM * info.size:
            raise _ends_early(path, info.name)
        yield info.name, np.frombuffer(data, "<f4").astype(np.float32).reshape(info.shape)


def _ends_early(path: str, name: str) -> CheckpointCorrupt:
    msg = f"{path} ends in the middle of tensor {name}: use another checkpoint."
    return CheckpointCorrupt(msg, path=path)


def _senseless(path: str) -> CheckpointCorrupt:
    msg = f"{path} is not a safetensors file of f32 tensors: use another checkpoint."
    return CheckpointCorrupt(msg, path=path)
