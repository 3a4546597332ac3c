"""Streaming DiLoCo's table of bandwidths comes out again."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry.settings.tree import Tree
from skerry_tools.plan.paper_table import (
    PaperIsland,
    answer,
    data_parallel_step_s,
    required_bits_s,
    utilisation,
)
from skerry_tools.plan.question import read, shipped

islands = st.builds(
    PaperIsland,
    step_s=st.floats(0.01, 50),
    layers=st.integers(3, 120),
    layer_bits=st.floats(1e6, 1e12),
    h_steps=st.integers(1, 500),
    overlap_steps=st.integers(1, 4),
)
rates = st.floats(1e6, 1e14)


@pytest.fixture
def tree() -> Tree:
    return read([shipped("bandwidths")["streaming-diloco"]])


@pytest.mark.parametrize(("bits", "first"), [(13.5, "75 of 75"), (16.0, "74 of 75")])
def test_published_bandwidths_are_within_one_step_of_the_papers_grid(
    tree: Tree, bits: float, first: str
) -> None:
    tree.values["bandwidths"]["bits_per_parameter"] = bits
    found = answer(tree)
    assert found.text[0].startswith(first)
    cells = json.loads(json.dumps(found.json, allow_nan=False))["cells"]
    assert len(cells) == 75
    assert sum(abs(cell["steps_apart"]) <= 1 for cell in cells) == int(first[:2])
    if bits == 13.5:
        assert sum(cell["steps_apart"] == 0 for cell in cells) == 67
    assert [chart.name for chart in found.charts()] == [
        "utilisation-1B", "utilisation-10B", "utilisation-100B",
    ]  # fmt: skip


def test_an_unknown_method_is_refused_by_path(tree: Tree) -> None:
    tree.values["bandwidths"]["models"]["1B"]["published"]["gossip"] = [1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"bandwidths\.models\.1B\.published\.gossip"):
        answer(tree)


@given(islands, rates)
def test_overlap_beats_streaming_alone_and_diloco_beats_data_parallel(
    island: PaperIsland, rate: float
) -> None:
    assert utilisation("overlapped", island, rate) >= utilisation("streaming", island, rate)
    assert utilisation("diloco", island, rate) >= utilisation("data-parallel", island, rate) - 1e-12


@given(islands, st.floats(0.01, 0.99))
def test_an_island_reaches_its_target_at_the_bandwidth_that_it_needs_and_not_below(
    island: PaperIsland, target: float
) -> None:
    need = required_bits_s("overlapped", island, target)
    assert utilisation("overlapped", island, need) >= target
    if need > 10:
        assert utilisation("overlapped", island, need * 0.99) < target


@given(islands, rates)
def test_a_step_is_never_shorter_than_its_computation_or_its_transfer(
    island: PaperIsland, rate: float
) -> None:
    step_s, wire_s = data_parallel_step_s(island, rate), island.layers * island.layer_bits / rate
    assert max(island.step_s, wire_s) <= step_s <= (island.step_s + wire_s) * (1 + 1e-9)
    assert math.isfinite(step_s)
