"""The held-out loss of a model, the same for equal parameters and settings wherever it is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import xxhash

from skerry.data.corpus import Batch, Corpus
from skerry.data.prefetch import check_tokens
from skerry_evaluator.restored import Restored


@dataclass(frozen=True, slots=True)
class Score:
    """``loss`` in nats per token; ``bits_per_byte`` only where a token is a byte."""

    loss: float
    perplexity: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a model is judged by: int32 [batch, seq_len + 1] each, and xxh3-64 over all of them."""

    rows: tuple[Batch, ...]
    digest: int
    of_bytes: bool

    @classmethod
    def of(cls, corpus: Corpus, batches: int, vocab: int | None) -> HeldOut:
        """Pick the batches; CorpusError for a token that a model of ``vocab`` tokens lacks."""
        rows = tuple(corpus.held_out_batches(corpus.config.batch, batches))
        digest = xxhash.xxh3_64()
        for row in rows:
            check_tokens(row, vocab)
            digest.update(row.astype("<i4", copy=False).data.cast("B"))
        return cls(rows, digest.intdigest(), corpus.config.source != "tokens")

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return sum(row[:, 1:].size for row in self.rows)

    def score(self, losses: Sequence[float]) -> Score:
        """Return what the mean losses of the batches, one each, amount to."""
        loss = sum(losses) / len(losses)
        return Score(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            bits_per_byte=loss / math.log(2) if self.of_bytes else None,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checkpoint's score; ``text`` is the digest of the text that it was judged by."""

    checkpoint: str
    step: int
    tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float | None
    evaluated_tokens: int
    text: str


def evaluate(restored: Restored, corpus: Corpus, *, batches: int | None = None) -> Verdict:
    """Judge a checkpoint on held-out text; ``batches`` None: as many as its run's evaluator."""
    wanted = restored.config.eval.batches if batches is None else batches
    held_out = HeldOut.of(corpus, wanted, getattr(restored.model, "vocab", None))
    loss = jax.jit(restored.model.loss)
    score = held_out.score([float(loss(restored.params, row)) for row in held_out.rows])
    return Verdict(
        checkpoint=str(restored.path),
        step=restored.step,
        tokens=restored.tokens,
        loss=score.loss,
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
        evaluated_tokens=held_out.tokens,
        text=f"{held_out.digest:016x}",
    )
