"""Text that a model writes: the continuation of a prompt, and a sample for people who watch a run.

The sample comes from one compiled loop over one short window, so that it costs less than the
evaluation that it goes with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from skerry.errors import ConfigError, ModelError
from skerry.protocol.messages import MOST_SAMPLE_BYTES
from skerry.settings.models import DataConfig, RunConfig
from skerry_evaluator.checkpoints import Restored

TEMPERATURE = 0.8
"""Of the samples that go with evaluations."""
NEWLINE = 0x0A
BYTES = 256


def to_tokens(data: DataConfig, prompt: str) -> list[int]:
    """Return a prompt's tokens: its UTF-8 bytes, or its numbers where a run trains on tokens."""
    if data.source != "tokens":
        return list(prompt.encode()) or [0]
    try:
        return [int(word) for word in prompt.split()] or [0]
    except ValueError as error:
        msg = "This run was trained on token shards: give the prompt as token numbers."
        raise ConfigError(msg, path="prompt") from error


def to_text(data: DataConfig, tokens: Sequence[int]) -> str:
    """Return tokens as numbers where a run trains on tokens, else as text.

    A token that is no byte, and bytes that are no UTF-8, become replacement characters.
    """
    if data.source == "tokens":
        return " ".join(map(str, tokens))
    return bytes(t if 0 <= t < BYTES else 0xFF for t in tokens).decode(errors="replace")


def clipped(text: str) -> str:
    """Return the part of a text that fits into MOST_SAMPLE_BYTES of UTF-8."""
    return text.encode()[:MOST_SAMPLE_BYTES].decode(errors="ignore")


def sample(
    restored: Restored, prompt: Sequence[int], *, count: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield ``count`` tokens after ``prompt``; temperature 0 takes the likeliest each time.

    The window is as long as training sequences were, so one compilation serves all positions.
    Raises ModelError if the model has no ``logits``.
    """
    choose = _chooser(restored, temperature)
    size = restored.config.data.seq_len
    key = jax.random.key(seed)
    text = list(prompt)
    for _ in range(count):
        seen = text[-size:]
        window = np.zeros((1, size), np.int32)
        window[0, : len(seen)] = seen
        key, one = jax.random.split(key)
        text.append(int(choose(restored.params, window, np.int32(len(seen) - 1), one)))
        yield text[-1]


def _chooser(restored: Restored, temperature: float) -> Callable[..., jax.Array]:
    logits = getattr(restored.model, "logits", None)
    if logits is None:
        msg = "This model has no logits(params, tokens), which sampling needs: add it."
        raise ModelError(msg, path="model.factory")

    def choose(params: Any, window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        scores = cast("jax.Array", logits(params, window))[0, last]
        if temperature <= 0:
            return jnp.argmax(scores)
        return jax.random.categorical(key, scores / temperature)

    return jax.jit(choose)


class SampleWriter:
    """Samples ``config.eval.sample_tokens`` tokens; compiled for the shapes of ``params``."""

    def __init__(self, logits: Callable[..., jax.Array], config: RunConfig, params: Any) -> None:
        self._data = config.data
        self._count = min(config.eval.sample_tokens, config.data.seq_len - 1)
        loop = jax.jit(_loop(logits, self._count))
        self._loop: Callable[..., Any] = loop.lower(params, self._start(), _key(0)).compile()

    def write(self, params: Any, seed: int) -> str:
        """Return text of at most MOST_SAMPLE_BYTES that the parameters write for this seed."""
        window = self._loop(params, self._start(), _key(seed))
        return clipped(to_text(self._data, [int(token) for token in np.asarray(window)[0, 1:]]))

    def _start(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return int32 [1, count + 1] that begins with a line break, where tokens are bytes."""
        window = np.zeros((1, self._count + 1), np.int32)
        window[0, 0] = 0 if self._data.source == "tokens" else NEWLINE
        return window


def _key(seed: int) -> jax.Array:
    return jax.random.key(seed % 2**31)


def _loop(logits: Callable[..., jax.Array], count: int) -> Callable[..., jax.Array]:
    def loop(params: Any, window: jax.Array, key: jax.Array) -> jax.Array:
        def body(at: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            seen, rest = state
            rest, one = jax.random.split(rest)
            scores = logits(params, seen)[0, at] / TEMPERATURE
            token = jax.random.categorical(one, scores).astype(jnp.int32)
            return seen.at[0, at + 1].set(token), rest

        written: jax.Array = jax.lax.fori_loop(0, count, body, (window, key))[0]
        return written

    return loop
