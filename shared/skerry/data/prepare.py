"""Turns documents into token shards, in a folder that appears whole or not at all.

A killed preparation leaves its shards beside the folder, and the next one of the same sources goes
on from there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from skerry.data.chat import ChatTemplate, Message
from skerry.data.documents import Article
from skerry.data.shards import (
    DTYPES,
    MANIFEST,
    PreparedManifest,
    ShardEntry,
    digest_of,
    open_shards,
    read_manifest,
)
from skerry.data.tokenizer import PART, SETTINGS, Words, parts_of
from skerry.errors import ConfigError, CorpusError
from skerry.tasks import end_if_cancelled

log = structlog.get_logger()

UNFINISHED = "unfinished.json"
"""The manifest of the shards that a draft holds so far."""
SHARD_TOKENS = 1 << 26
TOGETHER, TOGETHER_CHARACTERS = 512, 1 << 18
"""Most documents, and most of their text, that are tokenised at once on all cores; an interrupt
waits for them."""

Progress = Callable[[int, int], None]
"""Called with how many documents and tokens there are so far."""


class _Tokenised(NamedTuple):
    """A document's tokens, the bytes to hash, the bytes of its targets' text, tokens' weights."""

    tokens: NDArray[Any]
    content: bytes
    text_bytes: int
    weights: NDArray[Any] | None


@dataclass(slots=True)
class _Writer:
    """Collects documents and writes a shard whenever there are enough tokens.

    ``manifest`` says what has been written, and stands in the folder.
    """

    folder: Path
    manifest: PreparedManifest
    _waiting: list[_Tokenised] = field(default_factory=list[_Tokenised])
    _size: int = 0

    def add(self, made: _Tokenised) -> None:
        kind = "" if made.weights is None else str(made.weights.dtype)
        if not self.manifest.documents and not self._waiting:
            self.manifest = self.manifest.model_copy(update={"weights": kind})
        if kind != self.manifest.weights:
            msg = (
                "Texts, all of whose tokens are learnt, and conversations or other documents with"
                " weights are prepared into a folder each: split the sources."
            )
            raise CorpusError(msg, path="source")
        self._waiting.append(made)
        self._size += len(made.tokens)
        if self._size >= SHARD_TOKENS:
            self.flush()

    @property
    def written(self) -> tuple[int, int]:
        """How many documents and tokens there are so far."""
        return self.manifest.documents + len(self._waiting), self.manifest.tokens + self._size

    def flush(self) -> None:
        """Write what waits as a shard, then note it in the manifest."""
        if not self._waiting:
            return
        known, some = self.manifest, self._waiting
        name = f"{len(known.shards):05d}"
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.concatenate([one.tokens for one in some]).astype(DTYPES[known.dtype]),
            "ends": np.cumsum([len(one.tokens) for one in some], dtype=np.int64),
            "hashes": np.array([xxhash.xxh3_64_intdigest(one.content) for one in some], np.uint64),
            "bytes": np.array([one.text_bytes for one in some], np.int64),
        }
        if known.weights:
            weights = [one.weights for one in some if one.weights is not None]
            arrays["weights"] = np.concatenate(weights)
        for kind, values in arrays.items():
            with (self.folder / f"{name}.{kind}").open("wb") as file:
                file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
                os.fsync(file.fileno())
        tokens = arrays["tokens"]
        shard = ShardEntry(
            name=name,
            tokens=len(tokens),
            documents=len(some),
            text_bytes=int(arrays["bytes"].sum()),
            xxh3=digest_of([tokens]),
            rest=digest_of(values for kind, values in arrays.items() if kind != "tokens"),
        )
        self._note(shard, int(tokens.max()))
        self._waiting, self._size = [], 0

    def _note(self, shard: ShardEntry, most: int) -> None:
        """Note a shard in the folder's manifest; ``most`` is its largest token."""
        known = self.manifest
        more = {
            "vocab": max(known.vocab, most + 1),
            "tokens": known.tokens + shard.tokens,
            "documents": known.documents + shard.documents,
            "text_bytes": known.text_bytes + shard.text_bytes,
            "shards": (*known.shards, shard),
        }
        self.manifest = known.model_copy(update=more)
        draft = self.folder / f".{UNFINISHED}"
        draft.write_text(self.manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(self.folder / UNFINISHED)


def key_of(sources: str, words: Words | None) -> str:
    """Return the key of a prepared folder: a hash of its sources and its tokenizer.

    ``sources`` is what ``documents.fingerprint`` returns, or ``items.fingerprint``.
    """
    digest = xxhash.xxh3_128(sources.encode())
    for file in words.files if words is not None else ():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def prepare(
    articles: Iterable[Article],
    words: Words | None,
    out: Path,
    sources: Sequence[str] = (),
    progress: Progress = lambda *_: None,
    *,
    key: str = "",
) -> PreparedManifest:
    """Tokenise documents into a new folder, each ended by the tokenizer's end-of-text token.

    Conversations are rendered by the tokenizer's chat template; only the words of assistants are
    targets. Documents that are tokens already are taken as they are; ``words`` None: all are. The
    shards of an interrupted preparation with the same ``key`` are kept. Raises CorpusError for a
    folder that is not empty, or for no documents at all.
    """
    wide = words is None or words.size > np.iinfo(np.uint16).max + 1
    blank = PreparedManifest(
        format=1,
        tokenizer="" if words is None else words.digest,
        vocab=1 if words is None else words.plain,
        dtype="uint32" if wide else "uint16",
        tokens=0,
        documents=0,
        text_bytes=0,
        shards=(),
        sources=tuple(sources),
        key=key,
    )
    try:
        with _draft(out, blank) as (draft, done):
            writer = _Writer(draft, done)
            for made in _tokenised(islice(articles, done.documents, None), words):
                end_if_cancelled()
                writer.add(made)
                progress(*writer.written)
            writer.flush()
            if not writer.manifest.documents:
                msg = f"The sources hold no document: {', '.join(sources) or 'name some'}."
                raise CorpusError(msg, path="source")
            for file in words.files if words is not None else ():
                shutil.copyfile(file, draft / file.name)
            (draft / UNFINISHED).replace(draft / MANIFEST)
    except OSError as error:
        msg = (
            f"Cannot write {out}: {error.strerror or error}. Mend or free that disk, and run the"
            " same again: it goes on from what is written."
        )
        raise CorpusError(msg, path="out") from error
    return writer.manifest


@contextmanager
def _draft(target: Path, blank: PreparedManifest) -> Generator[tuple[Path, PreparedManifest]]:
    """Yield a draft, which becomes the folder when it is whole, and what it holds already.

    Raises CorpusError for a folder that is not empty, and while another process writes it.
    """
    taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if taken or not target.name:  # the working directory cannot be replaced
        msg = f"{target} is not empty: name a new folder."
        raise CorpusError(msg, path="out")
    try:
        target.rmdir()  # the draft takes its place
    except FileNotFoundError:
        pass
    except OSError as error:  # it is a link or a mounted disk
        msg = f"{target} cannot be replaced ({error.strerror}): name a new folder in it."
        raise CorpusError(msg, path="out") from error
    draft = target.with_name(f".{target.name}.unfinished")
    draft.mkdir(parents=True, exist_ok=True)
    handle = os.open(draft, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"Another process is preparing {target}: wait for it, or name another folder."
            raise CorpusError(msg, path="out") from error
        done = _resumed(draft, blank)
        try:
            yield draft, done
        except BaseException:
            if not blank.key or not (draft / UNFINISHED).exists():
                shutil.rmtree(draft, ignore_errors=True)
            raise
        draft.chmod(0o755)
        draft.rename(target)
    finally:
        os.close(handle)


def _resumed(draft: Path, blank: PreparedManifest) -> PreparedManifest:
    """Return what a draft of the same sources holds; empty a draft of others, or a damaged one."""
    with suppress(CorpusError):
        held = read_manifest(draft, UNFINISHED)
        if blank.key and held.key == blank.key:
            for _ in open_shards(draft, held):
                pass
            log.info("preparation_resumed", documents=held.documents, tokens=held.tokens)
            return held
    for file in draft.iterdir():
        file.unlink()
    return blank


def _together(articles: Iterable[Article]) -> Iterator[list[Article]]:
    """Yield documents in lists that are worth handing to all cores and fit into memory."""
    some: list[Article] = []
    size = 0
    for article in articles:
        some.append(article)
        size += len(article.text)
        if len(some) >= TOGETHER or size >= TOGETHER_CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some


def _tokenised(articles: Iterable[Article], words: Words | None) -> Iterator[_Tokenised]:
    """Yield each document's tokens and, for a conversation, which of them are targets."""
    template: ChatTemplate | None = None
    for some in _together(articles):
        texts = [one.text for one in some if not one.messages and one.tokens is None]
        encoded = _encoded(texts, words)
        for article in some:
            if article.tokens is not None:
                yield _given(article, words)
            elif article.messages:
                template = template or ChatTemplate.of(_ending(words).folder)
                yield _spoken(article, _ending(words), template)
            else:
                content = article.text.encode()
                yield _Tokenised(next(encoded), content, len(content), None)


def _encoded(texts: Sequence[str], words: Words | None) -> Iterator[NDArray[np.uint32]]:
    """Yield the tokens of each text with the one that ends it; long texts are read in parts."""
    ending = _ending(words)
    short = iter(ending.encode_batch([text for text in texts if len(text) <= PART]))
    for text in texts:
        parts: Iterable[Sequence[int]]
        parts = [next(short)] if len(text) <= PART else _in_parts(text, ending)
        yield np.concatenate([np.array(ids, np.uint32) for ids in chain(parts, [ending.end])])


def _in_parts(text: str, words: Words) -> Iterator[list[int]]:
    for part in parts_of(text):
        end_if_cancelled()
        yield words.encode_batch([part])[0]


def _ending(words: Words | None) -> Words:
    """Return a tokenizer that can end a text."""
    if words is None:
        msg = "The documents are text: name a tokenizer's folder with data.tokenizer_folder."
        raise ConfigError(msg, path="data.tokenizer_folder")
    if not words.end:
        msg = (
            f"The tokenizer of {words.folder} has no token that ends a text: name it as"
            f" eos_token in its {SETTINGS}."
        )
        raise ConfigError(msg, path="tokenizer")
    return words


def _given(article: Article, words: Words | None) -> _Tokenised:
    """Take a document that is tokens already; the tokenizer, if any, gives its text."""
    tokens = article.tokens
    assert tokens is not None  # the caller has seen them
    most = int(tokens.max())
    if words is not None and most >= words.size:
        msg = (
            f"A document has token {most}, but {words.folder} a tokenizer of {words.size}: name the"
            " one it was made with."
        )
        raise CorpusError(msg, path="data.tokenizer_folder")
    written = 0
    if words is not None:
        learnt = tokens if article.weights is None else tokens[article.weights > 0]
        written = len(words.decode(learnt.tolist()).encode())
    return _Tokenised(tokens, tokens.tobytes(), written, article.weights)


def _spoken(article: Article, words: Words, template: ChatTemplate) -> _Tokenised:
    """Return a conversation's tokens; the targets among them are those that an assistant says."""
    messages = [{**one, "content": words.escaped(one["content"])} for one in article.messages]
    parts = _turns(messages, template)
    pieces = [words.encode_rendered(text) for text, _ in parts]
    said = [np.full(len(p), wanted) for p, (_, wanted) in zip(pieces, parts, strict=True)]
    tokens = np.array([token for piece in (*pieces, words.end) for token in piece], np.uint32)
    weights = np.concatenate([*said, np.array([True])])
    texts = [words.unescaped(text).encode() for text, _ in parts]
    written = sum(len(text) for text, (_, wanted) in zip(texts, parts, strict=True) if wanted)
    return _Tokenised(tokens, b"".join(texts), written, weights)


def _turns(messages: Sequence[Message], template: ChatTemplate) -> list[tuple[str, bool]]:
    """Return a conversation's text in parts, each with whether an assistant says it.

    A turn's text is what it adds to that of the turns before. A template that renders these
    otherwise once more follow, as Qwen 3's leaves out what was thought, has the last answer learnt
    alone; with one whose turns cannot be separated, all tokens are targets.
    """
    parts: list[tuple[str, bool]] = []
    before = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answered = template.render(messages[: number + 1], answer=False)
        begun = (template.render(messages[:number], answer=prompt) for prompt in (True, False))
        asked = next(filter(answered.startswith, begun), None)
        if asked is None:
            return [(template.render(messages, answer=False), True)]
        if not asked.startswith(before):
            parts, before = [], ""
        parts += [(asked[len(before) :], False), (answered[len(asked) :], True)]
        before = answered
    if not parts:
        msg = "A conversation without an assistant's answer has nothing to learn: leave it out."
        raise CorpusError(msg, path="source")
    return parts
