"""The held-out loss of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from skerry_learner.data.corpus import Corpus
from skerry_learner.judging.restored import Restored


@dataclass(frozen=True, slots=True)
class Verdict:
    """``loss`` in nats per token; ``bits_per_byte`` only where a token is a byte."""

    checkpoint: str
    step: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    evaluated_tokens: int


def evaluate(restored: Restored, corpus: Corpus, *, batches: int) -> Verdict:
    """Judge a checkpoint on held-out text, the same text for equal data settings."""
    data = restored.config.data
    loss = jax.jit(restored.model.loss)
    rows = list(corpus.held_out_batches(data.batch, batches))
    mean = sum(float(loss(restored.params, row)) for row in rows) / len(rows)
    return Verdict(
        checkpoint=str(restored.path),
        step=restored.step,
        tokens=restored.tokens,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        bits_per_byte=None if data.source == "tokens" else mean / math.log(2),
        evaluated_tokens=sum(row[:, 1:].size for row in rows),
    )
