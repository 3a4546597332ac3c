"""A continuation of a prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from skerry.errors import ConfigError, ModelError
from skerry_evaluator.restored import Restored


def to_tokens(restored: Restored, prompt: str) -> list[int]:
    """Read a prompt: text as UTF-8 bytes, or token numbers where the run was trained on tokens."""
    if restored.config.data.source != "tokens":
        return list(prompt.encode()) or [0]
    try:
        return [int(word) for word in prompt.split()] or [0]
    except ValueError as error:
        msg = "This run was trained on token shards: give the prompt as token numbers."
        raise ConfigError(msg, path="prompt") from error


def to_text(restored: Restored, tokens: Sequence[int]) -> str:
    """Return tokens as text, or as numbers where the run was trained on tokens."""
    if restored.config.data.source != "tokens":
        return bytes(tokens).decode(errors="replace")
    return " ".join(map(str, tokens))


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
