"""Text to token shards: train a tokenizer on documents, and write their tokens in a new folder."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.data.chat import ChatTemplate
from skerry.data.documents import Article
from skerry.data.shards import DTYPES, MANIFEST, PreparedManifest, Shard
from skerry.data.tokenizer import COMPANIONS, FILE, SETTINGS, Words
from skerry.errors import ConfigError, CorpusError

END = "<|endoftext|>"
SHARD_TOKENS = 1 << 26
TOGETHER = 512
"""Documents that are tokenised at once, on all cores."""


def train_tokenizer(articles: Iterable[Article], vocab: int, out: Path) -> Words:
    """Train byte-level BPE (arXiv 1508.07909) on documents and write its folder.

    Every text has tokens in it. Raises CorpusError for a folder that holds anything.
    """
    import tokenizers

    trained: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator((article.text for article in articles), trainer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    with _folder(out) as draft:
        trained.save(str(draft / FILE))
        (draft / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    return Words.of(out)


@dataclass(slots=True)
class _Writer:
    """Collects documents and writes a shard whenever there are enough tokens."""

    folder: Path
    dtype: Any
    masked: bool
    shards: list[Shard] = field(default_factory=list[Shard])
    _tokens: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    _hashes: list[int] = field(default_factory=list[int])
    _targets: list[NDArray[np.bool_]] = field(default_factory=list[NDArray[np.bool_]])
    _size: int = 0

    def add(self, tokens: NDArray[Any], text: str, targets: NDArray[np.bool_] | None) -> None:
        self._tokens.append(tokens.astype(self.dtype))
        self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))
        if self.masked:
            self._targets.append(np.ones(len(tokens), np.bool_) if targets is None else targets)
        self._size += len(tokens)
        if self._size >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        if not self._tokens:
            return
        name, tokens = f"{len(self.shards):05d}", np.concatenate(self._tokens)
        ends = np.cumsum([len(one) for one in self._tokens], dtype=np.int64)
        _array(self.folder / f"{name}.tokens", tokens)
        _array(self.folder / f"{name}.ends", ends)
        _array(self.folder / f"{name}.hashes", np.array(self._hashes, np.uint64))
        if self.masked:
            _array(self.folder / f"{name}.targets", np.concatenate(self._targets))
        digest = xxhash.xxh3_64_hexdigest(tokens.data.cast("B"))
        shard = Shard(name=name, tokens=len(tokens), documents=len(ends), xxh3=digest)
        self.shards.append(shard)
        self._tokens, self._hashes, self._targets, self._size = [], [], [], 0


def _array(path: Path, values: NDArray[Any]) -> None:
    values.astype(values.dtype.newbyteorder("<"), copy=False).tofile(path)


def prepare(
    articles: Iterable[Article],
    words: Words,
    out: Path,
    sources: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> PreparedManifest:
    """Tokenise documents into a new folder, each ended by the tokenizer's end-of-text token.

    Conversations are rendered by the tokenizer's chat template; only what assistants say are
    targets. Raises CorpusError for a folder that is there, or for no documents at all.
    """
    with _folder(out) as draft:
        wide = "uint16" if words.size <= np.iinfo(np.uint16).max + 1 else "uint32"
        chats, writer, documents, tokens = False, None, 0, 0
        for made, text, targets in _tokenised(articles, words):
            if writer is None:
                chats = targets is not None
                writer = _Writer(draft, DTYPES[wide], chats)
            if chats is not (targets is not None):
                msg = "Texts and conversations are prepared into a folder each: split the sources."
                raise CorpusError(msg, path="source")
            writer.add(made, text, targets)
            documents, tokens = documents + 1, tokens + len(made)
            if progress is not None:
                progress(documents, tokens)
        if writer is None:
            msg = f"The sources hold no document: {', '.join(sources) or 'name some'}."
            raise CorpusError(msg, path="source")
        writer.flush()
        manifest = PreparedManifest(
            format=1,
            tokenizer=words.digest,
            vocab=words.size,
            dtype=wide,
            masked=chats,
            tokens=tokens,
            documents=documents,
            shards=tuple(writer.shards),
            sources=tuple(sources),
        )
        for name in COMPANIONS:
            if (words.folder / name).is_file():
                shutil.copyfile(words.folder / name, draft / name)
        (draft / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return manifest


def _tokenised(
    articles: Iterable[Article], words: Words
) -> Iterator[tuple[NDArray[Any], str, NDArray[np.bool_] | None]]:
    """Yield each document's tokens, its text and, for a conversation, which tokens are targets."""
    if not words.end:
        msg = (
            f"The tokenizer of {words.folder} has no token that ends a text: name it as"
            f" eos_token in its {SETTINGS}."
        )
        raise ConfigError(msg, path="tokenizer")
    rest, end = iter(articles), np.array(words.end, np.uint32)
    template: ChatTemplate | None = None
    while some := list(islice(rest, TOGETHER)):
        texts = [article.text for article in some if not article.messages]
        encoded = iter(words.encode_batch(texts))
        for article in some:
            if not article.messages:
                yield np.array([*next(encoded), *words.end], np.uint32), article.text, None
                continue
            template = template or ChatTemplate.of(words.folder)
            parts = _turns(article, template)
            pieces = words.encode_batch([text for text, _ in parts], named=True)
            said = [np.full(len(p), wanted) for p, (_, wanted) in zip(pieces, parts, strict=True)]
            tokens = np.concatenate([*(np.array(p, np.uint32) for p in pieces), end])
            targets = np.concatenate([*said, np.array([True])])
            yield tokens, "".join(text for text, _ in parts), targets


def _turns(article: Article, template: ChatTemplate) -> list[tuple[str, bool]]:
    """Return a conversation's text in parts, each with whether an assistant says it.

    A template writes a conversation's beginning the same whatever follows: what a turn adds is what
    its text has beyond that of the turns before. Where a template does not, all of it are targets.
    """
    parts: list[tuple[str, bool]] = []
    before, messages = "", list(article.messages)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = template.render(messages[:number], answer=True)
        answered = template.render(messages[: number + 1], answer=False)
        if not (asked.startswith(before) and answered.startswith(asked)):
            return [(template.render(messages, answer=False), True)]
        parts += [(asked[len(before) :], False), (answered[len(asked) :], True)]
        before = answered
    if not parts:
        msg = "A conversation without an assistant's answer has nothing to learn: leave it out."
        raise CorpusError(msg, path="source")
    return parts


@contextmanager
def _folder(target: Path) -> Generator[Path]:
    """Yield a draft of a folder that appears when it is whole.

    Raises CorpusError for one that holds anything.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        msg = f"{target} is not empty: name a new folder."
        raise CorpusError(msg, path="out")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield draft
        draft.chmod(0o755)
        with suppress(FileNotFoundError):
            target.rmdir()
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
