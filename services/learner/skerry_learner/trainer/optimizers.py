"""The inner optimizers of a run, without their learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
from optax import contrib  # pyright: ignore[reportMissingTypeStubs] - as above

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.outer import optax_named
from skerry.algorithm.presets import INNERS
from skerry.models.base import Layout, Params, path_name
from skerry.models.stacks import NO_STACKS, Stacks
from skerry.settings.models import TrainConfig

MOMENTUM = 0.95
"""Decay of Muon's one moment, that of its authors."""
EPSILON = 1e-8
"""Added to the norm that a matrix is divided by before Muon's iteration."""
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
"""Coefficients of Muon's iteration, those of its authors: of x, its cube and its fifth power."""
ITERATIONS = 5
ADAMS_RMS = 0.2
"""Root mean square of AdamW's updates. Muon's are scaled to it, so that one rate and one weight
decay serve both (arXiv 2502.16982, section 2.2)."""


def make_optimizer(
    config: TrainConfig, leaves: Sequence[LeafSpec] = (), stacks: Stacks = NO_STACKS
) -> optax.GradientTransformationExtraArgs:
    """Return the inner optimizer without its learning rate.

    AdamW (arXiv 1711.05101) with decay on matrices only; Muon (arXiv 2502.16982, and 2505.23725
    within DiLoCo) for the matrices among ``leaves``, which are those of the model; ``gradient``
    passes gradients through. Any other is made with a learning rate of 1, so that the run's
    schedule scales its updates. Each of the ``stacks`` is trained as the leaves that it holds.
    """
    if config.inner == "gradient":
        return optax.with_extra_args_support(optax.identity())
    if config.inner not in INNERS:
        named = optax_named(config.inner, "train.inner", {"learning_rate": 1.0})
        return optax.chain(clipped(config.clip), named, optax.scale(-1.0))
    rule = by_leaf(optax.scale_by_adam(b1=config.b1, b2=config.b2))
    return optax.chain(
        clipped(config.clip),
        _muon(rule, leaves, stacks) if config.inner == "muon" else rule,
        optax.add_decayed_weights(config.weight_decay, mask=partial(_decays, stacks=stacks)),
    )


def clipped(limit: float) -> optax.GradientTransformationExtraArgs:
    """Return optax's ``clip_by_global_norm``, which takes the ``norm`` where that is known.

    One factor on every gradient is fused into what comes next; a division is not.
    """

    def init(params: Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: Params, state: Any, params: Params = None, *, norm: Any = None, **_: Any
    ) -> tuple[Params, Any]:
        del params
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.minimum(jnp.float32(1.0), jnp.float32(limit) / norm)
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def by_leaf(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return ``scale_by_adam`` as a function of one leaf: all leaves of a shape are traced once."""
    of_one = jax.jit(adam.update)

    def update(updates: Params, state: Any, params: Params = None) -> tuple[Params, Any]:
        del params
        tree: Any
        leaves, tree = jax.tree.flatten(updates)
        if not leaves:
            return updates, state
        moments = zip(tree.flatten_up_to(state.mu), tree.flatten_up_to(state.nu), strict=True)
        found = [
            of_one(leaf, optax.ScaleByAdamState(state.count, *pair))
            for leaf, pair in zip(leaves, moments, strict=True)
        ]
        moved = tree.unflatten([update for update, _ in found])
        mu = tree.unflatten([state.mu for _, state in found])
        nu = tree.unflatten([state.nu for _, state in found])
        return moved, optax.ScaleByAdamState(found[0][1].count, mu, nu)

    return optax.GradientTransformation(adam.init, update)


def _muon(
    others: optax.GradientTransformation, leaves: Sequence[LeafSpec], stacks: Stacks
) -> optax.GradientTransformation:
    matrices = {leaf.name for leaf in leaves if leaf.is_matrix}
    matrices |= {stack for stack, names in stacks.items() if names[0] in matrices}

    def labels(params: Params) -> Any:
        layout = Layout.of(params)
        return layout.params(["muon" if name in matrices else "adam" for name in layout.names])

    # A chain of one: saved moments have its place in their names.
    return optax.partition({"muon": optax.chain(_scale_by_muon(stacks)), "adam": others}, labels)


def _scale_by_muon(stacks: Stacks) -> optax.GradientTransformation:
    """Return what optax's ``scale_by_muon`` does, with its state.

    It traces the iteration once for all matrices of a shape, and takes those of a stack in turn.
    """

    @jax.jit
    def of_one(moment: jax.Array, gradient: jax.Array, count: jax.Array) -> jax.Array:
        ahead = optax.tree.bias_correction(moment, MOMENTUM, optax.safe_increment(count))
        now = optax.tree.bias_correction(gradient, MOMENTUM, count)
        ahead = MOMENTUM * ahead + (1 - MOMENTUM) * now
        norm = jnp.linalg.norm(ahead, axis=(-2, -1), keepdims=True)
        return orthogonal(ahead / (norm + EPSILON))

    def update(updates: Params, state: Any, params: Params = None) -> tuple[Params, Any]:
        del params
        moments = optax.tree.update_moment(updates, state.mu, MOMENTUM, 1)
        count = optax.safe_increment(state.count)

        def scaled(path: tuple[Any, ...], moment: jax.Array, gradient: jax.Array) -> jax.Array:
            def scale_row(row: Any, held: jax.Array) -> jax.Array:
                return held.at[row].set(of_one(moment[row], held[row], count))

            found: jax.Array
            if path_name(path) in stacks:  # in place: no other stack has to be held
                found = jax.lax.fori_loop(0, len(gradient), scale_row, gradient)
            else:
                found = of_one(moment, gradient, count)
            return found

        found = jax.tree_util.tree_map_with_path(scaled, moments, updates)
        return found, state._replace(count=count, mu=moments)

    return optax.GradientTransformation(contrib.scale_by_muon().init, update)


def orthogonal(matrices: jax.Array) -> jax.Array:
    """Return matrices [..., out, in] of unit norm with singular values near one, scaled.

    Their root mean square, one over that of the longer side, becomes that of AdamW's updates. The
    iteration is that of Newton and Schulz (arXiv 2502.16982, section 2.1).
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    a, b, c = NEWTON_SCHULZ

    def iterate(_: Any, x: jax.Array) -> jax.Array:
        square = x @ x.mT if wide else x.mT @ x
        factor = b * square + c * (square @ square)
        return a * x + (factor @ x if wide else x @ factor)

    found: jax.Array = jax.lax.fori_loop(0, ITERATIONS, iterate, matrices)
    return float(ADAMS_RMS * max(matrices.shape[-2:]) ** 0.5) * found


def _decays(params: Params, stacks: Stacks) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - (path_name(path) in stacks) >= 2, params
    )
