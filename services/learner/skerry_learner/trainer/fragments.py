"""Fragments on the device: cutting one out of the parameters and putting a global one in.

Two jitted functions per fragment, with the plan's slices baked in. Donated leaves are written in
place, so a fragment in flight costs its own size and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from skerry.algorithm import adoption
from skerry.algorithm.fragments import Fragment, LeafSpec, padded

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


def check_plan(leaves: Sequence[jax.Array], specs: Sequence[LeafSpec]) -> None:
    """Raise ValueError unless the leaves are the ones that the plan was made for."""
    if [leaf.shape for leaf in leaves] != [spec.shape for spec in specs]:
        msg = "the parameters do not have the shapes of the plan"
        raise ValueError(msg)
