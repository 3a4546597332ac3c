"""The file that holds an inner optimizer's state: safetensors, with a checksum over all of it.

The checksum is the first entry of the metadata and hashed as zeros, so it has a fixed place in the
file: it is filled in once everything else is written, and checked before anything is parsed. The
``safetensors`` library opens these files too.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.errors import CheckpointCorrupt
from skerry.store.base import fsync_folder

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Every tensor by name: its shape and its numpy dtype."""

LENGTH = struct.Struct("<Q")
ZEROS = "0" * 16
OPENING = b'{"__metadata__":{"checksum":"'
CODES = {
    "float32": "F32",
    "float16": "F16",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ORIGIN_NUMBERS = ("created_ns", "plan_digest", "config_digest")
SAVED_NUMBERS = ("incarnation", "step", "steps")
LARGEST_METADATA = 65_536
PIECE = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose state it is: it is good for this learner of this run and for nothing else."""

    run: str
    created_ns: int
    plan_digest: int
    config_digest: int
    learner: str


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file says of itself: ``step`` on the global clock, ``steps`` of that incarnation."""

    origin: Origin
    incarnation: int
    step: int
    steps: int


def size_of(shapes: Shapes) -> int:
    """Return the bytes of all tensors together."""
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


def write(
    path: Path, saved: Saved, shapes: Shapes, tensors: Iterable[NDArray[Any]], draft: str
) -> None:
    """Write a file whole or not at all: ``draft`` beside it first, then renamed over it.

    ``tensors`` come one by one, in the order of ``shapes``, so that memory stays flat. Raises
    OSError, and leaves what was there before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, header = path.parent / draft, _header(saved, shapes)
    hasher = xxhash.xxh3_64(header)
    try:
        with beside.open("wb") as handle:
            handle.write(header)
            for tensor in tensors:
                data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
                for at in range(0, len(data), PIECE):  # hashing and writing share the cache
                    hasher.update(data[at : at + PIECE])
                    handle.write(data[at : at + PIECE])
            handle.seek(LENGTH.size + len(OPENING))
            handle.write(hasher.hexdigest().encode())
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    fsync_folder(path.parent)


def read(path: Path, shapes: Shapes) -> tuple[Saved, dict[str, NDArray[Any]]]:
    """Return what a file holds if it is exactly the tensors of ``shapes``, undamaged.

    Sizes are checked before anything is allocated, the checksum before anything is parsed. Raises
    CheckpointCorrupt for what does not hold, OSError for a file that cannot be read.
    """
    with path.open("rb") as handle:
        size, expected = os.fstat(handle.fileno()).st_size, size_of(shapes)
        (length,) = LENGTH.unpack(handle.read(LENGTH.size).ljust(LENGTH.size, b"\xff"))
        bound = len(_header(None, shapes)) + LARGEST_METADATA
        if length > bound or size != LENGTH.size + length + expected:
            raise _damaged(path, f"{size} bytes are not those of this model's inner state")
        header = handle.read(length)
        data = bytearray(expected)
        if len(header) < length or handle.readinto(data) < expected:
            raise _damaged(path, "it ends early")
    start, end = len(OPENING), len(OPENING) + len(ZEROS)
    hasher = xxhash.xxh3_64(LENGTH.pack(length) + header[:start] + ZEROS.encode() + header[end:])
    hasher.update(data)
    if header[start:end] != hasher.hexdigest().encode():
        raise _damaged(path, "its checksum does not match")
    try:
        entries: dict[str, Any] = json.loads(header)
        meta: dict[str, str] = entries.pop("__metadata__")
        numbers = {name: int(meta[name]) for name in (*ORIGIN_NUMBERS, *SAVED_NUMBERS)}
        run, learner = meta["run"], meta["learner"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header makes no sense") from error
    if entries != _entries(shapes):
        raise _damaged(path, "its tensors are not those of this model")
    origin = Origin(run, learner=learner, **{name: numbers[name] for name in ORIGIN_NUMBERS})
    tensors: dict[str, NDArray[Any]] = {}
    for name, (shape, dtype) in shapes.items():
        kind, offset = np.dtype(dtype).newbyteorder("<"), entries[name]["data_offsets"][0]
        flat = np.frombuffer(data, kind, prod(shape), offset)
        tensors[name] = flat.astype(dtype, copy=False).reshape(shape)
    return Saved(origin, **{name: numbers[name] for name in SAVED_NUMBERS}), tensors


def _entries(shapes: Shapes) -> dict[str, object]:
    entries: dict[str, object] = {}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        end = offset + prod(shape) * np.dtype(dtype).itemsize
        kind = CODES[dtype]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return entries


def _header(saved: Saved | None, shapes: Shapes) -> bytes:
    """Return what comes before the tensors, with a checksum of zeros."""
    meta = {"checksum": ZEROS}
    if saved is not None:
        numbers = {name: getattr(saved, name) for name in SAVED_NUMBERS}
        meta |= {name: str(value) for name, value in (asdict(saved.origin) | numbers).items()}
    text = json.dumps({"__metadata__": meta} | _entries(shapes), separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH.size)
    return LENGTH.pack(len(text)) + text


def _damaged(path: Path, why: str) -> CheckpointCorrupt:
    msg = (
        f"The inner optimizer state in {path} cannot be used ({why}): the learner starts with a"
        " fresh one, and its next save replaces the file."
    )
    return CheckpointCorrupt(msg, path=str(path))
