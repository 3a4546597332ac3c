"""A corpus as tokens in a folder of its own: shards that are mapped into memory, and a manifest.

``data.source = "prepared"`` trains on such folders, ``skerry data prepare`` writes them. A shard
has its tokens, the ends of its documents, a hash of each document's text and, where some tokens are
no targets, a byte for each. A folder is complete, or it has no manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.errors import CorpusError

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}


class Shard(BaseModel):
    """One shard; ``xxh3`` is of its tokens' bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[0-9]{5}$")
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    xxh3: str


class PreparedManifest(BaseModel):
    """What a folder holds. ``masked``: some tokens are no targets."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int = Field(ge=1, le=1)
    tokenizer: str
    vocab: int = Field(ge=1)
    dtype: str = Field(pattern="^uint(16|32)$")
    masked: bool
    tokens: int
    documents: int
    shards: tuple[Shard, ...]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedShard:
    """A shard's arrays: tokens, document ends (the last is the length), text hashes, targets."""

    tokens: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    targets: NDArray[np.bool_] | None


def read_manifest(folder: Path) -> PreparedManifest:
    """Return a prepared folder's manifest; CorpusError for a folder that is none, or not whole."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            msg = f"{path} has more than {MOST_MANIFEST_BYTES} bytes: prepare the folder again."
            raise CorpusError(msg, path="data.paths")
        return PreparedManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"{folder} is no prepared corpus ({error.strerror}): write one with `skerry data"
        raise CorpusError(msg + " prepare`.", path="data.paths") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        msg = f"{path} is not valid ({where}: {first['msg']}): prepare the folder again."
        raise CorpusError(msg, path="data.paths") from error


def open_shards(folder: Path, manifest: PreparedManifest) -> Iterator[PreparedShard]:
    """Map a folder's shards; CorpusError where a file is not what the manifest says."""
    for shard in manifest.shards:
        tokens = _mapped(folder, f"{shard.name}.tokens", DTYPES[manifest.dtype], shard.tokens)
        ends = np.array(_mapped(folder, f"{shard.name}.ends", np.int64, shard.documents))
        hashes = np.array(_mapped(folder, f"{shard.name}.hashes", np.uint64, shard.documents))
        if ends[-1] != shard.tokens or ends[0] < 1 or np.any(np.diff(ends) < 1):
            msg = f"{folder / shard.name}.ends does not cut its tokens: prepare the folder again."
            raise CorpusError(msg, path="data.paths")
        targets = None
        if manifest.masked:
            targets = _mapped(folder, f"{shard.name}.targets", np.bool_, shard.tokens)
        yield PreparedShard(tokens, ends, hashes, targets)


def verify(folder: Path) -> PreparedManifest:
    """Read all tokens of a folder; CorpusError where they are not those that were prepared."""
    manifest = read_manifest(folder)
    for shard, opened in zip(manifest.shards, open_shards(folder, manifest), strict=True):
        if xxhash.xxh3_64_hexdigest(opened.tokens.data.cast("B")) != shard.xxh3:
            msg = f"{folder / shard.name}.tokens is damaged: prepare the folder again."
            raise CorpusError(msg, path="data.paths")
    return manifest


def _mapped(folder: Path, name: str, dtype: Any, count: int) -> Any:
    path, wide = folder / name, np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size == count * wide.itemsize:
            return np.memmap(path, wide, mode="r", shape=(count,))
    except OSError as error:
        msg = f"Cannot read {path}: {error.strerror or error}. Prepare the folder again."
        raise CorpusError(msg, path="data.paths") from error
    msg = (
        f"{path} has {size} bytes, {count * wide.itemsize} by its manifest: prepare the folder"
        " again."
    )
    raise CorpusError(msg, path="data.paths")
