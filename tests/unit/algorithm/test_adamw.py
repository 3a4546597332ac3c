"""AdamW on the syncer: the learner's own, up to f32 rounding, and a state that can be stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest
from numpy.typing import NDArray

from skerry.algorithm import fragments
from skerry.algorithm.fragments import LeafSpec, Plan
from skerry.algorithm.outer import Outer, adamw_of, make_outer
from skerry.algorithm.rates import learning_rate
from skerry.errors import ConfigError
from skerry.settings.models import TrainConfig
from skerry_learner.trainer.optimizers import make_optimizer

F32s = NDArray[np.float32]
SHAPES = {"embed": (300, 40), "scale": (40,), "up": (40, 50)}
PLAN: Plan = fragments.plan([LeafSpec(name, shape) for name, shape in SHAPES.items()], 1)
ADAM = TrainConfig(steps=20, lr=1e-2, warmup=0.2, clip=1.0)
BARE = ADAM.model_copy(update={"inner": "gradient"})


def outer_of(training: TrainConfig = BARE, plan: Plan = PLAN) -> Outer:
    adamw = adamw_of(training, plan)
    return make_outer("adamw", lr=None, momentum=None, h_steps=1, adamw=adamw)


def tree(seed: int, size: float = 1.0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {n: (size * draw.normal(size=s)).astype(np.float32) for n, s in SHAPES.items()}


def padded(leaves: dict[str, Any]) -> F32s:
    return fragments.gather(PLAN.fragments[0], [np.array(leaf) for leaf in leaves.values()])


@pytest.mark.parametrize("size", [1e-4, 1.0], ids=["unclipped", "clipped"])
def test_steps_are_those_of_the_learner(size: float) -> None:
    outer, optimizer = outer_of(), make_optimizer(ADAM)
    update: Any = jax.jit(optimizer.update)
    params: Any = jax.tree.map(jnp.array, tree(0, 0.05))
    reference = optimizer.init(params)
    master = padded(params)
    state = outer.init(master)
    for step in range(12):
        gradients = tree(step + 1, size)
        master, state = outer.apply(master, padded(gradients), state)
        updates, reference = update(jax.tree.map(jnp.array, gradients), reference, params)
        rate = learning_rate(ADAM, jnp.float32(step / ADAM.steps), jnp)
        params = optax.apply_updates(params, jax.tree.map(lambda u, r=rate: -r * u, updates))
    np.testing.assert_allclose(master, padded(params), rtol=0, atol=2e-7)


def test_weight_decay_falls_on_matrices_only() -> None:
    with_decay, without = (
        outer_of(BARE.model_copy(update={"weight_decay": decay})) for decay in (0.5, 0.0)
    )
    master, gradient = padded(tree(0)), padded(tree(1))
    decayed, _ = with_decay.apply(master, gradient, with_decay.init(master))
    plain, _ = without.apply(master, gradient, without.init(master))
    moved = {n: np.zeros(s, np.float32) for n, s in SHAPES.items()}
    fragments.scatter(PLAN.fragments[0], decayed - plain, list(moved.values()))
    assert not moved["scale"].any()
    assert moved["embed"].all()
    assert moved["up"].all()


def test_a_round_of_no_work_is_no_step() -> None:
    outer, master = outer_of(), padded(tree(0))
    _, state = outer.apply(master, padded(tree(1)), outer.init(master))
    after, same = outer.apply(master, np.zeros_like(master), state)
    np.testing.assert_array_equal(after, master)
    assert same is state


def test_a_stored_state_goes_on_bit_by_bit() -> None:
    outer, master = outer_of(), padded(tree(0))
    state = outer.init(master)
    for seed in (1, 2, 3):
        master, state = outer.apply(master, padded(tree(seed)), state)
    stored = outer.leaves(state)
    assert all(v.dtype == np.float32 and v.size % fragments.BLOCK == 0 for v in stored.values())
    restored = outer.restore(master, stored)
    straight, _ = outer.apply(master, padded(tree(4)), state)
    resumed, after = outer.apply(master, padded(tree(4)), restored)
    np.testing.assert_array_equal(straight, resumed)
    assert after.steps == 4
    with pytest.raises(ConfigError, match="another optimizer's"):
        outer.restore(master, {"momentum": master})


def test_the_padding_stays_zero() -> None:
    outer, master = outer_of(), padded(tree(0))
    after, _ = outer.apply(master, padded(tree(1)), outer.init(master))
    leaves = [np.zeros(spec.shape, np.float32) for spec in PLAN.leaves]
    fragments.scatter(PLAN.fragments[0], after, leaves)
    np.testing.assert_array_equal(fragments.gather(PLAN.fragments[0], leaves), after)


def test_it_is_for_bare_gradients_in_one_fragment() -> None:
    assert adamw_of(ADAM, PLAN) is None
    in_two = fragments.plan(PLAN.leaves, 2)
    for adamw in (None, adamw_of(BARE, in_two)):
        with pytest.raises(ConfigError, match="mode=data-parallel"):
            make_outer("adamw", lr=None, momentum=None, h_steps=1, adamw=adamw)
    with pytest.raises(ConfigError, match="mode=data-parallel"):
        make_outer("adamw", lr=0.1, momentum=None, h_steps=1, adamw=adamw_of(BARE, PLAN))
