"""Writes and reads safetensors files, f32 or bf16, and checks every byte.

Eight bytes of little-endian header length, a JSON header, then the raw tensors: see
https://github.com/huggingface/safetensors#format. The library opens these files, too; its own
reader and writer copy each tensor, which here may be most of a machine's memory.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from skerry.errors import CheckpointCorrupt
from skerry.store.base import StoredFile

Vector = NDArray[np.float32]

Dtype = Literal["F32", "BF16"]
LENGTH = struct.Struct("<Q")
ALIGN = 8
MOST_HEADER_BYTES = 32 * 1024**2
ITEMS: dict[str, int] = {"F32": 4, "BF16": 2}
"""Bytes of one value of each type."""


def header(
    shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str], dtype: str = "F32"
) -> bytes:
    """Return the file's header; the tensors follow in the mapping's order, all of one type."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, shape in shapes.items():
        end = offset + ITEMS[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    return LENGTH.pack(len(text)) + text


def dtype_of(tensors: Iterable[Vector]) -> Dtype:
    """Return the smallest type that holds all of these tensors exactly."""
    low = (np.bitwise_or.reduce(t.reshape(-1).view(np.uint32), initial=0) for t in tensors)
    return "F32" if any(int(bits) & 0xFFFF for bits in low) else "BF16"


def bf16_bits(tensor: Vector) -> NDArray[np.uint16]:
    """Return the bf16 bits of a contiguous f32 vector: a view of its upper halves."""
    return tensor.view("<u2")[1::2]


def widened(bits: NDArray[np.uint16]) -> Vector:
    """Return bf16 bits as f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def raw(tensor: NDArray[Any]) -> memoryview:
    """Return the bytes of a tensor, f32 or u16 bits of bf16, in row-major little-endian order."""
    kept = tensor.dtype.newbyteorder("<")
    return np.ascontiguousarray(tensor, kept).reshape(-1).view(np.uint8).data


def read(data: memoryview, path: str, expected: StoredFile) -> dict[str, Vector]:
    """Return the tensors of a file as f32; those of an f32 file are views of ``data``.

    Raises CheckpointCorrupt naming ``path`` unless ``data`` has the size and digest ``expected``;
    nothing is parsed before.
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
    """Return a file's tensors; raises what ``read`` catches if ``header`` cannot have made it."""
    (length,) = LENGTH.unpack(data[: LENGTH.size])
    if length > min(MOST_HEADER_BYTES, len(data) - LENGTH.size):
        raise ValueError(length)
    entries = cast("dict[str, Any]", json.loads(bytes(data[LENGTH.size :][:length])))
    metadata = entries.pop("__metadata__")
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    dtype = next((entry["dtype"] for entry in entries.values()), "F32")
    is_ours = header(shapes, metadata, dtype) == bytes(data[: LENGTH.size + length])
    if not is_ours or any(size < 0 for shape in shapes.values() for size in shape):
        raise ValueError(length)
    at = LENGTH.size + length
    if dtype == "F32":
        flat = np.frombuffer(data, "<f4", offset=at).astype(np.float32, copy=False)
    else:
        flat = widened(np.frombuffer(data, "<u2", offset=at))
    ends = list(accumulate(map(prod, shapes.values()), initial=0))
    if flat.size != ends[-1]:
        raise ValueError(length)
    spans = zip(shapes.items(), pairwise(ends), strict=True)
    return {name: flat[start:end].reshape(shape) for (name, shape), (start, end) in spans}
