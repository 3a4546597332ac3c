"""The plan covers every parameter once, balances, and is the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import (
    BLOCK,
    LeafSpec,
    Plan,
    averaged,
    gather,
    padded,
    plan,
    scatter,
)
from skerry.errors import PlanError
from tests.support.strategies import leaf_specs, plans

quick = settings(max_examples=60)


@quick
@given(cut=plans())
def test_every_parameter_is_in_exactly_one_fragment(cut: Plan) -> None:
    seen = [np.zeros(leaf.size, dtype=np.int64) for leaf in cut.leaves]
    for fragment in cut.fragments:
        for piece in fragment.slices:
            seen[piece.leaf][piece.start : piece.stop] += 1
    assert all((counts == 1).all() for counts in seen)


@quick
@given(cut=plans())
def test_fragments_are_even_and_cut_between_blocks_where_blocks_suffice(cut: Plan) -> None:
    sizes = [fragment.size for fragment in cut.fragments]
    assert 0 < max(sizes) <= min(sizes) + padded(-(-cut.parameters // len(sizes)))
    blocks = sum(padded(leaf.size) // BLOCK for leaf in cut.leaves)
    for fragment in cut.fragments:
        pairs = zip(fragment.slices, fragment.slices[1:], strict=False)
        assert all(a.leaf < b.leaf or a.stop < b.start for a, b in pairs), "neighbours are joined"
        whole = all(piece.start % BLOCK == 0 for piece in fragment.slices)
        assert whole or blocks < len(cut.fragments)


@quick
@given(leaves=leaf_specs(), data=st.data())
def test_equal_input_gives_an_equal_plan(leaves: tuple[LeafSpec, ...], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(24, sum(leaf.size for leaf in leaves))))
    assert plan(leaves, count) == plan(list(leaves), count)


def test_the_digest_is_pinned() -> None:
    leaves = (LeafSpec("embed", (256, 64), embedding=True), LeafSpec("out", (64, 300)))
    assert plan(leaves, 4).digest == 1054754682839071342


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"shape": (64, 32)}, {"shape": (2048,)}, {"embedding": True}],
    ids=["name", "transposed", "flattened", "embedding"],
)
def test_the_digest_changes_with_any_property_of_a_leaf(change: dict[str, Any]) -> None:
    leaf = LeafSpec("w", (32, 64))
    assert plan((leaf,), 2).digest != plan((replace(leaf, **change),), 2).digest


def test_the_digest_changes_with_the_order_of_leaves_and_with_p() -> None:
    a, b = LeafSpec("a", (512,)), LeafSpec("b", (512,))
    assert len({plan((a, b), 2).digest, plan((b, a), 2).digest, plan((a, b), 1).digest}) == 3


def test_one_huge_leaf_beside_small_ones_is_spread_evenly() -> None:
    leaves = (LeafSpec("huge", (1_000_000,)), *(LeafSpec(f"s{i}", (64,)) for i in range(20)))
    sizes = [fragment.size for fragment in plan(leaves, 24).fragments]
    assert max(sizes) <= 1.01 * sum(sizes) / 24


def test_a_transformer_is_balanced_within_a_tenth() -> None:
    layer = [(256, 256), (256, 128), (256, 128), (256, 256), (256, 768), (256, 768), (768, 256)]
    leaves = [LeafSpec("embed", (8192, 256), embedding=True)]
    leaves += [
        LeafSpec(f"{i}.{j}", shape) for i in range(8) for j, shape in enumerate([*layer, (256,)])
    ]
    sizes = [fragment.size for fragment in plan(leaves, 12).fragments]
    assert max(sizes) <= 1.1 * sum(sizes) / 12


def test_scalars_fill_fragments_of_their_own() -> None:
    cut = plan([LeafSpec(f"s{i}", ()) for i in range(5)], 5)
    assert [fragment.size for fragment in cut.fragments] == [1] * 5
    assert {fragment.padded_size for fragment in cut.fragments} == {BLOCK}
    assert [f.size for f in plan((LeafSpec("w", (3, 3)),), 9).fragments] == [1] * 9


def test_leaves_without_elements_belong_to_no_fragment() -> None:
    cut = plan((LeafSpec("none", (0, 7)), LeafSpec("w", (4,))), 1)
    assert {piece.leaf for piece in cut.fragments[0].slices} == {1}


def test_more_fragments_than_parameters_says_what_to_set() -> None:
    with pytest.raises(PlanError, match=r"9 fragments .* 8 parameters: .* at most 8") as caught:
        plan((LeafSpec("w", (8,)),), 9)
    assert caught.value.path == "sync.fragments"


@pytest.mark.parametrize(
    ("leaves", "count"),
    [((LeafSpec("w", (8,)),), 0), ((), 1), ((LeafSpec("w", (-1, 8)),), 1)],
    ids=["no fragments", "no parameters", "negative dimension"],
)
def test_impossible_plans_are_refused(leaves: tuple[LeafSpec, ...], count: int) -> None:
    with pytest.raises(PlanError):
        plan(leaves, count)


@quick
@given(cut=plans(), seed=st.integers(0, 2**32 - 1))
def test_scatter_undoes_gather(cut: Plan, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tree = [rng.standard_normal(leaf.shape).astype(np.float32) for leaf in cut.leaves]
    copy = [np.zeros_like(leaf) for leaf in tree]
    for fragment in cut.fragments:
        scatter(fragment, gather(fragment, tree), copy)
    assert all(np.array_equal(a, b) for a, b in zip(tree, copy, strict=True))


@quick
@given(cut=plans())
def test_padding_is_zero_and_offsets_start_slices(cut: Plan) -> None:
    tree = [np.ones(leaf.shape, dtype=np.float32) for leaf in cut.leaves]
    for fragment in cut.fragments:
        vector = gather(fragment, tree)
        assert vector.dtype == np.float32
        assert vector.sum() == fragment.size
        assert vector.size == fragment.blocks * BLOCK
        firsts = [vector[offset] for offset in fragment.offsets[:-1]]
        assert firsts == [1.0] * len(fragment.slices)


def test_gather_widens_other_dtypes() -> None:
    cut = plan((LeafSpec("w", (2, 2)),), 1)
    vector = gather(cut.fragments[0], [np.array([[1, 2], [3, 4]], dtype=np.float16)])
    assert vector[:4].tolist() == [1, 2, 3, 4]


SMALL = plan((LeafSpec("w", (4, 4)),), 1).fragments[0]
STRIDED = np.zeros((4, 4), dtype=np.float32).T[:, ::-1]


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: gather(SMALL, [np.zeros(15, np.float32)]), "has 15 elements"),
        (lambda: scatter(SMALL, np.zeros(8, np.float32), [np.zeros(16, np.float32)]), "needs"),
        (lambda: scatter(SMALL, np.zeros(BLOCK, np.float32), [STRIDED]), "not contiguous"),
    ],
    ids=["a smaller tree", "another vector", "a leaf that is not written through"],
)
def test_what_does_not_fit_the_plan_is_refused(act: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        act()


def test_only_embeddings_are_averaged() -> None:
    cut = plan((LeafSpec("embed", (300,), embedding=True), LeafSpec("w", (300,))), 1)
    assert averaged(cut, cut.fragments[0]) == (True, False)
