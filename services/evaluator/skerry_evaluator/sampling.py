"""Text that a model writes: after a prompt, or as a sample for people who watch a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skerry.data.source import prepared_folders
from skerry.data.tokenizer import FILE, Words
from skerry.errors import ConfigError, CorpusError, ModelError
from skerry.protocol.messages import MOST_SAMPLE_BYTES
from skerry.settings.models import DataConfig, RunConfig

TEMPERATURE = 0.8
"""Temperature of the samples that go with evaluations."""
NEWLINE = 0x0A
BYTES = 256
MOST_VOCAB = 2**31
"""A model takes tokens as int32."""


def words_of(data: DataConfig) -> Words | None:
    """Return the tokenizer of a run's text; None where there is none here."""
    folder = Path(data.tokenizer_folder).expanduser() if data.tokenizer_folder else None
    if folder is None and data.source == "prepared":
        with suppress(CorpusError):
            folder = prepared_folders(data.paths)[0]
    if folder is None or not (folder / FILE).is_file():
        return None
    return Words.of(folder, digest=data.tokenizer)


def to_tokens(data: DataConfig, prompt: str, vocab: int | None) -> list[int]:
    """Return a prompt's tokens: its UTF-8 bytes, or its numbers where a run trains on tokens."""
    if data.of_bytes:
        return list(prompt.encode()) or [0]
    try:
        tokens = [int(word) for word in prompt.split()] or [0]
    except ValueError as error:
        msg = (
            "This run was trained on tokens: name their tokenizer with --tokenizer, or give the"
            " prompt as token numbers."
        )
        raise ConfigError(msg, path="prompt") from error
    most = (vocab or MOST_VOCAB) - 1
    if min(tokens) < 0 or max(tokens) > most:
        msg = f"The prompt has a token that the model does not: its tokens are 0 to {most}."
        raise ConfigError(msg, path="prompt")
    return tokens


def to_text(data: DataConfig, tokens: Sequence[int]) -> str:
    """Return tokens as numbers where a run trains on tokens, else as text.

    A token that is no byte, and bytes that are no UTF-8, become replacement characters.
    """
    if not data.of_bytes:
        return " ".join(map(str, tokens))
    return bytes(t if 0 <= t < BYTES else 0xFF for t in tokens).decode(errors="replace")


class Sampler:
    """Continues tokens; compiled once for a window of ``size`` tokens, which slides.

    Temperature 0 takes the likeliest token each time. Raises ModelError if the model has no
    ``logits``.
    """

    def __init__(self, model: object, size: int, temperature: float) -> None:
        logits: Any = getattr(model, "logits", None)
        if logits is None:
            msg = "This model has no logits(params, tokens), which sampling needs: add it."
            raise ModelError(msg, path="model.factory")

        def choose(params: Any, window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
            scores = logits(params, window)[0, last]
            if temperature <= 0:
                return jnp.argmax(scores)
            return jax.random.categorical(key, scores / temperature)

        self._size = size
        self._choose: Any = jax.jit(choose)

    def compile(self, params: Any) -> None:
        """Compile for these parameters, or their shapes, before the first token is wanted."""
        window, key = np.zeros((1, self._size), np.int32), jax.random.key(0)
        self._choose = self._choose.lower(params, window, np.int32(0), key).compile()

    def tokens(self, params: Any, prompt: Sequence[int], count: int, seed: int) -> Iterator[int]:
        """Yield ``count`` tokens after ``prompt``."""
        key = jax.random.key(seed % 2**31)
        text = list(prompt)
        for _ in range(count):
            seen = text[-self._size :]
            window = np.zeros((1, self._size), np.int32)
            window[0, : len(seen)] = seen
            key, one = jax.random.split(key)
            text.append(int(self._choose(params, window, np.int32(len(seen) - 1), one)))
            yield text[-1]


class SampleWriter:
    """Writes ``eval.sample_tokens`` tokens after a line break, in a window of just that size."""

    def __init__(self, model: object, config: RunConfig, params: Any) -> None:
        """``params`` are those that ``write`` will get, or their shapes."""
        self._data = config.data
        self._words = words_of(config.data)
        self._count = min(config.eval.sample_tokens, config.data.seq_len - 1)
        self._sampler = Sampler(model, self._count, TEMPERATURE)
        self._sampler.compile(params)

    def write(self, params: Any, seed: int) -> str:
        """Return text of at most MOST_SAMPLE_BYTES, cut between two characters."""
        start = [NEWLINE if self._data.of_bytes else 0]
        tokens = list(self._sampler.tokens(params, start, self._count, seed))
        words = self._words
        text = (to_text(self._data, tokens) if words is None else words.decode(tokens)).encode()
        return text[:MOST_SAMPLE_BYTES].decode(errors="ignore")
