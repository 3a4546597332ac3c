"""A run's global model, its parameters set by fragment, and its loss on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, scatter
from skerry.data.corpus import Corpus, HostBatch, load_corpus, targets_in
from skerry.data.stream import check_readable, check_tokens
from skerry.errors import ModelError
from skerry.models.base import (
    Model,
    build_model,
    judged_loss,
    layout_of,
    mean_loss,
    specs_of,
    whole,
)
from skerry.models.mesh import frozen_leaves
from skerry.settings.models import RunConfig
from skerry_evaluator.sampling import SampleWriter

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Score:
    """``loss`` in nats per target; ``bits_per_byte`` is None if bytes per token are unknown."""

    loss: float
    perplexity: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class HeldOutText:
    """Batches of one shape, xxh3-64 over all of them, and bytes per target, 0 if unknown."""

    batches: tuple[HostBatch, ...]
    digest: int
    bytes_per_token: float

    @classmethod
    def of(cls, corpus: Corpus, batches: int, model: Model) -> HeldOutText:
        """Return the batches of a corpus; CorpusError for text that the model cannot judge."""
        check_readable(corpus, model)
        found = tuple(corpus.held_out_batches(corpus.config.batch, batches))
        digest = xxhash.xxh3_64()
        for batch in found:
            check_tokens(batch["tokens"], getattr(model, "vocab", None))
            for name in ("tokens", "weights"):
                if (array := batch.get(name)) is not None:
                    wide = array.dtype.newbyteorder("<")
                    digest.update(array.astype(wide, copy=False).data.cast("B"))
        return cls(found, digest.intdigest(), corpus.bytes_per_token)

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return sum(map(targets_in, self.batches))

    def score(self, judged: Sequence[tuple[Any, Any]]) -> Score:
        """Return the score of batches, each given by its mean loss and its total weight."""
        loss = mean_loss(judged)
        bits = loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None
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
        self.held_out = HeldOutText.of(load_corpus(config.data), config.eval.batches, model)
        # Ahead of time, so that no evaluation includes a compilation.
        loss = jax.jit(judged_loss(model))
        self._loss: Any = loss.lower(self._shapes(), self.held_out.batches[0]).compile()

    def set_fragment(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Set the parameters of a fragment: f32 [padded_size]."""
        scatter(self._plan.fragments[fragment], vector, self._leaves)

    def losses(
        self, vectors: Mapping[int, NDArray[np.float32]] | None = None
    ) -> Iterator[tuple[float, float]]:
        """Yield the mean loss of each batch, in nats per target, and what its targets weigh.

        Each takes a while. ``vectors`` are fragments to judge in the place of those that were set.
        """
        leaves = self._leaves
        if vectors is not None:
            leaves = [np.empty_like(leaf) for leaf in leaves]
            for fragment, vector in vectors.items():
                scatter(self._plan.fragments[fragment], vector, leaves)
        params = self._params(leaves)
        for batch in self.held_out.batches:
            loss, weight = self._loss(params, batch)
            yield float(loss), float(weight)

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
        return "" if self._writer is None else self._writer.write(self._params(self._leaves), seed)

    def _params(self, leaves: Sequence[NDArray[np.float32]]) -> Any:
        """Return parameters on the device, copied: ``set_fragment`` must not change them."""
        placed = [jax.device_put(leaf, may_alias=False) for leaf in leaves]
        return whole(self._layout.params(placed), self._frozen)

    def _shapes(self) -> Any:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self._leaves]
        return whole(self._layout.params(shapes), self._frozen)
