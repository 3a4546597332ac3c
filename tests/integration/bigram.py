"""A model of a user's own, as small as they get: what follows a byte depends on that byte only."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

BYTES = 256


@dataclass(frozen=True)
class Bigram:
    """An embedding and a projection; ``vocab`` and ``logits`` are optional, for checks and text."""

    width: int
    vocab: int = BYTES

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        table = 0.1 * jax.random.normal(key, (BYTES, self.width))
        return {"embed": table, "next": jnp.zeros((self.width, BYTES))}

    def logits(self, params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        return params["embed"][tokens] @ params["next"]

    def loss(self, params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        told = jax.nn.log_softmax(self.logits(params, tokens[:, :-1]))
        return -jnp.take_along_axis(told, tokens[:, 1:, None], axis=-1).mean()


def build(width: int = 16) -> Bigram:
    """Return the model: ``[model] factory = "bigram:build"``, with ``options = { width = 32 }``."""
    return Bigram(width)
