"""A run's global model, its parameters set by fragment, and its loss on held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, scatter
from skerry.data.corpus import load_corpus
from skerry.errors import ModelError
from skerry.models.base import specs_of
from skerry.models.factory import build_model
from skerry.settings.models import RunConfig
from skerry_evaluator.held_out import HeldOutText
from skerry_evaluator.sampling import SampleWriter

log = structlog.get_logger()


class GlobalModel:
    """Call the methods in a thread, one after another: each of them blocks.

    Parameters are held once in memory, and once more on the device during an evaluation.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        """Build the run's model, read its text and compile; raises ModelError or CorpusError."""
        model = build_model(config.model, config.train)
        if specs_of(model) != plan.leaves:
            msg = "The run was created with other model code than this machine has: use the same."
            raise ModelError(msg, path="model.factory")
        self._plan = plan
        self._config = config
        self._logits: Any = getattr(model, "logits", None)
        self._writes = config.eval.sample_tokens > 0
        self._writer: SampleWriter | None = None
        self._leaves = [np.zeros(spec.shape, np.float32) for spec in plan.leaves]
        self._tree = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
        vocab: int | None = getattr(model, "vocab", None)
        self.held_out = HeldOutText.of(load_corpus(config.data), config.eval.batches, vocab)
        self._loss = self._compiled(jax.jit(model.loss))

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
        if not wanted or self._logits is None:
            return
        try:
            self._writer = SampleWriter(self._logits, self._config, self._shapes())
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            log.warning("model_not_sampled", cause=str(error)[:200], fix="see eval.sample_tokens")

    def write(self, seed: int) -> str:
        """Return what the parameters write; empty before ``compile_writer``."""
        return "" if self._writer is None else self._writer.write(self._params(), seed)

    def _params(self) -> Any:
        """Return the parameters on the device, copied: ``set_fragment`` must not change them."""
        leaves = [jax.device_put(leaf, may_alias=False) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def _shapes(self) -> Any:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, shapes)

    def _compiled(self, loss: Any) -> Any:
        """Compile ahead of time, so that no evaluation includes a compilation."""
        row = self.held_out.rows[0]
        tokens = jax.ShapeDtypeStruct(row.shape, row.dtype)
        return loss.lower(self._shapes(), tokens).compile()
