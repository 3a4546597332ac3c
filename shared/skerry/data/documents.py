"""Reads documents from text files, JSON lines and Parquet, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.data.files import find_files, unreadable
from skerry.errors import CorpusError

Messages: TypeAlias = list[dict[str, str]]
TEXT, LINES, TABLES = (".txt", ".md", ".rst", ".py"), (".jsonl", ".ndjson"), (".parquet",)
MESSAGES = "messages"
FIELD = "--field, or data.field in a run's settings"
MOST_LINE_BYTES = 256 << 20
MOST_FILE_BYTES = 1 << 30
"""Most bytes of a text file, which is one document."""
ROWS = 1_024
"""Rows of a table that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Article:
    """A document: text, the messages of a conversation, or tokens and their weights as targets."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    tokens: NDArray[np.uint32] | None = None
    weights: NDArray[Any] | None = None


def find_sources(sources: Sequence[str], text: Sequence[str] = TEXT) -> list[Path]:
    """Return the files that sources name; in folders, text files are those that end in ``text``."""
    return find_files(sources, (*text, *LINES, *TABLES))


def fingerprint(files: Sequence[Path], field: str) -> str:
    """Return a text that changes when one of these files does, without reading them.

    Raises CorpusError for one that is gone.
    """
    try:
        stats = [(file.absolute(), file.stat()) for file in files]
    except OSError as error:
        raise unreadable(error) from error
    known = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    return xxhash.xxh3_128_hexdigest(json.dumps([field, known]).encode())


def read_all(files: Sequence[Path], field: str = "text") -> Iterator[Article]:
    """Yield the documents of files, one file after another."""
    for file in files:
        yield from read_documents(file, field)


def read_documents(file: Path, field: str = "text") -> Iterator[Article]:
    """Yield the documents of a file: a text file is one, a line of JSON or a row of a table is one.

    ``field`` is the column or key of the text; ``messages`` is that of conversations. Raises
    CorpusError that names the file, and the line where there are lines.
    """
    try:
        if file.suffix in LINES:
            yield from _lines(file, field)
        elif file.suffix in TABLES:
            yield from _rows(file, field)
        elif (size := file.stat().st_size) > MOST_FILE_BYTES:
            msg = f"{file} is one document of {size} bytes: split it, or write it as JSON lines."
            raise CorpusError(msg, path="source")
        elif text := file.read_text(encoding="utf-8"):
            yield Article(text)
    except UnicodeDecodeError as error:
        msg = f"{file} is not UTF-8 text (byte {error.start}): convert it or leave it out."
        raise CorpusError(msg, path="source") from error
    except OSError as error:
        raise unreadable(error) from error


def _lines(file: Path, field: str) -> Iterator[Article]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MOST_LINE_BYTES):
            number += 1
            if len(line) == MOST_LINE_BYTES:
                msg = f"{file}, line {number} has {MOST_LINE_BYTES >> 20} MiB or more: split it."
                raise CorpusError(msg, path="source")
            if not line.strip():
                continue
            try:
                found: object = json.loads(line)
            except (ValueError, RecursionError) as error:
                msg = f"{file}, line {number} is not JSON ({error}): correct or remove it."
                raise CorpusError(msg, path="source") from error
            if not isinstance(found, dict):
                msg = f"{file}, line {number} is not a JSON object: correct or remove it."
                raise CorpusError(msg, path="source")
            yield from article(
                cast("dict[str, Any]", found).get(field), f"{file}, line {number}", field
            )


def _rows(file: Path, field: str) -> Iterator[Article]:
    import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem

    try:
        with pq.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names[:20])
                msg = f"{file} has no column {field!r}, but {names}: name one with {FIELD}."
                raise CorpusError(msg, path="--field")
            row = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from article(value, f"{file}, row {row}", field)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).partition("\n")[0]
        msg = f"{file} cannot be read as Parquet ({reason}): write it again or leave it out."
        raise CorpusError(msg, path="source") from error


def article(value: object, place: str, field: str) -> Iterator[Article]:
    """Yield the document that a field holds; nothing for an empty text."""
    if isinstance(value, str):
        if value:
            yield Article(_whole(value, place))
        return
    turns = cast("list[object]", value) if field == MESSAGES and isinstance(value, list) else []
    messages: Messages = []
    for turn in turns:
        parts = cast("dict[str, object]", turn) if isinstance(turn, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if not (isinstance(role, str) and isinstance(content, str)):
            messages = []
            break
        messages.append({"role": role, "content": _whole(content, place)})
    if not messages:
        kind = "list of messages with role and content" if field == MESSAGES else "text"
        msg = f"{place} has no {kind} in {field!r}: correct it, or name another with {FIELD}."
        raise CorpusError(msg, path="--field")
    yield Article(messages=tuple(messages))


def _whole(text: str, place: str) -> str:
    """Return a text that UTF-8 can write: JSON may also hold one half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        msg = f"{place} has half a character ({text[error.start]!a}): correct it or leave it out."
        raise CorpusError(msg, path="source") from error
    return text
