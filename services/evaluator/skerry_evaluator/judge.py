"""A run's model, its held-out text, and the parameters to judge, handed over by fragment."""

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
from skerry_evaluator.evaluate import HeldOut, Score
from skerry_evaluator.writer import Writer

log = structlog.get_logger()


class Judge:
    """Every method blocks, and none may run beside another: call them in a thread, in turn.

    Parameters are held once in memory, and once more on the device while they are judged.
    """

    def __init__(self, config: RunConfig, plan: Plan) -> None:
        """Build the run's model, read its text, compile; ModelError or CorpusError if it cannot."""
        model = build_model(config.model, config.train)
        if specs_of(model) != plan.leaves:
            msg = "The run was created with other model code than this machine has: use the same."
            raise ModelError(msg, path="model.factory")
        self._plan = plan
        self._config = config
        self._logits: Any = getattr(model, "logits", None)
        self._unlearnt = config.eval.sample_tokens > 0
        self._writer: Writer | None = None
        self._leaves = [np.zeros(spec.shape, np.float32) for spec in plan.leaves]
        self._tree = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
        vocab: int | None = getattr(model, "vocab", None)
        self.held_out = HeldOut.of(load_corpus(config.data), config.eval.batches, vocab)
        self._loss = self._compiled(jax.jit(model.loss))

    def take(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a fragment of the parameters: f32 [padded_size]."""
        scatter(self._plan.fragments[fragment], vector, self._leaves)

    def losses(self) -> Iterator[float]:
        """Yield the mean loss of each held-out batch, in nats per token; each takes a while."""
        params = self._params()
        for row in self.held_out.rows:
            yield float(self._loss(params, row))

    def score(self, losses: list[float]) -> Score:
        """Return what the losses of all batches amount to."""
        return self.held_out.score(losses)

    def learn_to_write(self) -> None:
        """Compile what ``write`` needs, once; a model that cannot be sampled never writes."""
        wanted, self._unlearnt = self._unlearnt, False
        if not wanted or self._logits is None:
            return
        try:
            self._writer = Writer(self._logits, self._config, self._shapes())
        except Exception as error:  # noqa: BLE001 - a user's model may raise anything
            log.warning("model_not_sampled", cause=str(error)[:200], fix="see eval.sample_tokens")

    def write(self, seed: int) -> str:
        """Return what the parameters write; nothing before ``learn_to_write`` has found out how."""
        return "" if self._writer is None else self._writer.write(self._params(), seed)

    def _params(self) -> Any:
        """Return the parameters on the device, copied: it must not see what is taken in next."""
        leaves = [jax.device_put(leaf, may_alias=False) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def _shapes(self) -> Any:
        shapes = [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, shapes)

    def _compiled(self, loss: Any) -> Any:
        """Compile ahead of time, so that an evaluation costs what it costs and no more."""
        row = self.held_out.rows[0]
        tokens = jax.ShapeDtypeStruct(row.shape, row.dtype)
        return loss.lower(self._shapes(), tokens).compile()
