"""The data-parallel baseline is as fast as it was published to be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry_tools.plan.baselines import data_parallel_step_s

GRID_STEP = 10 ** (4 / 49)
"""Streaming DiLoCo (arXiv 2501.18512) has 50 bandwidths from 0.1 to 1000 Gbit/s."""
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
PUBLISHED = [
    (1e9, 24, 0.1, (86.8, 152.6, 184.2, 222.3, 569.0)),
    (10e9, 48, 0.8, (104.8, 222.3, 222.3, 268.3, 471.5)),
    (100e9, 108, 4.9, (184.2, 323.8, 390.7, 390.7, 471.5)),
]
"""Table 4: parameters, layers, seconds of a step; Gbit/s to compute for that share of the time."""


@pytest.mark.parametrize(("parameters", "layers", "step_s", "published"), PUBLISHED)
def test_published_bandwidths_are_within_one_step_of_the_papers_grid(
    parameters: float, layers: int, step_s: float, published: tuple[float, ...]
) -> None:
    def share(bits_s: float) -> float:
        layer_s = 16 * parameters / layers / bits_s
        return step_s / data_parallel_step_s(step_s, layers, layer_s)

    for target, gbit_s in zip(TARGETS, published, strict=True):
        assert share(gbit_s * 1e9 / GRID_STEP**2.01) < target
        assert share(gbit_s * 1e9 * GRID_STEP**1.01) >= target


@given(st.floats(0.01, 50), st.integers(3, 120), st.floats(1e-9, 1e6))
def test_a_step_is_never_shorter_than_its_computation_or_its_transfer(
    step_s: float, layers: int, layer_s: float
) -> None:
    took_s, wire_s = data_parallel_step_s(step_s, layers, layer_s), layers * layer_s
    assert max(step_s, wire_s) <= took_s <= (step_s + wire_s) * (1 + 1e-9)
    assert math.isfinite(took_s)
