"""One step: batches taken in parts, and what a step that is not finite costs."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.models.base import Aux, Batch, Model, Params, build_model
from skerry.settings.models import ModelConfig, TrainConfig
from skerry_learner.trainer.step import StepResult, TrainState, make_step, optimizer_of

SMALL = ModelConfig(layers=2, d_model=32, heads=2, kv_heads=1, d_ff=40, vocab=64)
NOW = np.float32(0.5), np.float32(1)


class Routed:
    """A model with weights for its targets and two experts; its loss is a mean over targets."""

    takes_batch = True

    def init(self, key: jax.Array) -> Params:
        one, other = jax.random.split(key)
        return {"table": jax.random.normal(one, (8, 4)), "head": jax.random.normal(other, (4, 8))}

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
        tokens, weights = batch["tokens"], batch["weights"]
        scores = jax.nn.log_softmax(params["table"][tokens[:, :-1]] @ params["head"])
        picked = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
        count = jnp.sum(weights)
        odd = jnp.sum(tokens[:, :-1] % 2).astype(jnp.float32)
        routed = jnp.stack([odd, jnp.float32(tokens[:, 1:].size) - odd])
        mean = -jnp.sum(weights * picked) / jnp.maximum(count, 1e-9)
        return mean, Aux(count, MappingProxyType({"table": routed}))


def batch_of(seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    weights = (draw.random((6, 7)) < np.arange(6)[:, None] / 5).astype(np.float32)
    return {"tokens": draw.integers(0, 8, (6, 8), np.int32), "weights": weights}


def stepped(model: Model, batch: Batch, **settings: object) -> tuple[TrainState, StepResult]:
    config = TrainConfig.model_validate({"lr": 0.1, "warmup": 0.0, **settings})
    params = jax.jit(model.init)(jax.random.key(0))
    state = TrainState(params, optimizer_of(model, config).init(params))
    return make_step(model, config)(state, batch, *NOW)


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_a_batch_in_parts_makes_the_step_of_the_whole_batch(parts: int) -> None:
    """The rows have from no to seven targets that count: a mean of means would differ."""
    (whole, one), (in_parts, other) = (
        stepped(Routed(), batch_of(), accumulate=n) for n in (1, parts)
    )
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(in_parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for value, same in zip(one[:4], other[:4], strict=True):
        assert float(value) == pytest.approx(float(same), rel=1e-5)
    np.testing.assert_array_equal(one.expert_tokens["table"], other.expert_tokens["table"])


def test_a_batch_in_parts_whose_targets_weigh_little_is_the_mean_over_them_too() -> None:
    batch = batch_of()
    light = {**batch, "weights": np.float32(1e-3) * batch["weights"]}
    losses = [float(stepped(Routed(), light, accumulate=n)[1].loss) for n in (1, 3)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_step_says_how_many_tokens_each_expert_saw_and_the_share_of_the_busiest() -> None:
    batch = batch_of()
    odd = int(np.sum(batch["tokens"][:, :-1] % 2))
    _, result = stepped(Routed(), batch)
    np.testing.assert_array_equal(result.expert_tokens["table"], [odd, 42 - odd])
    assert float(result.busiest) == pytest.approx(max(odd, 42 - odd) / 42)


def test_a_skipped_step_teaches_no_expert() -> None:
    batch: dict[str, Any] = {**batch_of(), "weights": np.full((6, 7), np.inf, np.float32)}
    _, result = stepped(Routed(), batch)
    assert not bool(result.finite)
    assert not np.any(result.expert_tokens["table"])


@pytest.mark.parametrize(("inner", "matrices"), [("adamw", 0), ("muon", 3)])
def test_a_step_holds_no_copy_of_the_state_and_muon_works_on_one_matrix_at_a_time(
    inner: str, matrices: int
) -> None:
    """Gradients are held; a copy of the state would be three times the parameters."""
    config = TrainConfig.model_validate({"inner": inner})
    model = build_model(SMALL.model_copy(update={"d_model": 128, "d_ff": 512}), config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = TrainState(params, jax.eval_shape(optimizer_of(model, config).init, params))
    batch = {"tokens": jax.ShapeDtypeStruct((1, 9), jnp.int32)}
    lower: Any = make_step(model, config).lower  # type: ignore[attr-defined] # it is jitted
    taken = lower(state, batch, *NOW).compile().memory_analysis()
    sizes = [4 * leaf.size for leaf in jax.tree.leaves(params)]
    assert taken.temp_size_in_bytes < 2.05 * sum(sizes) + matrices * max(sizes)
