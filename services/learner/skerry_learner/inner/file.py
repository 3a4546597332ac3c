"""The file that holds an inner optimizer's state: a header of JSON, the tensors, a checksum."""

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
CHECKSUM_BYTES = 8
"""Of the xxh3-64 over all that comes before it."""
MOST_METADATA = 65_536
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
    beside = path.parent / draft
    text = json.dumps(asdict(saved) | {"tensors": _listed(shapes)}).encode()
    header = LENGTH.pack(len(text)) + text
    hasher = xxhash.xxh3_64(header)
    try:
        with beside.open("wb") as handle:
            handle.write(header)
            for tensor in tensors:
                data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
                for at in range(0, len(data), PIECE):  # hashing and writing share the cache
                    hasher.update(data[at : at + PIECE])
                    handle.write(data[at : at + PIECE])
            handle.write(hasher.digest())
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
        prefix = handle.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix.ljust(LENGTH.size, b"\xff"))
        bound = len(json.dumps(_listed(shapes))) + MOST_METADATA
        if length > bound or size != LENGTH.size + length + expected + CHECKSUM_BYTES:
            raise _damaged(path, f"{size} bytes are not those of this model's inner state")
        text, data = handle.read(length), bytearray(expected)
        handle.readinto(data)
        checksum = handle.read()
    hasher = xxhash.xxh3_64(prefix + text)
    hasher.update(data)
    if checksum != hasher.digest():
        raise _damaged(path, "its checksum does not match")
    try:
        entries: dict[str, Any] = json.loads(text)
        listed, origin = entries.pop("tensors"), Origin(**entries.pop("origin"))
        saved = Saved(origin, **entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header makes no sense") from error
    if listed != _listed(shapes):
        raise _damaged(path, "its tensors are not those of this model")
    tensors: dict[str, NDArray[Any]] = {}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        tensors[name] = np.frombuffer(data, dtype, prod(shape), offset).reshape(shape)
        offset += tensors[name].nbytes
    return saved, tensors


def _listed(shapes: Shapes) -> list[list[Any]]:
    return [[name, list(shape), dtype] for name, (shape, dtype) in shapes.items()]


def _damaged(path: Path, why: str) -> CheckpointCorrupt:
    msg = (
        f"The inner optimizer state in {path} cannot be used ({why}): the learner starts with a"
        " fresh one, and its next save replaces the file."
    )
    return CheckpointCorrupt(msg, path=str(path))
