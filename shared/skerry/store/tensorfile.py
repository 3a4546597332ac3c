"""safetensors files of f32 tensors, written and read in place, with every byte checked.

Eight bytes of little-endian header length, a JSON header, then the raw tensors: see
https://github.com/huggingface/safetensors#format. The library opens these files, too; its own
reader and writer copy each tensor, which here may be most of a machine's memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from skerry.errors import CheckpointCorrupt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from skerry.store.base import StoredFile

    Vector = NDArray[np.float32]

LENGTH = struct.Struct("<Q")
ALIGN = 8
MOST_HEADER_BYTES = 32 * 1024**2
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
        return _tensors(data)
    except (ValueError, struct.error, LookupError, TypeError, AttributeError, RecursionError) as e:
        msg = f"{path} is not as a release of Skerry writes it: use another checkpoint."
        raise CheckpointCorrupt(msg, path=path) from e


def _tensors(data: memoryview) -> dict[str, Vector]:
    """Return views of the tensors of a file that ``header`` and ``raw`` may have written."""
    (length,) = LENGTH.unpack(data[: LENGTH.size])
    if length > min(MOST_HEADER_BYTES, len(data) - LENGTH.size):
        raise ValueError(length)
    entries = cast("dict[str, Any]", json.loads(bytes(data[LENGTH.size :][:length])))
    metadata = entries.pop("__metadata__")
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    is_ours = header(shapes, metadata) == bytes(data[: LENGTH.size + length])
    if not is_ours or any(size < 0 for shape in shapes.values() for size in shape):
        raise ValueError(length)
    flat = np.frombuffer(data, "<f4", offset=LENGTH.size + length).astype(np.float32, copy=False)
    ends = list(accumulate(map(prod, shapes.values()), initial=0))
    if flat.size != ends[-1]:
        raise ValueError(length)
    spans = zip(shapes.items(), pairwise(ends), strict=True)
    return {name: flat[start:end].reshape(shape) for (name, shape), (start, end) in spans}
