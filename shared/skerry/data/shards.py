"""A corpus as tokens in a folder of its own: shards that are mapped into memory, and a manifest.

``data.source = "prepared"`` trains on such folders, ``skerry data prepare`` writes them. A shard
has its tokens, the ends of its documents, for each document a hash of its text and the bytes of its
targets, and, if tokens differ as targets, a weight for each. A folder without a manifest is not
complete.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skerry.errors import CorpusError
from skerry.settings.checks import TOKENIZER, tokenizer_digest

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 64 << 20
SUFFIXES = (".json", ".jinja", ".tokens", ".ends", ".hashes", ".bytes", ".weights")
"""Suffixes of all files of a folder."""
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}


class ShardEntry(BaseModel):
    """One shard; ``xxh3`` is of its tokens' bytes, ``rest`` of all others (empty: unknown)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[0-9]{5}$")
    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    text_bytes: int = Field(ge=0)
    xxh3: str
    rest: str = ""


class PreparedManifest(BaseModel):
    """What a folder holds. ``weights`` is the type of each token's weight as a target, if any.

    ``text_bytes`` are the bytes of its targets; ``key`` identifies its sources, if known.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: int = Field(ge=1, le=1)
    tokenizer: str
    vocab: int = Field(ge=1)
    dtype: str = Field(pattern="^uint(16|32)$")
    weights: str = Field(default="", pattern="^(bool|float32)?$")
    tokens: int
    documents: int
    text_bytes: int
    shards: tuple[ShardEntry, ...]
    sources: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class PreparedShard:
    """A shard's arrays.

    Tokens, the ends of its documents (the last is the length), the hashes of their texts, the bytes
    of their targets, and the weights of tokens as targets.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    ends: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    text_bytes: NDArray[np.int64]
    weights: NDArray[Any] | None


def read_manifest(folder: Path, name: str = MANIFEST) -> PreparedManifest:
    """Return a prepared folder's manifest; CorpusError if it has none, or an invalid one."""
    path = folder / name
    try:
        if path.stat().st_size > MOST_MANIFEST_BYTES:
            msg = f"{path} has more than {MOST_MANIFEST_BYTES} bytes: prepare the folder again."
            raise CorpusError(msg, path="data.paths")
        return PreparedManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"{folder} is not a prepared corpus ({error.strerror}): write one with `skerry data"
        raise CorpusError(msg + " prepare`.", path="data.paths") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its text"
        msg = f"{path} is not valid ({where}: {first['msg']}): prepare the folder again."
        raise CorpusError(msg, path="data.paths") from error


def open_shards(folder: Path, manifest: PreparedManifest) -> Iterator[PreparedShard]:
    """Map a folder's shards; CorpusError where a file is not what the manifest says."""
    open_many_files()
    for shard in manifest.shards:
        tokens = _mapped(folder, f"{shard.name}.tokens", DTYPES[manifest.dtype], shard.tokens)
        ends = np.array(_mapped(folder, f"{shard.name}.ends", np.int64, shard.documents))
        hashes = np.array(_mapped(folder, f"{shard.name}.hashes", np.uint64, shard.documents))
        if ends[-1] != shard.tokens or ends[0] < 1 or np.any(np.diff(ends) < 1):
            msg = f"{folder / shard.name}.ends does not cut its tokens: prepare the folder again."
            raise CorpusError(msg, path="data.paths")
        sizes = np.array(_mapped(folder, f"{shard.name}.bytes", np.int64, shard.documents))
        weights = None
        if kind := manifest.weights:
            weights = _mapped(folder, f"{shard.name}.weights", np.dtype(kind), shard.tokens)
        yield PreparedShard(tokens, ends, hashes, sizes, weights)


def open_many_files() -> None:
    """Let this process open as many files as its system allows: a mapped one stays open."""
    with suppress(ValueError, OSError):  # not every system takes its own bound
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def digest_of(arrays: Iterable[NDArray[Any]]) -> str:
    """Return the xxh3-64 of arrays as a shard's files hold them, in hexadecimal digits."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).data.cast("B"))
    return digest.hexdigest()


def verify(
    folder: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> PreparedManifest:
    """Read all shards of a folder; CorpusError if they are not as they were prepared.

    ``progress`` is called with the numbers of documents and tokens read so far.
    """
    manifest, documents, tokens = read_manifest(folder), 0, 0
    for shard, opened in zip(manifest.shards, open_shards(folder, manifest), strict=True):
        arrays = opened.ends, opened.hashes, opened.text_bytes, opened.weights
        rest = [array for array in arrays if array is not None]
        for kind, known, held in (("tokens", shard.xxh3, [opened.tokens]), ("*", shard.rest, rest)):
            if known and digest_of(held) != known:
                msg = f"{folder / shard.name}.{kind} is damaged: prepare the folder again."
                raise CorpusError(msg, path="data.paths")
        documents, tokens = documents + shard.documents, tokens + shard.tokens
        progress(documents, tokens)
    if manifest.tokenizer and tokenizer_digest(folder) != manifest.tokenizer:
        msg = f"{folder / TOKENIZER} is damaged: prepare the folder again."
        raise CorpusError(msg, path="data.paths")
    return manifest


def _mapped(folder: Path, name: str, dtype: Any, count: int) -> Any:
    path, wide = folder / name, np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size == count * wide.itemsize:
            return np.memmap(path, wide, mode="r", shape=(count,)).view(np.ndarray)
    except OSError as error:
        msg = f"Cannot read {path}: {error.strerror or error}. Prepare the folder again."
        raise CorpusError(msg, path="data.paths") from error
    msg = (
        f"{path} has {size} bytes, {count * wide.itemsize} by its manifest: prepare the folder"
        " again."
    )
    raise CorpusError(msg, path="data.paths")
