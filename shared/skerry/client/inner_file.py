"""The file of an inner optimizer's state: a header of JSON, the tensors, a checksum over both."""

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
from skerry.protocol.messages import RunRecord
from skerry.store.base import fsync_folder

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Every tensor by name: its shape and its numpy dtype."""

LENGTH = struct.Struct("<Q")
CHECKSUM_BYTES = 8
"""Format of the xxh3-64 over all that comes before it."""
MOST_METADATA = 65_536
MOST_HEADER = 64 * 1024**2
PIECE = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose state it is; only the same process of the same learner and run may use it."""

    run: str
    created_ns: int
    plan_digest: int
    config_digest: int
    learner: str
    process: int = 0
    processes: int = 1

    @property
    def stem(self) -> str:
        """How the names of its files begin."""
        return "inner" if self.processes == 1 else f"inner-{self.process}-of-{self.processes}"


def origin_of(record: RunRecord, name: str) -> Origin:
    """Return whose inner state this learner may go on with."""
    config = xxhash.xxh3_64_intdigest(record.config_json.encode())
    return Origin(record.run, record.created_ns, record.plan_digest, config, name)


@dataclass(frozen=True, slots=True)
class Saved:
    """When a file was saved: ``step`` of the global clock, ``steps`` of that incarnation."""

    origin: Origin
    incarnation: int
    step: int
    steps: int


def size_of(shapes: Shapes) -> int:
    """Return the bytes of all tensors together."""
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


def write_file(
    path: Path,
    saved: Saved,
    shapes: Shapes,
    tensors: Iterable[NDArray[Any]],
    draft: str,
    before: Path | None = None,
) -> None:
    """Write a file whole or not at all: ``draft`` beside it first, then renamed over it.

    ``tensors`` come one by one, in the order of ``shapes``, so memory stays flat. An older file is
    kept as ``before``, if that is given. Raises OSError, and then leaves the older file in place.
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
        if before is not None:
            with suppress(FileNotFoundError):
                path.replace(before)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    fsync_folder(path.parent)


def read_file(path: Path, shapes: Shapes | None) -> tuple[Saved, dict[str, NDArray[Any]]]:
    """Return what a file holds: exactly the tensors of ``shapes``, or any if that is None.

    Tensors are views of the mapped file: each is read when it is copied to a device. Sizes are
    checked before anything is mapped, the checksum before anything is parsed. Raises
    CheckpointCorrupt if a check fails, OSError for a file that cannot be read.
    """
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix.ljust(LENGTH.size, b"\xff"))
        bound, inside = MOST_HEADER, size - LENGTH.size - length - CHECKSUM_BYTES
        expected = max(0, inside)
        if shapes is not None:
            bound, expected = len(json.dumps(_listed(shapes))) + MOST_METADATA, size_of(shapes)
        if length > bound or inside != expected:
            raise _damaged(path, f"{size} bytes are not those of this model's inner state")
        text = handle.read(length)
        hasher = xxhash.xxh3_64(prefix + text)
        for at in range(0, expected, PIECE):
            hasher.update(handle.read(min(PIECE, expected - at)))
        checksum, start = handle.read(), LENGTH.size + length
        data = np.memmap(handle, np.uint8, "r", start, (expected,)) if expected else b""
    if checksum != hasher.digest():
        raise _damaged(path, "its checksum does not match")
    try:
        entries: dict[str, Any] = json.loads(text)
        listed, origin = entries.pop("tensors"), Origin(**entries.pop("origin"))
        saved = Saved(origin, **entries)
        found = {name: (tuple(shape), dtype) for name, shape, dtype in listed}
        if shapes is None and size_of(found) == expected:
            shapes = found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header makes no sense") from error
    if shapes is None or listed != _listed(shapes):
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
