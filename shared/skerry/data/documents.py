"""Reads documents from text files, JSON lines and Parquet, one after another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from skerry.data.remote import copies, is_remote
from skerry.errors import CorpusError

Messages: TypeAlias = list[dict[str, str]]
TEXT, LINES, TABLES = (".txt", ".md", ".rst", ".py"), (".jsonl", ".ndjson"), (".parquet",)
MESSAGES = "messages"
MOST_LINE_BYTES = 256 << 20
ROWS = 1_024
"""Rows of a table that are held at once."""


@dataclass(frozen=True, slots=True)
class Article:
    """A document: text, or the messages of a conversation."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()


def find_sources(sources: Sequence[str]) -> list[Path]:
    """Return the files that sources name: files, folders, patterns such as ``logs/*.jsonl``.

    Objects at ``s3://bucket/prefix`` are copied here. Raises CorpusError for a source without any.
    """
    found: list[Path] = []
    for source in sources:
        if is_remote(source):
            found += copies(source, (*TEXT, *LINES, *TABLES))
            continue
        path = Path(source).expanduser()
        named = [path] if path.exists() else sorted(Path(path.anchor).glob(_pattern(path)))
        files = sorted(
            file
            for one in named
            for file in (one.rglob("*") if one.is_dir() else [one])
            if file.is_file() and (file == path or file.suffix in (*TEXT, *LINES, *TABLES))
        )
        if not files:
            endings = ", ".join((*TEXT, *LINES, *TABLES))
            msg = f"{source} names no file that ends in {endings}: correct it."
            raise CorpusError(msg, path="source")
        found += files
    return found


def _pattern(path: Path) -> str:
    """Return a pattern relative to its root, or to the working folder."""
    return str(path.relative_to(path.anchor))


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
        elif text := file.read_text(encoding="utf-8"):
            yield Article(text)
    except UnicodeDecodeError as error:
        msg = f"{file} is not UTF-8 text (byte {error.start}): convert it or leave it out."
        raise CorpusError(msg, path="source") from error
    except OSError as error:
        msg = f"Cannot read {file}: {error.strerror or error}. Make it readable or leave it out."
        raise CorpusError(msg, path="source") from error


def _lines(file: Path, field: str) -> Iterator[Article]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MOST_LINE_BYTES):
            number += 1
            if not line.strip():
                continue
            try:
                found: object = json.loads(line)
            except (ValueError, RecursionError) as error:
                msg = f"{file}, line {number} is no JSON ({error}): correct or remove it."
                raise CorpusError(msg, path="source") from error
            if not isinstance(found, dict):
                msg = f"{file}, line {number} is no JSON object: correct or remove it."
                raise CorpusError(msg, path="source")
            yield from _article(
                cast("dict[str, Any]", found).get(field), f"{file}, line {number}", field
            )


def _rows(file: Path, field: str) -> Iterator[Article]:
    import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
    import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem

    try:
        with pq.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names[:20])
                msg = f"{file} has no column {field!r}, but {names}: name one with --field."
                raise CorpusError(msg, path="--field")
            row = 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    yield from _article(value, f"{file}, row {row}", field)
    except pa.ArrowException as error:
        reason = str(error).partition("\n")[0]
        msg = f"{file} cannot be read as Parquet ({reason}): write it again or leave it out."
        raise CorpusError(msg, path="source") from error


def _article(value: object, place: str, field: str) -> Iterator[Article]:
    """Yield what a field holds; nothing for an empty text."""
    if isinstance(value, str):
        if value:
            yield Article(value)
        return
    turns = cast("list[object]", value) if field == MESSAGES and isinstance(value, list) else []
    messages: Messages = []
    for turn in turns:
        parts = cast("dict[str, object]", turn) if isinstance(turn, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if not (isinstance(role, str) and isinstance(content, str)):
            messages = []
            break
        messages.append({"role": role, "content": content})
    if not messages:
        kind = "list of messages with role and content" if field == MESSAGES else "text"
        msg = f"{place} has no {kind} in {field!r}: correct it, or name another with --field."
        raise CorpusError(msg, path="--field")
    yield Article(messages=tuple(messages))
