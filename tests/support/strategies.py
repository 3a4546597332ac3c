"""Hypothesis strategies for the things that Skerry handles: models, plans, vectors, weights."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, plan, trainable

AWKWARD = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e-45, -1e-45, 1.1754942e-38, 1e-30, 3e38, -3e38)
"""Zeros of both signs, subnormals, the largest magnitudes: what breaks a quantiser first."""


def shapes(max_size: int = 6000) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of scalars, vectors around a block boundary, and matrices; at least one element."""
    return st.one_of(
        st.just(()),
        st.tuples(st.sampled_from((1, 2, 255, 256, 257, 511, 512, 513))),
        st.tuples(st.integers(1, max_size)),
        st.tuples(st.integers(1, 80), st.integers(1, max(1, max_size // 80))),
    )


@st.composite
def leaf_specs(
    draw: st.DrawFn, *, max_leaves: int = 12, max_size: int = 6000
) -> tuple[LeafSpec, ...]:
    """Draw the leaves of a model: one or more, uniquely named, sometimes with an embedding.

    Some are stacks of units, and all but the first may be frozen.
    """
    drawn = draw(st.lists(shapes(max_size), min_size=1, max_size=max_leaves))
    embedding = draw(st.integers(-1, len(drawn) - 1))
    return tuple(
        LeafSpec(
            f"leaf{i}",
            shape,
            i == embedding,
            trainable=i == 0 or draw(st.integers(0, 4)) > 0,
            unit=prod(shape[1:]) if len(shape) > 1 and draw(st.booleans()) else 0,
        )
        for i, shape in enumerate(drawn)
    )


@st.composite
def plans(draw: st.DrawFn, *, max_fragments: int = 24, max_size: int = 6000) -> Plan:
    """Draw leaves and a number of fragments that they can fill."""
    leaves = draw(leaf_specs(max_size=max_size))
    parameters = sum(leaf.size for leaf in trainable(leaves))
    return plan(leaves, draw(st.integers(1, min(max_fragments, parameters))))


@st.composite
def vectors(
    draw: st.DrawFn, size: int, *, largest: float = 3e38, awkward: bool = True
) -> NDArray[np.float32]:
    """Draw a finite f32 vector (size,): random at some scale, with awkward values strewn in.

    The bulk comes from a seeded generator, so that large vectors stay cheap to draw and a failure
    shrinks to a scale, a seed and a few values.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from((0.0, 1e-38, 1e-6, 1e-2, 1.0, 1e6)))
    values = (rng.standard_normal(size) * scale).astype(np.float32)
    if size and awkward:
        places = st.tuples(st.integers(0, size - 1), st.sampled_from(AWKWARD))
        for place, value in draw(st.lists(places, max_size=8)):
            values[place] = np.float32(value)
    return np.clip(values, np.float32(-largest), np.float32(largest))


def weights(*, min_size: int = 1, max_size: int = 8) -> st.SearchStrategy[list[float]]:
    """Weights of contributions: any finite ones, zeros among them."""
    one = st.one_of(st.just(0.0), st.floats(0.0, 1e12, allow_nan=False))
    return st.lists(one, min_size=min_size, max_size=max_size)


def work(*, max_size: int = 8) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(tokens, steps) of contributions, zero steps among them."""
    one = st.integers(0, 10_000).flatmap(
        lambda steps: st.tuples(st.integers(steps, steps * 65_536), st.just(steps))
    )
    return st.lists(one, min_size=1, max_size=max_size)
