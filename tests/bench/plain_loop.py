"""The training loop that anybody would write by hand with JAX and optax, for the same model.

It has no log, no fragments, no guard against steps that are not finite and no telemetry, and its
batches lie on the device before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts

from skerry.models.base import Model, batch_loss
from skerry.settings.models import TrainConfig


class PlainLoop:
    """AdamW with a warm-up and a cosine over a model's own loss, its state donated."""

    def __init__(self, model: Model, train: TrainConfig, batches: Sequence[Any]) -> None:
        rate = optax.warmup_cosine_decay_schedule(
            train.lr / 100, train.lr, int(train.warmup * train.steps) + 1, train.steps
        )
        optimizer = optax.chain(
            optax.clip_by_global_norm(train.clip),
            optax.adamw(rate, b1=train.b1, b2=train.b2, weight_decay=train.weight_decay),
        )
        loss = batch_loss(model)

        def step(params: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            value = jax.value_and_grad(loss, has_aux=True)
            (mean, _), gradients = value(params, {"tokens": tokens})
            with jax.numpy_dtype_promotion("standard"):
                updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, mean

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._params: Any = jax.jit(model.init)(jax.random.key(train.seed))
        self._moments: Any = jax.jit(optimizer.init)(self._params)
        self._batches = [jax.device_put(batch) for batch in batches]
        self._taken = 0
        self._loss: Any = 0.0

    def step(self) -> None:
        """Dispatch one step, and read the loss of the one before, as a log line would."""
        before = self._loss
        tokens = self._batches[self._taken % len(self._batches)]
        self._params, self._moments, self._loss = self._step(self._params, self._moments, tokens)
        self._taken += 1
        float(before)

    def wait(self) -> None:
        """Return once every step has been computed."""
        jax.block_until_ready(self._params)
