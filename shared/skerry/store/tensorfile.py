"""The safetensors format, read and written front to back, with every byte checked on the way in.

Eight bytes of little-endian header length, a JSON header, then the raw tensors. Files written here
open with the ``safetensors`` library, and files of f32 tensors that it wrote open here. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import json
import struct
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from skerry.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from skerry.store.base import StoredFile

    Vector = NDArray[np.float32]

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


def read(data: memoryview, path: str, expected: StoredFile) -> dict[str, Vector]:
    """Return the tensors of a file that is, byte for byte, ``expected``: views of ``data``.

    CheckpointCorrupt naming ``path`` otherwise. Nothing is parsed before the digests agree.
    """
    if len(data) != expected.size or hashlib.sha256(data).hexdigest() != expected.sha256:
        msg = f"{path} is damaged (it is not what the manifest names): use another checkpoint."
        raise CheckpointCorrupt(msg, path=path)
    try:
        return dict(_tensors(data))
    except (ValueError, struct.error, LookupError, TypeError, RecursionError) as error:
        msg = f"{path} is not a safetensors file of f32 tensors: use another checkpoint."
        raise CheckpointCorrupt(msg, path=path) from error


def _tensors(data: memoryview) -> Iterator[tuple[str, Vector]]:
    """Yield views of the tensors of a file, which has nothing else after its header."""
    (length,) = LENGTH.unpack(data[: LENGTH.size])
    body = data[LENGTH.size + length :]
    if length > min(MOST_HEADER_BYTES, len(data) - LENGTH.size):
        raise ValueError(length)
    entries = json.loads(bytes(data[LENGTH.size : LENGTH.size + length]))
    entries.pop("__metadata__", None)
    found = sorted((_span(entry), name) for name, entry in entries.items())
    ends = [0, *(end for (_, end), _ in found)]
    if [start for (start, _), _ in found] != ends[:-1] or ends[-1] != len(body):
        raise ValueError(length)
    for (start, end), name in found:
        values = np.frombuffer(body[start:end], "<f4").astype(np.float32, copy=False)
        yield name, values.reshape(entries[name]["shape"])


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    """Return where a tensor starts and ends; ValueError if that contradicts its shape."""
    (start, end), shape = entry["data_offsets"], entry["shape"]
    sane = len(shape) <= MOST_DIMENSIONS and all(dimension >= 0 for dimension in shape)
    if entry["dtype"] != "F32" or not sane or end - start != ITEM * prod(shape):
        raise ValueError(entry)
    return start, end
