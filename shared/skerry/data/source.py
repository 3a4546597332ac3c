"""Reads a corpus: the standard library, text files, memory-mapped or prepared token shards."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.data.remote import copies, is_remote
from skerry.data.shards import open_shards, read_manifest
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig

Tokens = NDArray[np.unsignedinteger[Any]]
"""One dimension of uint8, uint16 or uint32 token ids; may be memory-mapped."""
Places = NDArray[np.int64]

END_OF_FILE = b"\0"
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens in order; ``files`` are the ends of its text files, None for token shards.

    Zero bytes cannot mark the ends: text of two bytes a character is full of them. A prepared shard
    also has a hash of each file's text and, if not all are, says which tokens are targets.
    """

    tokens: Tokens
    files: Places | None = None
    hashes: NDArray[np.uint64] | None = None
    targets: NDArray[np.bool_] | None = None


def read_source(config: DataConfig) -> list[Document]:
    """Return a corpus as documents, text files joined into one; CorpusError says what fails."""
    if config.source == "stdlib":
        return [_join(_stdlib_files())]
    if not config.paths:
        msg = f"data.source is {config.source!r} but data.paths is empty: name files or folders."
        raise CorpusError(msg, path="data.paths")
    if config.source == "text":
        return [_join(_expand(config.paths, config.suffixes))]
    if config.source == "prepared":
        return _prepared(config)
    shards = _expand(config.paths, (".bin", ".npy"))
    return [Document(_map(path, config.token_dtype)) for path in shards]


def _prepared(config: DataConfig) -> list[Document]:
    """Open prepared folders, all of the tokenizer that the run names, if it does already."""
    found: list[Document] = []
    wanted, whose = config.tokenizer, "this run's learners"
    for named in config.paths:
        folder = Path(named).expanduser()
        manifest = read_manifest(folder)
        if wanted and manifest.tokenizer != wanted:
            msg = (
                f"{folder} was prepared with tokenizer {manifest.tokenizer}, {whose} with {wanted}:"
                " prepare it with the same one."
            )
            raise CorpusError(msg, path="data.paths")
        wanted, whose = manifest.tokenizer, str(folder)
        found += (
            Document(s.tokens, s.ends, s.hashes, s.targets) for s in open_shards(folder, manifest)
        )
    return found


def with_tokenizer(config: DataConfig) -> DataConfig:
    """Return the config with its tokenizer's digest, as a run's record holds it."""
    if config.source != "prepared" or config.tokenizer:
        return config
    manifest = read_manifest(Path(config.paths[0]).expanduser())
    return config.model_copy(update={"tokenizer": manifest.tokenizer})


def _stdlib_files() -> list[Path]:
    """List the standard library's sources, without its tests, which not every system installs.

    Skipped folders are not opened: one of them holds all installed packages.
    """
    found: list[Path] = []
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        below[:] = {*below} - SKIPPED_FOLDERS
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


def _expand(paths: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """Return every named file, and the files with these suffixes below every named folder.

    A name may be a pattern, such as ``logs/*.txt``, or the address of objects in a bucket.
    """
    files: list[Path] = []
    for named in paths:
        if is_remote(named):
            files += copies(named, suffixes)
            continue
        path = Path(named).expanduser()
        if path.is_dir():
            files += sorted(p for p in _below(path) if p.suffix in suffixes and p.is_file())
        elif path.exists():
            files.append(path)
        elif matching := sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))):
            files += (match for match in matching if match.is_file())
        else:
            msg = f"Corpus path {named} does not exist: correct data.paths."
            raise CorpusError(msg, path="data.paths")
    if not files:
        msg = f"No file below {', '.join(paths)} ends in {', '.join(suffixes)}:"
        raise CorpusError(msg + " correct data.paths or data.suffixes.", path="data.paths")
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder; CorpusError for a folder that cannot be read.

    ``rglob`` would skip it, and two learners would read different texts without a warning.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(error)

    for root, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(root, name) for name in names)


def _unreadable(error: OSError) -> CorpusError:
    msg = f"Cannot read {error.filename}: {error.strerror}. Make it readable or leave it out."
    return CorpusError(msg, path="data.paths")


def _join(paths: Sequence[Path]) -> Document:
    """Read files as bytes, each closed by a zero byte."""
    try:
        files = [path.read_bytes() for path in paths]
    except OSError as error:
        raise _unreadable(error) from error
    if not any(files):
        msg = "The corpus is empty: name files with text in data.paths."
        raise CorpusError(msg, path="data.paths")
    return text(files)


def text(files: Sequence[bytes]) -> Document:
    """Return files as one document of bytes, each of them closed by a zero byte."""
    data = b"".join(part for file in files for part in (file, END_OF_FILE))
    ends = np.cumsum([len(file) + len(END_OF_FILE) for file in files], dtype=np.int64)
    return Document(np.frombuffer(data, np.uint8), ends)


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
    if tokens.ndim != 1 or tokens.dtype.kind != "u" or not tokens.size:
        msg = f"Token shard {path} is {tokens.dtype}{tokens.shape}, not one row of unsigned ids:"
        raise CorpusError(msg + " rewrite it.", path="data.paths")
    return tokens
