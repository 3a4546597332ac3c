"""The learner's training state: parameters, moments, and an anchor per fragment.

Used by one thread. Every call only dispatches; nothing here waits for the device except ``warm``.
A fragment is cut out of the parameters and put into them by two jitted functions, with the plan's
slices baked in. Donated leaves are written in place, so a fragment in flight costs its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import adoption
from skerry.algorithm.fragments import Fragment, Plan, padded
from skerry.models.base import Layout, Model, Params, path_name
from skerry.settings.models import RunConfig
from skerry_learner.trainer.step import (
    StepFunction,
    StepResult,
    TrainState,
    make_optimizer,
    make_step,
)

Leaves: TypeAlias = tuple[jax.Array, ...]
"""The leaves that a fragment touches, in the order of ``leaves_of``."""

Capture: TypeAlias = Callable[[Leaves, jax.Array], tuple[jax.Array, jax.Array]]
Adopt: TypeAlias = Callable[[Leaves, jax.Array, jax.Array, np.float32], Leaves]


def leaves_of(fragment: Fragment) -> tuple[int, ...]:
    """Return the numbers of the leaves a fragment has a slice of, ascending."""
    return tuple(sorted({part.leaf for part in fragment.slices}))


def gather(fragment: Fragment, leaves: Leaves) -> jax.Array:
    """Copy a fragment out of its leaves as its padded vector, f32 [padded_size]."""
    place = {leaf: i for i, leaf in enumerate(leaves_of(fragment))}
    parts: list[jax.Array] = []
    for part in fragment.slices:
        flat = leaves[place[part.leaf]].reshape(-1)[part.start : part.stop]
        parts.append(jnp.pad(flat, (0, padded(part.size) - part.size)))
    return jnp.concatenate(parts)


def scatter(fragment: Fragment, vector: jax.Array, leaves: Leaves) -> Leaves:
    """Return the leaves with a padded vector written into the fragment's slices."""
    place = {leaf: i for i, leaf in enumerate(leaves_of(fragment))}
    out = list(leaves)
    for part, offset in zip(fragment.slices, fragment.offsets, strict=False):
        leaf = out[place[part.leaf]]
        values = vector[offset : offset + part.size]
        flat = leaf.reshape(-1).at[part.start : part.stop].set(values)
        out[place[part.leaf]] = flat.reshape(leaf.shape)
    return tuple(out)


def make_capture(fragment: Fragment) -> Capture:
    """Return the jitted ``(leaves, anchor) -> (local, outer gradient)``, all f32 [padded_size].

    The outer gradient is ``anchor - local`` (DiLoCo, arXiv 2311.08105, and its heirs).
    """

    def capture(leaves: Leaves, anchor: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = gather(fragment, leaves)
        return local, anchor - local

    return jax.jit(capture)


def make_adopt(fragment: Fragment, method: adoption.Method) -> Adopt:
    """Return the jitted ``(leaves, base, new, keep) -> leaves``; the leaves passed in are given up.

    ``base`` is the local value that ``new`` already accounts for: what was captured for the
    contribution, or the anchor when none was. The formulas are ``skerry.algorithm.adoption``'s.
    """

    def adopt(leaves: Leaves, base: jax.Array, new: jax.Array, keep: jax.Array) -> Leaves:
        local = gather(fragment, leaves)
        return scatter(fragment, adoption.adopt(method, local, base, new, keep), leaves)

    return jax.jit(adopt, donate_argnums=0)


@dataclass(frozen=True, slots=True)
class Programs:
    """Everything that is compiled for a model, a config and a plan; trainers may share it."""

    init: Callable[[jax.Array], Params]
    init_moments: Callable[[Params], Any]
    step: StepFunction
    capture: Sequence[Capture]
    adopt: Sequence[Adopt]

    @classmethod
    def of(cls, model: Model, config: RunConfig, plan: Plan) -> Programs:
        return cls(
            init=jax.jit(model.init),
            init_moments=jax.jit(make_optimizer(config.train).init),
            step=make_step(model, config.train),
            capture=[make_capture(f) for f in plan.fragments],
            adopt=[make_adopt(f, config.sync.adoption) for f in plan.fragments],
        )


class Trainer:
    """One model being trained, and the fragments through which it meets the others.

    Memory: parameters, anchors, optimizer state, and for a fragment in flight what was captured
    and the outer gradient until it is sent.
    """

    def __init__(
        self,
        model: Model,
        config: RunConfig,
        plan: Plan,
        programs: Programs | None = None,
        *,
        blank: bool = False,
    ) -> None:
        """``programs``: those of another trainer of the same model, config and plan.

        A ``blank`` one begins with zeros, for parameters that are all adopted before a step.
        """
        self._config = config
        self._plan = plan
        programs = programs or Programs.of(model, config, plan)
        self._init = partial(_blank, model.init) if blank else programs.init
        self._init_moments = programs.init_moments
        self._step = programs.step
        self._capture = programs.capture
        self._adopt = programs.adopt
        self._leaf_numbers = [leaves_of(f) for f in plan.fragments]
        self._anchors: dict[int, jax.Array] = {}
        self._captured: dict[int, jax.Array] = {}
        self.state = self._fresh()
        self._layout = Layout.of(self.state.params)
        if [leaf.shape for leaf in self._layout.leaves(self.state.params)] != [
            spec.shape for spec in plan.leaves
        ]:
            msg = "the parameters do not have the shapes of the plan"
            raise ValueError(msg)

    def warm(self, tick: Callable[[], None]) -> None:
        """Compile everything, calling ``tick`` in between, and leave the state as it began."""
        data = self._config.data
        for fragment in self._plan.fragments:
            index = fragment.index
            self._overwrite(index, self._zeros(index))
            tick()
        blank = jnp.zeros((data.batch, data.seq_len + 1), jnp.int32)
        jax.block_until_ready(self.step(blank, 0.0))
        self.state = self._fresh()
        tick()

    def step(self, tokens: jax.Array, done: float, share: float = 1.0) -> StepResult:
        """Dispatch one step on int32 [batch, seq + 1] at progress ``done`` in [0, 1].

        ``share`` in (0, 1] is a factor on the learning rate.
        """
        factors = np.float32(done), np.float32(share)
        self.state, result = self._step(self.state, tokens, *factors)
        return result

    def moments_like(self) -> Any:
        """Return the inner optimizer's state as shapes and dtypes."""
        return jax.eval_shape(self._init_moments, self.state.params)

    def restore_moments(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Go on with moments of an earlier incarnation, named and shaped as ``moments_like``.

        They are copied: what a step may write into must be the device's own memory.
        """
        named, tree = jax.tree_util.tree_flatten_with_path(self.state.optimizer)
        leaves = [jax.device_put(tensors[path_name(p)], may_alias=False) for p, _ in named]
        self.state = TrainState(self.state.params, jax.tree.unflatten(tree, leaves))

    def genesis(self, fragment: int) -> jax.Array:
        """Return the outer gradient of the parameters relative to zero: f32 [padded_size]."""
        return self._capture[fragment](self._leaves(fragment), self._zeros(fragment))[1]

    def capture(self, fragment: int) -> jax.Array:
        """Return ``anchor - local``, f32 [padded_size], and remember local for the adoption."""
        local, gradient = self._capture[fragment](self._leaves(fragment), self._anchors[fragment])
        if self._config.sync.adoption == "rebase":
            self._captured[fragment] = local
        return gradient

    def release(self, fragment: int) -> None:
        """Forget what was captured: no commit will merge it, so it is local progress again."""
        self._captured.pop(fragment, None)

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Take in a decoded global fragment, f32 [padded_size]; it becomes the anchor bit by bit.

        The first adoption of a fragment overwrites it. The array must not be written to
        afterwards: on a CPU the anchor is this very memory.
        """
        new = jax.device_put(vector)
        anchor = self._anchors.get(fragment)
        if anchor is None:
            self._overwrite(fragment, new)
        else:
            base = self._captured.pop(fragment, anchor)
            keep = np.float32(self._config.sync.blend_alpha)
            leaves = self._adopt[fragment](self._leaves(fragment), base, new, keep)
            self._replace(fragment, leaves)
        self._anchors[fragment] = new

    def reset(self) -> None:
        """Fall back to the anchors with fresh moments, after the loss has diverged.

        What is in flight stays in flight: its progress comes back with the global state. Parameters
        that are not finite are put out first, since no difference to them is a number.
        """
        finite: Any = jax.tree.map(
            lambda leaf: jnp.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0), self.state.params
        )
        self.state = TrainState(finite, self.state.optimizer)
        for fragment, anchor in self._anchors.items():
            self._overwrite(fragment, anchor)
            if fragment in self._captured:
                self._captured[fragment] = anchor
        self.state = TrainState(self.state.params, self._init_moments(self.state.params))

    def _fresh(self) -> TrainState:
        params = self._init(jax.random.key(self._config.train.seed))
        return TrainState(params, self._init_moments(params))

    def _overwrite(self, fragment: int, new: jax.Array) -> None:
        local, _ = self._capture[fragment](self._leaves(fragment), new)
        adopt = self._adopt[fragment]
        self._replace(fragment, adopt(self._leaves(fragment), local, new, np.float32(0.0)))

    def _zeros(self, fragment: int) -> jax.Array:
        return jnp.zeros((self._plan.fragments[fragment].padded_size,), jnp.float32)

    def _leaves(self, fragment: int) -> Leaves:
        leaves = self._layout.leaves(self.state.params)
        return tuple(leaves[number] for number in self._leaf_numbers[fragment])

    def _replace(self, fragment: int, new: Leaves) -> None:
        leaves = self._layout.leaves(self.state.params)
        for number, leaf in zip(self._leaf_numbers[fragment], new, strict=True):
            leaves[number] = leaf
        self.state = TrainState(self._layout.params(leaves), self.state.optimizer)


def _blank(init: Callable[[jax.Array], Params], key: jax.Array) -> Params:
    """Return zeros in the place of what ``init`` would make, without compiling or running it."""
    shapes = jax.eval_shape(init, key)
    blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), blank)
