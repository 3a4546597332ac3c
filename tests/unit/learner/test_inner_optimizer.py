"""The inner optimizer that a run names takes the learner's steps, at the run's learning rate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest

from skerry.code import CodeRefused
from skerry.errors import ConfigError
from skerry.settings.models import TrainConfig
from skerry_learner.trainer.step import TrainState, learning_rate, make_optimizer, make_step

TARGET = jnp.array([3.0, -4.0])


class Quadratic:
    """A model whose gradient is known: the distance to TARGET."""

    def init(self, key: jax.Array) -> jax.Array:
        del key
        return jnp.zeros(2)

    def loss(self, params: jax.Array, tokens: jax.Array) -> jax.Array:
        del tokens
        return jnp.sum(jnp.square(params - TARGET)) / 2


def heavy_ball(learning_rate: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=0.5)


def not_an_optimizer(**_: float) -> str:
    return "no"


def stepped(inner: str, steps: int) -> list[float]:
    config = TrainConfig(inner=inner, warmup=0.0, clip=1.0)
    step, params = make_step(Quadratic(), config), jnp.zeros(2)
    state = TrainState(params, make_optimizer(config).init(params))
    for _ in range(steps):
        state, result = step(state, jnp.zeros((1, 2), jnp.int32), np.float32(0), np.float32(1))
        assert bool(result.finite)
    return [float(value) for value in state.params]


def test_an_optimizer_of_optax_steps_by_the_clipped_gradient_times_the_runs_rate() -> None:
    config = TrainConfig(warmup=0.0)
    rate = float(learning_rate(config, jnp.float32(0)))
    assert rate == pytest.approx(config.lr)
    assert stepped("optax:sgd", 1) == pytest.approx([rate * 0.6, -rate * 0.8])


def test_an_optimizer_of_ones_own_keeps_its_state(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    plain, heavy = stepped("optax:sgd", 2), stepped(f"{__name__}:heavy_ball", 2)
    assert heavy == pytest.approx([1.25 * value for value in plain], rel=1e-5)


def test_what_is_no_optimizer_is_a_config_error(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    with pytest.raises(ConfigError, match="not an optax transformation") as caught:
        make_optimizer(TrainConfig(inner=f"{__name__}:not_an_optimizer"))
    assert caught.value.path == "train.inner"


def test_an_optimizer_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(CodeRefused, match="--set allow_code=tests"):
        make_optimizer(TrainConfig(inner=f"{__name__}:heavy_ball"))
