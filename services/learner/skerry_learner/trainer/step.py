"""One optimizer step under ``jax.jit``, with its state donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts

from skerry.algorithm.outer import optax_named
from skerry.algorithm.presets import INNERS
from skerry.models.base import Model, Params, batch_loss
from skerry.settings.models import TrainConfig


class TrainState(NamedTuple):
    """What one step turns into the next: f32 parameters and the inner optimizer's state."""

    params: Params
    optimizer: Any


class StepResult(NamedTuple):
    """f32 scalars of one step; ``finite`` is false when the update was skipped."""

    loss: jax.Array
    grad_norm: jax.Array
    finite: jax.Array


StepFunction: TypeAlias = Callable[
    [TrainState, jax.Array, np.float32, np.float32], tuple[TrainState, StepResult]
]


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Return the inner optimizer without its learning rate.

    AdamW (arXiv 1711.05101), with decay on matrices only; ``gradient`` passes gradients through.
    Any other is made with a learning rate of 1, so that the run's schedule scales its updates.
    """
    if config.inner == "gradient":
        return optax.identity()
    if config.inner not in INNERS:
        named = optax_named(config.inner, "train.inner", {"learning_rate": 1.0})
        return optax.chain(optax.clip_by_global_norm(config.clip), named, optax.scale(-1.0))

    def matrices(params: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b1=config.b1, b2=config.b2),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
    )


def learning_rate(config: TrainConfig, done: jax.Array) -> jax.Array:
    """Return the rate at ``done`` in [0, 1] (traced f32 scalar): linear warm-up, then a cosine.

    The rate is never zero at the first step: warm-up starts at one hundredth of the peak.
    """
    rising = jnp.maximum(done / config.warmup, 0.01) if config.warmup else jnp.ones_like(done)
    falling = (done - config.warmup) / (1.0 - config.warmup)
    cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(falling, 0.0, 1.0)))
    share = config.lr_final + (1.0 - config.lr_final) * cosine
    return config.lr * jnp.where(done < config.warmup, rising, share)


def make_step(model: Model, config: TrainConfig) -> StepFunction:
    """Return the jitted ``(state, tokens i32 [batch, seq + 1], done, share) -> (state, result)``.

    ``done`` (f32) is the progress of the run, ``share`` (f32) a factor on the learning rate. A step
    whose loss or gradient is not finite leaves the state as it was and says so. Where the inner
    loop gives bare gradients neither matters: the step subtracts the mean gradient itself, so that
    anchor - local is that gradient, up to half a unit in the last place of the parameters.
    """
    optimizer, mean = make_optimizer(config), batch_loss(model)
    bare = config.inner == "gradient"

    def step(
        state: TrainState, tokens: jax.Array, done: jax.Array, share: jax.Array
    ) -> tuple[TrainState, StepResult]:
        batch = {"tokens": tokens}
        (loss, _), gradients = jax.value_and_grad(mean, has_aux=True)(state.params, batch)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)))
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes in its int32 step count
            updates, moments = optimizer.update(gradients, state.optimizer, state.params)
        rate = jnp.ones_like(share) if bare else share * learning_rate(config, done)
        params = jax.tree.map(lambda leaf, update: leaf - rate * update, state.params, updates)
        new = TrainState(params, moments)
        kept = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
        return kept, StepResult(loss, norm, finite)

    return jax.jit(step, donate_argnums=0)
