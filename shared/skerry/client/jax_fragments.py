"""The parameters of a JAX learner as fragments, with an anchor and perhaps a capture of each.

Used by one thread. Every call only dispatches; nothing here waits for the device. A fragment is cut
out of the parameters and put into them by two jitted functions, with the plan's slices baked in.
Donated leaves are written in place, so a fragment in flight costs its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import adoption
from skerry.algorithm.fragments import Fragment, Plan, padded
from skerry.models.base import Layout, Params
from skerry.settings.models import SyncConfig

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
class FragmentPrograms:
    """What is compiled for a plan; learners of one process may share it."""

    capture: Sequence[Capture]
    adopt: Sequence[Adopt]

    @classmethod
    def of(cls, plan: Plan, sync: SyncConfig) -> FragmentPrograms:
        return cls(
            capture=[make_capture(f) for f in plan.fragments],
            adopt=[make_adopt(f, sync.adoption) for f in plan.fragments],
        )


class JaxFragments:
    """A tree of parameters, of any structure, through which a learner meets the others.

    ``params`` is the tree: the training loop puts a newer one there before each step boundary, goes
    on with what is there after it, and gives its arrays up. Its leaves are matched to the plan's by
    name; those that no fragment holds stay as they are.

    Memory: anchors, and for a fragment in flight what was captured and the outer gradient until it
    is sent.
    """

    def __init__(
        self, plan: Plan, sync: SyncConfig, params: Params, programs: FragmentPrograms | None = None
    ) -> None:
        """``programs``: those of other parameters with the same plan and settings."""
        self.params = params
        self._sync = sync
        self._sizes = [f.padded_size for f in plan.fragments]
        self._programs = programs or FragmentPrograms.of(plan, sync)
        self._layout = Layout.of(params)
        numbers = {name: number for number, name in enumerate(self._layout.names)}
        shapes = [tuple(leaf.shape) for leaf in self._layout.leaves(params)]
        for spec in plan.leaves:
            if spec.name not in numbers or shapes[numbers[spec.name]] != spec.shape:
                msg = f"the parameters do not have the shapes of the plan: {spec.name}"
                raise ValueError(msg)
        held = [numbers[spec.name] for spec in plan.leaves]
        self._numbers = [[held[leaf] for leaf in leaves_of(f)] for f in plan.fragments]
        self._anchors: dict[int, jax.Array] = {}
        self._captured: dict[int, jax.Array] = {}

    def genesis(self, fragment: int) -> jax.Array:
        """Return the outer gradient of the parameters relative to zero: f32 [padded_size]."""
        return self._programs.capture[fragment](self._leaves(fragment), self._zeros(fragment))[1]

    def capture(self, fragment: int) -> jax.Array:
        """Return ``anchor - local``, f32 [padded_size], and remember local for the adoption."""
        capture = self._programs.capture[fragment]
        local, gradient = capture(self._leaves(fragment), self._anchors[fragment])
        if self._sync.adoption == "rebase":
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
            keep = np.float32(self._sync.blend_alpha)
            adopt = self._programs.adopt[fragment]
            self._replace(fragment, adopt(self._leaves(fragment), base, new, keep))
        self._anchors[fragment] = new

    def reset(self) -> None:
        """Fall back to the anchors, after the loss has diverged.

        What is in flight stays in flight: its progress comes back with the global state. Parameters
        that are not finite are put out first, since no difference to them is a number.
        """
        self.params = jax.tree.map(
            lambda leaf: jnp.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0), self.params
        )
        for fragment, anchor in self._anchors.items():
            self._overwrite(fragment, anchor)
            if fragment in self._captured:
                self._captured[fragment] = anchor

    def warm(self, tick: Callable[[], None]) -> None:
        """Compile everything, calling ``tick`` in between; the parameters are lost."""
        for fragment in range(len(self._sizes)):
            self._overwrite(fragment, self._zeros(fragment))
            tick()

    def _overwrite(self, fragment: int, new: jax.Array) -> None:
        local, _ = self._programs.capture[fragment](self._leaves(fragment), new)
        adopt = self._programs.adopt[fragment]
        self._replace(fragment, adopt(self._leaves(fragment), local, new, np.float32(0.0)))

    def _zeros(self, fragment: int) -> jax.Array:
        return jnp.zeros((self._sizes[fragment],), jnp.float32)

    def _leaves(self, fragment: int) -> Leaves:
        leaves = self._layout.leaves(self.params)
        return tuple(leaves[number] for number in self._numbers[fragment])

    def _replace(self, fragment: int, new: Leaves) -> None:
        leaves = self._layout.leaves(self.params)
        for number, leaf in zip(self._numbers[fragment], new, strict=True):
            leaves[number] = leaf
        self.params = self._layout.params(leaves)
