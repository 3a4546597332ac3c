"""Reads a corpus: the standard library, text files, memory-mapped or prepared token shards."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.data.documents import TABLES
from skerry.data.files import copied_folder, find_files, is_remote, unreadable
from skerry.data.shards import MANIFEST, SUFFIXES, open_many_files, open_shards, read_manifest
from skerry.errors import CorpusError
from skerry.folders import matching
from skerry.settings.checks import tokenizer_digest
from skerry.settings.models import DataConfig

Tokens = NDArray[np.unsignedinteger[Any]]
"""One dimension of uint8, uint16 or uint32 token ids; may be memory-mapped."""
Places = NDArray[np.int64]

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
END_OF_FILE = b"\0"
MOST_ID_BYTES = 4
"""Bytes of the largest token id: batches are int32."""
BLOCK_BYTES = 1 << 24
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens in order; ``files`` are the ends of its text files, None for token shards.

    Zero bytes cannot mark the ends: text of two bytes a character is full of them. A prepared shard
    also has for each file a hash of its text and the bytes of its targets, and, if tokens differ as
    targets, the weight of each. ``vocab`` is that of its tokenizer, 0: unknown.
    """

    tokens: Tokens
    files: Places | None = None
    hashes: NDArray[np.uint64] | None = None
    text_bytes: Places | None = None
    weights: NDArray[Any] | None = None
    vocab: int = 0


def read_source(config: DataConfig) -> list[Document]:
    """Return a corpus as documents, text files joined into one; CorpusError says what fails."""
    if config.source == "stdlib":
        return [_join(_stdlib_files())]
    if not config.paths:
        msg = f"data.source is {config.source!r} but data.paths is empty: name files or folders."
        raise CorpusError(msg, path="data.paths")
    if config.source == "text":
        return [_join(text_files(config))]
    if config.source == "prepared":
        return _prepared(config)
    shards = find_files(config.paths, (".bin", ".npy"))
    open_many_files()
    return [Document(_map(path, config.token_dtype)) for path in shards]


def text_files(config: DataConfig) -> list[Path]:
    """Return the files that are read byte by byte; CorpusError for a table or a compressed file."""
    files = find_files(config.paths, config.suffixes)
    for file in files:
        if file.suffix in TABLES:
            msg = (
                f"{file} is a table, whose bytes are not text: name a tokenizer's folder with"
                " data.tokenizer_folder, or prepare it with `skerry data prepare`."
            )
            raise CorpusError(msg, path="data.paths")
        if file.suffix in COMPRESSED:
            msg = f"{file} is compressed, and its bytes are not text: unpack it first."
            raise CorpusError(msg, path="data.paths")
    return files


def _prepared(config: DataConfig) -> list[Document]:
    """Open prepared folders, all of one tokenizer, the run's if it names one; or CorpusError."""
    found: list[Document] = []
    wanted, whose = config.tokenizer, "this run's learners"
    for folder in prepared_folders(config.paths):
        manifest = read_manifest(folder)
        if wanted and manifest.tokenizer != wanted:
            msg = (
                f"{folder} was prepared with tokenizer {manifest.tokenizer}, {whose} with {wanted}:"
                " prepare it with the same one."
            )
            raise CorpusError(msg, path="data.paths")
        wanted, whose = manifest.tokenizer, str(folder)
        found += (
            Document(s.tokens, s.ends, s.hashes, s.text_bytes, s.weights, manifest.vocab)
            for s in open_shards(folder, manifest)
        )
    return found


def prepared_folders(paths: Sequence[str]) -> list[Path]:
    """Return the prepared folders that paths name: one each, or those that match a pattern.

    One in a bucket is copied. Raises CorpusError for a name without any.
    """
    found: list[Path] = []
    for named in paths:
        if is_remote(named):
            found.append(copied_folder(named, SUFFIXES, MANIFEST))
            continue
        folders = [path for path in matching(named) if (path / MANIFEST).is_file()]
        if not folders:
            msg = f"{named} is not a prepared corpus: write one with `skerry data prepare`."
            raise CorpusError(msg, path="data.paths")
        found += folders
    return found


def with_tokenizer(config: DataConfig) -> DataConfig:
    """Return the config with its tokenizer's digest, as a run's record holds it."""
    if config.tokenizer:
        return config
    digest = ""
    if config.source == "prepared":
        digest = read_manifest(prepared_folders(config.paths)[0]).tokenizer
    elif config.tokenizer_folder:
        digest = tokenizer_digest(Path(config.tokenizer_folder).expanduser())
    return config.model_copy(update={"tokenizer": digest})


def _stdlib_files() -> list[Path]:
    """List the standard library's sources, without its tests, which not every system installs.

    Skipped folders are not opened: one of them holds all installed packages.
    """
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = {*below} - SKIPPED_FOLDERS
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _join(paths: Sequence[Path]) -> Document:
    """Read files as bytes, each closed by a zero byte; memory never holds the text twice."""
    try:
        document = text(_blocks(path) for path in paths)
    except OSError as error:
        raise unreadable(error) from error
    if len(document.tokens) == len(paths) * len(END_OF_FILE):
        msg = "The corpus is empty: name files with text in data.paths."
        raise CorpusError(msg, path="data.paths")
    return document


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def text(files: Iterable[Iterable[bytes]]) -> Document:
    """Return files, each in blocks, as one document of bytes; a zero byte closes each file."""
    data, ends = bytearray(), list[int]()
    for blocks in files:
        for block in blocks:
            data += block
        data += END_OF_FILE
        ends.append(len(data))
    return Document(np.frombuffer(data, np.uint8), np.array(ends, np.int64))


def _map(path: Path, dtype: str) -> Tokens:
    """Map one shard: ``.npy`` by its own header, anything else as raw little-endian ``dtype``."""
    try:
        if path.suffix == ".npy":
            tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        msg = f"Cannot map token shard {path}: {error}. It must be a non-empty array of {dtype}."
        raise CorpusError(msg, path="data.paths") from error
    ids = tokens.dtype.kind == "u" and tokens.dtype.itemsize <= MOST_ID_BYTES
    if tokens.ndim != 1 or not ids or not tokens.size:
        msg = (
            f"Token shard {path} is {tokens.dtype}{tokens.shape}, not one row of unsigned ids of at"
            f" most {8 * MOST_ID_BYTES} bits: rewrite it."
        )
        raise CorpusError(msg, path="data.paths")
    return tokens
