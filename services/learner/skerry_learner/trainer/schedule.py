"""The learning rate as a function of progress, not of steps, so that a run may end by the clock."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from skerry.settings.models import TrainConfig


def progress(config: TrainConfig, step: int, elapsed_s: float) -> float:
    """Return how much of the run is done, in [0, 1]: by steps or by time, whichever is further."""
    by_time = elapsed_s / config.duration_s if config.duration_s else 0.0
    return min(1.0, max(0.0, step / config.steps, by_time))


def learning_rate(config: TrainConfig, done: jax.Array) -> jax.Array:
    """Return the rate at ``done`` in [0, 1] (traced f32 scalar): linear warm-up, then a cosine.

    The rate is never zero at the first step: warm-up starts at one hundredth of the peak.
    """
    rising = jnp.maximum(done / config.warmup, 0.01) if config.warmup else jnp.ones_like(done)
    falling = (done - config.warmup) / (1.0 - config.warmup)
    cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(falling, 0.0, 1.0)))
    share = config.lr_final + (1.0 - config.lr_final) * cosine
    return config.lr * jnp.where(done < config.warmup, rising, share)
