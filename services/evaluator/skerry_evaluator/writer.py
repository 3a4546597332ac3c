"""What a model writes of its own accord: a few lines for people who watch a run.

All tokens come from one compiled loop over one short window, so that a sample costs less than the
evaluation it goes with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skerry.protocol.messages import MOST_SAMPLE_BYTES
from skerry.settings.models import RunConfig

TEMPERATURE = 0.8
NEWLINE = 0x0A
BYTES = 256


class Writer:
    """Samples ``config.eval.sample_tokens`` tokens; compiled for the shapes of ``params``."""

    def __init__(self, logits: Callable[..., jax.Array], config: RunConfig, params: Any) -> None:
        self._of_bytes = config.data.source != "tokens"
        self._count = min(config.eval.sample_tokens, config.data.seq_len - 1)
        loop = jax.jit(_loop(logits, self._count))
        self._loop: Callable[..., Any] = loop.lower(params, self._start(), _key(0)).compile()

    def write(self, params: Any, seed: int) -> str:
        """Return what the parameters write, at most MOST_SAMPLE_BYTES; the same for one seed."""
        window = self._loop(params, self._start(), _key(seed))
        tokens = [int(token) for token in np.asarray(window)[0, 1:]]
        return clipped(text_of(tokens) if self._of_bytes else " ".join(map(str, tokens)))

    def _start(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return int32 [1, count + 1] that begins with a line break, where tokens are bytes."""
        window = np.zeros((1, self._count + 1), np.int32)
        window[0, 0] = NEWLINE if self._of_bytes else 0
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


def text_of(tokens: list[int]) -> str:
    """Return bytes as text; what is no byte, or no UTF-8, as a replacement character."""
    return bytes(token if 0 <= token < BYTES else 0xFF for token in tokens).decode(errors="replace")


def clipped(text: str) -> str:
    """Return as much of a text as MOST_SAMPLE_BYTES of UTF-8 hold."""
    return text.encode()[:MOST_SAMPLE_BYTES].decode(errors="ignore")
