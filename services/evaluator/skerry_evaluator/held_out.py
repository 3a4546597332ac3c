"""The held-out loss of a model: equal for equal parameters and settings on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from skerry.data.corpus import Batch, Corpus
from skerry.data.prefetch import check_tokens


@dataclass(frozen=True, slots=True)
class Score:
    """``loss`` in nats per token; ``bits_per_byte`` only where a token is a byte."""

    loss: float
    perplexity: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Batches int32 [batch, seq_len + 1], and xxh3-64 over all of them."""

    rows: tuple[Batch, ...]
    digest: int
    of_bytes: bool

    @classmethod
    def of(cls, corpus: Corpus, batches: int, vocab: int | None) -> HeldOutText:
        """Return the batches of a corpus; CorpusError for a token beyond the model's ``vocab``."""
        rows = tuple(corpus.held_out_batches(corpus.config.batch, batches))
        digest = xxhash.xxh3_64()
        for row in rows:
            check_tokens(row, vocab)
            digest.update(row.astype("<i4", copy=False).data.cast("B"))
        return cls(rows, digest.intdigest(), corpus.config.source != "tokens")

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(row[:, 1:].size for row in self.rows)

    def score(self, losses: Sequence[float]) -> Score:
        """Return the score for the mean losses of all batches, one each."""
        loss = sum(losses) / len(losses)
        bits = loss / math.log(2) if self.of_bytes else None
        return Score(loss, perplexity=math.exp(min(loss, 700.0)), bits_per_byte=bits)
