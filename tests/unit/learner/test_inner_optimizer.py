"""The inner optimizer that a run names takes the learner's steps, at the run's learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest
from optax import contrib  # pyright: ignore[reportMissingTypeStubs]

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.rates import learning_rate
from skerry.code import CodeRefused
from skerry.errors import ConfigError
from skerry.settings.models import ModelConfig, RunConfig, TrainConfig
from skerry_learner.trainer import optimizers
from skerry_learner.trainer.optimizers import make_optimizer, orthogonal
from skerry_learner.trainer.step import TrainState, make_step
from skerry_learner.work import planned

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
        batch = {"tokens": jnp.zeros((1, 2), jnp.int32)}
        state, result = step(state, batch, np.float32(0), np.float32(1))
        assert bool(result.finite)
    return [float(value) for value in state.params]


def test_an_optimizer_of_optax_steps_by_the_clipped_gradient_times_the_runs_rate() -> None:
    config = TrainConfig(warmup=0.0)
    rate = float(learning_rate(config, 0.0))
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


def test_muon_is_refused_for_a_model_without_matrices(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    run = RunConfig(
        model=ModelConfig(factory=f"{__name__}:Quadratic"), train=TrainConfig(inner="muon")
    )
    with pytest.raises(ConfigError, match=r"this model has none: set train\.inner=adamw"):
        planned(run)


def test_an_optimizer_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(CodeRefused, match="--set allow_code=tests"):
        make_optimizer(TrainConfig(inner=f"{__name__}:heavy_ball"))


LEAVES = (
    LeafSpec("embed", (40, 24), embedding=True),
    LeafSpec("experts", (3, 24, 16), unit=24 * 16),
    LeafSpec("gain", (24,)),
    LeafSpec("up", (24, 16)),
)
MUON = TrainConfig(inner="muon", weight_decay=0.0, clip=1e9)


def gradients(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(LEAVES))
    return {
        leaf.name: jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, LEAVES, strict=True)
    }


def first_updates(config: TrainConfig, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    optimizer, params = make_optimizer(config, LEAVES), gradients(1)

    def update(given: dict[str, jax.Array]) -> optax.Updates:
        return optimizer.update(given, optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):
        return dict(jax.jit(update)(given))


def test_muon_makes_the_singular_values_of_every_matrix_and_every_expert_alike() -> None:
    found = first_updates(MUON, gradients())
    for matrix in (found["up"], *found["experts"]):
        values = np.linalg.svd(np.array(matrix), compute_uv=False)
        assert values.min() / values.max() > 0.6
        assert np.sqrt(np.mean(np.square(matrix))) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 24, 16)])
def test_muons_iteration_is_that_of_optax(shape: tuple[int, ...]) -> None:
    given = jax.random.normal(jax.random.key(2), shape)
    axes = contrib.MuonDimensionNumbers(given.ndim - 1, given.ndim - 2)
    theirs = contrib.scale_by_muon(weight_dimension_numbers=axes)
    with jax.numpy_dtype_promotion("standard"):
        wanted = theirs.update(given, theirs.init(given))[0]
        found = orthogonal(given / jnp.linalg.norm(given, axis=(-2, -1), keepdims=True))
    np.testing.assert_allclose(found, 0.2 * 24**0.5 * np.array(wanted), rtol=1e-3, atol=1e-4)


def test_muons_iteration_is_traced_once_for_all_matrices_of_a_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced: list[tuple[int, ...]] = []

    def counted(matrices: jax.Array) -> jax.Array:
        traced.append(matrices.shape)
        return matrices

    monkeypatch.setattr(optimizers, "orthogonal", counted)
    leaves = [LeafSpec(f"{name}.{n}", (24, 16 + n % 2)) for name in "ab" for n in range(4)]
    params: Any = {leaf.name: jnp.ones(leaf.shape) for leaf in leaves}
    optimizer: Any = make_optimizer(MUON, leaves)
    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(optimizer.update, params, optimizer.init(params), params)
    assert sorted(traced) == [(24, 16), (24, 17)]


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 24, 16)])
def test_muon_is_that_of_optax_until_its_iteration(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "orthogonal", lambda matrices: matrices)
    axes = contrib.MuonDimensionNumbers(len(shape) - 1, len(shape) - 2)
    theirs = contrib.scale_by_muon(ns_steps=0, weight_dimension_numbers={"up": axes})
    ours = make_optimizer(MUON, [LeafSpec("up", shape, unit=24 * 16 * (len(shape) - 2))])
    params = {"up": jnp.zeros(shape)}
    wanted: list[Any] = [params, theirs.init(params)]
    found: list[Any] = [params, ours.init(params)]
    with jax.numpy_dtype_promotion("standard"):
        for seed in range(3):
            given = {"up": jax.random.normal(jax.random.key(seed), shape)}
            wanted[:] = theirs.update(given, wanted[1])
            found[:] = ours.update(given, found[1], params)
    np.testing.assert_allclose(found[0]["up"], wanted[0]["up"], rtol=1e-5)


def test_muon_leaves_embeddings_and_gains_to_adamw() -> None:
    muon, adam = (
        first_updates(MUON.model_copy(update={"inner": inner}), gradients())
        for inner in ("muon", "adamw")
    )
    for name in ("embed", "gain"):
        np.testing.assert_array_equal(muon[name], adam[name])
    assert np.abs(np.array(muon["up"] - adam["up"])).max() > 0.1


def test_one_expert_does_not_turn_the_update_of_another() -> None:
    given = gradients()
    other = {**given, "experts": given["experts"].at[2].multiply(7.0)}
    before, after = (first_updates(MUON, g)["experts"] for g in (given, other))
    np.testing.assert_allclose(before[:2], after[:2], rtol=0, atol=1e-6)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    def size(inner: str) -> int:
        config = MUON.model_copy(update={"inner": inner})
        kept = jax.eval_shape(make_optimizer(config, LEAVES).init, gradients())
        return sum(leaf.size for leaf in jax.tree.leaves(kept))

    matrices = sum(leaf.size for leaf in LEAVES if leaf.name in {"up", "experts"})
    assert size("adamw") - size("muon") == pytest.approx(matrices, abs=8)
