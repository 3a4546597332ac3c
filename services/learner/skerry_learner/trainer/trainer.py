"""The learner's training state: parameters, which are fragments to the others, and moments.

Used by one thread. Every call only dispatches; nothing here waits for the device except ``warm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.client.jax_fragments import FragmentPrograms, JaxFragments
from skerry.client.weights import FolderWeights
from skerry.models.base import Batch, Model, Params, path_name
from skerry.settings.models import RunConfig
from skerry_learner.trainer.step import (
    StepFunction,
    StepResult,
    TrainState,
    make_step,
    optimizer_of,
)


@dataclass(frozen=True, slots=True)
class Programs:
    """Everything that is compiled for a model, a config and a plan; trainers may share it."""

    init: Callable[[jax.Array], Params]
    init_moments: Callable[[Params], Any]
    step: StepFunction
    fragments: FragmentPrograms

    @classmethod
    def of(cls, model: Model, config: RunConfig, plan: Plan) -> Programs:
        return cls(
            init=jax.jit(model.init),
            init_moments=jax.jit(optimizer_of(model, config.train).init),
            step=make_step(model, config.train),
            fragments=FragmentPrograms.of(plan, config.sync),
        )


class Trainer:
    """One model being trained: ``fragments`` holds its parameters, ``moments`` are the optimizer's.

    To a session it is those fragments, with fresh moments after a reset. ``routed`` adds up the
    tokens that taught each unit, as ``TrainingProgress`` has them.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        plan: Plan,
        programs: Programs | None = None,
        *,
        blank: bool = False,
        weights: FolderWeights | None = None,
    ) -> None:
        """``programs``: those of another trainer of the same model, config and plan.

        A ``blank`` one begins with zeros, for parameters that are all adopted before a step.
        ``weights`` are offered as initial parameters instead of its own.
        """
        self._config = config
        programs = programs or Programs.of(model, config, plan)
        self._init = partial(_blank, model.init) if blank else programs.init
        self._init_moments = programs.init_moments
        self._step = programs.step
        params = self._init(jax.random.key(config.train.seed))
        self.fragments = JaxFragments(plan, config.sync, params, programs.fragments)
        self.moments = self._init_moments(params)
        self.routed: Mapping[str, jax.Array] = {}
        self.genesis = (weights or self.fragments).genesis
        self.capture = self.fragments.capture
        self.release = self.fragments.release
        self.adopt = self.fragments.adopt

    @property
    def state(self) -> TrainState:
        """What a step turns into the next."""
        return TrainState(self.fragments.params, self.moments)

    @state.setter
    def state(self, state: TrainState) -> None:
        self.fragments.params, self.moments = state.params, state.optimizer

    def warm(self, tick: Callable[[], None]) -> None:
        """Compile everything, calling ``tick`` in between, and leave the state as it began."""
        data = self._config.data
        self.fragments.warm(tick)
        blank = jnp.zeros((data.batch, data.seq_len + 1), jnp.int32)
        jax.block_until_ready(self.step({"tokens": blank}, 0.0))
        self.fragments.params = self._init(jax.random.key(self._config.train.seed))
        self.moments, self.routed = self._init_moments(self.fragments.params), {}
        tick()

    def step(self, batch: Batch, done: float, share: float = 1.0) -> StepResult:
        """Dispatch one step on a batch at progress ``done`` in [0, 1].

        ``share`` in (0, 1] is a factor on the learning rate.
        """
        factors = np.float32(done), np.float32(share)
        self.state, result = self._step(self.state, batch, *factors)
        if result.expert_tokens:
            self.routed = _added(self.routed or _zeros_of(result), result.expert_tokens)
        return result

    def moments_like(self) -> Any:
        """Return the inner optimizer's state as shapes and dtypes."""
        return jax.eval_shape(self._init_moments, self.fragments.params)

    def restore_moments(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Go on with moments of an earlier incarnation, named and shaped as ``moments_like``.

        They are copied: what a step may write into must be the device's own memory.
        """
        named, tree = jax.tree_util.tree_flatten_with_path(self.moments)
        leaves = [jax.device_put(tensors[path_name(p)], may_alias=False) for p, _ in named]
        self.moments = jax.tree.unflatten(tree, leaves)

    def reset(self) -> None:
        """Fall back to the anchors with fresh moments, after the loss has diverged."""
        self.fragments.reset()
        self.moments = self._init_moments(self.fragments.params)


@jax.jit
def _added(
    before: Mapping[str, jax.Array], more: Mapping[str, jax.Array]
) -> Mapping[str, jax.Array]:
    return {name: before[name] + count for name, count in more.items()}


def _zeros_of(result: StepResult) -> Mapping[str, jax.Array]:
    return {name: jnp.zeros_like(count) for name, count in result.expert_tokens.items()}


def _blank(init: Callable[[jax.Array], Params], key: jax.Array) -> Params:
    """Return zeros in the place of what ``init`` would make, without compiling or running it."""
    shapes = jax.eval_shape(init, key)
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), blank)
