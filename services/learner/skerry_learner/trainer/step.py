"""One optimizer step under ``jax.jit``, with its state donated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts

from skerry.algorithm.rates import learning_rate
from skerry.models.base import Batch, Frozen, Model, Params, batch_loss, specs_of, whole
from skerry.models.layers import trains_stacks
from skerry.models.mesh import copied
from skerry.models.stacks import NO_STACKS, Stacks
from skerry.settings.models import TrainConfig
from skerry_learner.trainer.optimizers import make_optimizer


class TrainState(NamedTuple):
    """What one step turns into the next: f32 parameters and the inner optimizer's state."""

    params: Params
    optimizer: Any


class StepResult(NamedTuple):
    """f32 scalars of one step; ``finite`` is false when the update was skipped.

    ``busiest`` is the largest share of a layer's tokens that went to one expert, 0 without experts.
    ``expert_tokens`` are those that taught each unit, int32 (units,), by the name of its leaf.
    """

    loss: jax.Array
    grad_norm: jax.Array
    finite: jax.Array
    busiest: jax.Array | float = 0.0
    expert_tokens: Mapping[str, jax.Array] = MappingProxyType({})


class StepFunction(Protocol):
    """A jitted step; what ``lower`` returns can be compiled without a run."""

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        done: np.float32,
        share: np.float32,
        frozen: Frozen | None = None,
        /,
    ) -> tuple[TrainState, StepResult]: ...
    def lower(self, *args: Any) -> Any: ...


class Gradients(NamedTuple):
    """Loss in nats per token without the experts' balance term, its tokens, and its gradients."""

    loss: jax.Array
    tokens: jax.Array
    expert_tokens: dict[str, jax.Array]
    of_params: Params = None


def gradients_of(
    model: Model, frozen: Frozen | None = None
) -> Callable[[Params, Batch], Gradients]:
    """Return the function ``(params, batch) -> Gradients``: means over the targets of a batch."""
    loss = batch_loss(model)

    def counted(params: Params, batch: Batch) -> tuple[jax.Array, Gradients]:
        mean, aux = loss(whole(params, frozen), batch)
        return mean, Gradients(mean - aux.balance, aux.tokens, dict(aux.expert_tokens))

    differentiate = jax.value_and_grad(counted, has_aux=True)

    def gradients(params: Params, batch: Batch) -> Gradients:
        found: Gradients
        (_, found), of_params = differentiate(params, batch)
        return found._replace(of_params=of_params)

    return gradients


def accumulated(
    gradients: Callable[[Params, Batch], Gradients], parts: int
) -> Callable[[Params, Batch], Gradients]:
    """Return ``gradients`` for a batch that is taken in parts, one after the other.

    The result is that of the whole batch, whose targets all weigh the same, whichever part they are
    in. Each part has rows from all over the batch, as a mesh that divides rows needs it.
    """
    if parts == 1:
        return gradients

    def weighted(found: Gradients) -> Gradients:
        loss, of_params = jax.tree.map(lambda x: found.tokens * x, (found.loss, found.of_params))
        return Gradients(loss, found.tokens, found.expert_tokens, of_params)

    def whole(params: Params, batch: Batch) -> Gradients:
        rows = jax.tree.map(
            lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), dict(batch)
        )

        def add(total: Gradients, part: Batch) -> tuple[Gradients, None]:
            return jax.tree.map(jnp.add, total, weighted(gradients(params, part))), None

        shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], rows))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, rows)
        share = 1.0 / jnp.maximum(total.tokens, 1e-9)
        loss, of_params = jax.tree.map(lambda x: share * x, (total.loss, total.of_params))
        return Gradients(loss, total.tokens, total.expert_tokens, of_params)

    return whole


def optimizer_of(model: Model, config: TrainConfig) -> optax.GradientTransformationExtraArgs:
    """Return the inner optimizer of a model's leaves, or of its stacks in their place."""
    leaves = specs_of(model) if config.inner == "muon" else ()
    return make_optimizer(config, leaves, stacks_of(model, config))


def stacks_of(model: Model, config: TrainConfig) -> Stacks:
    """Return the model's stacks, if its inner optimizer can train them."""
    found: Any = getattr(model, "stacks", NO_STACKS)
    return found if trains_stacks(config.inner) and isinstance(found, Mapping) else NO_STACKS


def make_step(model: Model, config: TrainConfig, places: TrainState | None = None) -> StepFunction:
    """Return the jitted ``(state, batch, done, share, frozen) -> (state, result)``.

    ``done`` (f32) is the progress of the run, ``share`` (f32) a factor on the learning rate. A step
    whose loss or gradient is not finite leaves the state as it was and says so. If the inner
    optimizer is ``gradient``, ``done`` and ``share`` are ignored: the step subtracts the mean
    gradient itself, so that anchor - local is that gradient, up to half a unit in the last place of
    the parameters. ``places`` are the shardings of the state; gradients lie as their parameters do.
    ``frozen`` are the model's leaves that are not trained.
    """
    optimizer = optimizer_of(model, config)
    bare = config.inner == "gradient"

    def step(
        state: TrainState,
        batch: Batch,
        done: jax.Array,
        share: jax.Array,
        frozen: Frozen | None = None,
    ) -> tuple[TrainState, StepResult]:
        gradients = accumulated(gradients_of(model, frozen), config.accumulate)
        with traced_for(places):
            found = gradients(state.params, batch)
        if places is not None:
            lying = jax.lax.with_sharding_constraint(found.of_params, places.params)
            found = found._replace(of_params=lying)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(found.of_params)))
        finite = jnp.isfinite(found.loss) & jnp.isfinite(norm)
        rate = jnp.ones_like(share) if bare else share * learning_rate(config, done, jnp)

        def update(state: TrainState) -> TrainState:
            with jax.numpy_dtype_promotion("standard"):  # optax mixes in its int32 step count
                updates, moments = optimizer.update(
                    found.of_params, state.optimizer, state.params, norm=norm
                )
            moved = jax.tree.map(lambda leaf, by: leaf - rate * by, state.params, updates)
            return TrainState(moved, moments)

        kept = taken_if(finite, update, state)
        routed = {
            name: jnp.where(finite, jnp.rint(count).astype(jnp.int32), 0)
            for name, count in found.expert_tokens.items()
        }
        share_of_one = busiest(found.expert_tokens)
        return kept, StepResult(found.loss, norm, finite, share_of_one, {} if bare else routed)

    result = None if places is None else copied(jax.tree.leaves(places.params)[0].mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=(places, result))


def traced_for(places: TrainState | None) -> AbstractContextManager[object]:
    """Let a model see the mesh that it is traced for; a single device is no mesh."""
    mesh = None if places is None else jax.tree.leaves(places.params)[0].mesh
    if mesh is None or mesh.size == 1:
        return nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def taken_if(
    finite: jax.Array, update: Callable[[TrainState], TrainState], state: TrainState
) -> TrainState:
    """Return ``update(state)``, or the state as it was unless ``finite``.

    On a CPU a branch costs no copy and no time, a choice per element 4 % of a step and another
    copy of the parameters. An accelerator's branch waits for the host, a choice is fused there.
    """
    kept: TrainState
    if jax.default_backend() == "cpu":
        kept = jax.lax.cond(finite, update, lambda state: state, state)
    else:
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), update(state), state)
    return kept


def busiest(expert_tokens: Mapping[str, jax.Array]) -> jax.Array:
    """Return the largest share of a layer's tokens that went to one expert; 0 without experts."""
    shares = [jnp.max(count) / jnp.maximum(jnp.sum(count), 1.0) for count in expert_tokens.values()]
    return jnp.max(jnp.stack(shares)) if shares else jnp.float32(0)
