"""A Hugging Face tokenizer in a folder: text to token ids and back."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from skerry.data.chat import end_of
from skerry.errors import ConfigError, CorpusError
from skerry.folders import writing
from skerry.settings.checks import TOKENIZER, refuse_tokenizer, tokenizer_digest

FILE, SETTINGS = TOKENIZER, "tokenizer_config.json"
COMPANIONS = (
    *(FILE, SETTINGS, "special_tokens_map.json", "chat_template.jinja"),
    "generation_config.json",
)
END = "<|endoftext|>"
PART = 1 << 18
"""Most characters that are read as one text: each takes about 150 bytes while it is tokenised."""
ESCAPED = re.compile("\ufdd0([0-9]+)\ufdd1")
"""Matches what replaces the name of a special token inside a message: the token's number."""


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer; ``end`` holds the id of the token that ends a document, or nothing.

    ``plain`` is its size without tokens that were added to it. A model's embedding may lack those,
    as text need not hold them: Gemma 3's tokenizer has one for images beyond the embedding.
    """

    folder: Path
    size: int
    plain: int
    end: tuple[int, ...]
    _made: Any
    _names: re.Pattern[str] = re.compile("(?!)")

    @classmethod
    def of(cls, folder: Path, vocab: int | None = None, digest: str = "") -> Words:
        """Open a folder's tokenizer.

        Raises ConfigError for one that does not fit a model's ``vocab``, and as
        ``refuse_tokenizer`` does.
        """
        import tokenizers

        file = folder / FILE
        try:
            made: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # it raises nothing narrower
            msg = f"{file} cannot be read as a tokenizer ({error}): name the folder that has one."
            raise ConfigError(msg, path="tokenizer") from error
        refuse_tokenizer(folder, digest)
        made.no_truncation()  # a tokenizer is often saved with truncation after a training
        made.no_padding()
        size, plain = (made.get_vocab_size(with_added_tokens=added) for added in (True, False))
        if vocab is not None and plain > vocab:
            msg = f"The tokenizer of {folder} has {plain} tokens, the model {vocab}: name its own."
            raise ConfigError(msg, path="tokenizer")
        end = made.token_to_id(end_of(folder))
        known = made.get_added_tokens_decoder().values()
        names = (re.escape(token.content) for token in known if token.special)
        pattern = "|".join(sorted(names, key=len, reverse=True)) or "(?!)"
        return cls(folder, size, plain, () if end is None else (end,), made, re.compile(pattern))

    @property
    def digest(self) -> str:
        """A hash of the tokenizer's file, 32 hexadecimal digits."""
        return tokenizer_digest(self.folder)

    @property
    def files(self) -> list[Path]:
        """The files of the folder that go with its tokens."""
        return [path for name in COMPANIONS if (path := self.folder / name).is_file()]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return a text's tokens; ``special``: with those that the tokenizer adds to every text."""
        ids: list[int] = self._made.encode(text, add_special_tokens=special).ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, named: bool = False) -> list[list[int]]:
        """Return the tokens of several texts, made on all cores, without added special tokens.

        ``named`` reads names of special tokens as these tokens. Leave it off for text of a corpus:
        its author could end documents, or speak for others.
        """
        self._made.encode_special_tokens = not named
        try:
            found = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        finally:
            self._made.encode_special_tokens = False
        return [one.ids for one in found]

    def special_in(self, text: str) -> tuple[int, ...]:
        """Return the special token that a text begins with, or nothing."""
        found = self._names.match(text)
        return () if found is None else (self._made.token_to_id(found[0]),)

    def escaped(self, text: str) -> str:
        """Return a message whose special tokens' names a template renders as plain text.

        ``encode_rendered`` and ``unescaped`` undo it. A message's own U+FDD0 becomes U+FFFD.
        """
        plain = text.replace("\ufdd0", "\ufffd")
        return self._names.sub(lambda it: f"\ufdd0{self._made.token_to_id(it[0])}\ufdd1", plain)

    def unescaped(self, rendered: str) -> str:
        """Return rendered text with each message as it was before it was ``escaped``."""
        return ESCAPED.sub(lambda it: self._made.id_to_token(int(it[1])), rendered)

    def encode_rendered(self, rendered: str) -> list[int]:
        """Return the tokens of a template's output.

        Names of special tokens are special if the template wrote them, and text in a message.
        """
        parts = ESCAPED.split(rendered)
        special = self.encode_batch(parts[::2], named=True)
        plain = self.encode_batch([self._made.id_to_token(int(part)) for part in parts[1::2]])
        pairs = zip_longest(special, plain, fillvalue=list[int]())
        return [token for pair in pairs for ids in pair for token in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._made.decode(list(tokens))
        return text


def parts_of(text: str) -> Iterator[str]:
    """Yield a text in parts of at most PART characters, cut after a line or before a space."""
    at = 0
    while len(text) - at > PART:
        most = at + PART
        end = text.rfind("\n", at, most) + 1 or max(0, text.rfind(" ", at + 1, most)) or most
        yield text[at:end]
        at = end
    yield text[at:]


def train_tokenizer(texts: Iterable[str], vocab: int, out: Path) -> Words:
    """Train byte-level BPE (arXiv 1508.07909) on texts and write its folder.

    Every text then has tokens. Raises ConfigError for a folder that is not empty or cannot be
    written, before it trains, and for texts that are all empty.
    """
    filled = filter(None, chain.from_iterable(map(parts_of, texts)))
    if (first := next(filled, None)) is None:
        msg = "The sources hold no text: name files with some."
        raise CorpusError(msg, path="source")
    with writing(out) as draft:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (draft / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        (draft / FILE).write_text(_trained(chain([first], filled), vocab), encoding="utf-8")
    return Words.of(out)


def _trained(texts: Iterable[str], vocab: int) -> str:
    """Return what a tokenizer's file holds."""
    import tokenizers

    trained: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer: Any = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),
    )
    trained.train_from_iterator(texts, trainer)
    text: str = trained.to_str(pretty=True)
    return text
