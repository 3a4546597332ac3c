"""A run's global model, its parameters set by fragment, and its loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, scatter
from skerry.data.corpus import Batch, Corpus, load_corpus
from skerry.data.stream import check_tokens
from skerry.errors import ModelError
from skerry.models.base import build_model, layout_of, specs_of, token_loss, whole
from skerry.models.mesh import frozen_leaves
from skerry.settings.models import RunConfig
from skerry_evaluator.sampling import TOKENS, SampleWriter

log = structlog.get_logger()


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
        return cls(rows, digest.intdigest(), corpus.config.source not in TOKENS)

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(row[:, 1:].size for row in self.rows)

    def score(self, losses: Sequence[float]) -> Score:
        """Return the score for the mean losses of all batches, one each."""
        loss = sum(losses) / len(losses)
        bits = loss / math.log(2) if self.of_bytes else None
        return Score(loss, perplexity=math.exp(min(loss, 700.0)), bits_per_byte=bits)


class GlobalModel:
    """Call the methods in a thread, one after another: each of them blocks.

    Parameters are held once in memory, and once more on the device during an evaluation.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        """Build the run's model, read its text and compile; raises ModelError or CorpusError."""
        model = build_model(config.model, config.train)
        if specs_of(model) != plan.specs:
            msg = "The run was created with other model code than this machine has: use the same."
            raise ModelError(msg, path="model.factory")
        self._plan = plan
        self._config = config
        self._model = model
        self._writes = config.eval.sample_tokens > 0 and hasattr(model, "logits")
        self._writer: SampleWriter | None = None
        self._leaves = [np.zeros(spec.shape, np.float32) for spec in plan.leaves]
        self._layout, self._frozen = layout_of(model), frozen_leaves(model)
        vocab: int | None = getattr(model, "vocab", None)
        self.held_out = HeldOutText.of(load_corpus(config.data), config.eval.batches, vocab)
        # Ahead of time, so that no evaluation includes a compilation.
        row = self.held_out.rows[0]
        tokens, loss = jax.ShapeDtypeStruct(row.shape, row.dtype), jax.jit(token_loss(model))
        self._loss: Any = loss.lower(self._shapes(), tokens).compile()

    def set_fragment(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Set the parameters of a fragment: f32 [padded_size]."""
        scatter(self._plan.fragments[fragment], vector, self._leaves)

    def losses(self) -> Iterator[float]:
        """Yield the mean loss of each held-out batch, in nats per token; each takes a while."""
        params = self._params()
        for row in self.held_out.rows:
            yield float(self._loss(params, row))

    def compile_writer(self) -> None:
        """Compile what ``write`` needs, once; a model that cannot be sampled writes nothing."""
        wanted, self._writes = self._writes, False
        if not wanted:
            return
        try:
            self._writer = SampleWriter(self._model, self._config, self._shapes())
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            log.warning("model_not_sampled", cause=str(error)[:200], fix="see eval.sample_tokens")

    def write(self, seed: int) -> str:
        """Return what the parameters write; empty before ``compile_writer``."""
        return "" if self._writer is None else self._writer.write(self._params(), seed)

    def _params(self) -> Any:
        """Return the parameters on the device, copied: ``set_fragment`` must not change them."""
        leaves = [jax.device_put(leaf, may_alias=False) for leaf in self._leaves]
        return whole(self._layout.params(leaves), self._frozen)

    def _shapes(self) -> Any:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self._leaves]
        return whole(self._layout.params(shapes), self._frozen)
