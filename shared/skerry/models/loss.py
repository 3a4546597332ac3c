"""The loss that a decoder is trained on: the nats of each next token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from skerry.models.arch import Arch
from skerry.models.base import Batch
from skerry.models.memory import LOGITS


def scores_of(arch: Arch, rows: jax.Array, head: jax.Array) -> jax.Array:
    """Return the vocabulary's scores, f32 [n, vocab].

    The head is cast here, so that its gradient is summed over chunks in f32.
    """
    table = head.astype(rows.dtype)
    across = (((1,), (1,)), ((), ()))
    scores = jax.lax.dot_general(rows, table, across, preferred_element_type=jnp.float32)
    cap = arch.logit_cap
    return scores if cap is None else jnp.tanh(scores / cap) * cap


def nats(
    arch: Arch,
    rows: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None,
) -> jax.Array:
    """Return the summed loss of rows [batch * seq, d], in chunks if they are many."""

    def summed(rows: jax.Array, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
        scores = scores_of(arch, rows, head)
        picked = jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
        nats = jax.nn.logsumexp(scores, axis=-1) - picked
        return jnp.sum(nats if weights is None else nats * weights)

    batch, seq = targets.shape
    chunks = min(seq, -(-targets.size * arch.vocab // LOGITS))
    if chunks <= 1:
        flat = None if weights is None else weights.reshape(-1)
        return summed(rows, targets.reshape(-1), flat)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    parts = (rows.reshape(batch, seq, -1), targets, weights)
    cut = [_chunked(part, chunks) for part in parts]
    body = jax.checkpoint(lambda total, part: (total + summed(*part), None))
    total, _ = jax.lax.scan(body, jnp.float32(0.0), tuple(cut))
    return jnp.asarray(total)


def _chunked(x: jax.Array, chunks: int) -> jax.Array:
    """Cut [batch, seq, ...] at positions, padded with zeros: [chunks, batch * size, ...]."""
    size = -(-x.shape[1] // chunks)
    wide = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    split = wide.reshape(x.shape[0], chunks, size, *x.shape[2:]).swapaxes(0, 1)
    return split.reshape(chunks, -1, *x.shape[2:])


def target_weights(batch: Batch) -> jax.Array | None:
    """Return the targets' weights f32 [batch, seq], or None if all count.

    Targets across a boundary between sequences of a row weigh 0.
    """
    weights, segments = batch.get("weights"), batch.get("segments")
    if segments is None:
        return weights
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inside.astype(jnp.float32) * (1.0 if weights is None else weights)
