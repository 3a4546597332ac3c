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
    MOST_SLICES,
    LeafSpec,
    Plan,
    averaged,
    gather,
    padded,
    plan,
    scatter,
    trainable,
)
from skerry.errors import PlanError
from tests.support.strategies import leaf_specs, plans

quick = settings(max_examples=60)


def unit_of(leaf: LeafSpec) -> int:
    return leaf.unit or leaf.size


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
    blocks = sum(leaf.units * padded(unit_of(leaf)) // BLOCK for leaf in cut.leaves)
    for fragment in cut.fragments:
        pairs = zip(fragment.slices, fragment.slices[1:], strict=False)
        assert all(
            a.leaf < b.leaf or a.stop < b.start or b.start % unit_of(cut.leaves[b.leaf]) == 0
            for a, b in pairs
        ), "neighbours are joined"
        starts = [piece.start % unit_of(cut.leaves[piece.leaf]) for piece in fragment.slices]
        assert all(start % BLOCK == 0 for start in starts) or blocks < len(cut.fragments)


@quick
@given(cut=plans())
def test_no_slice_holds_elements_of_two_units_or_of_a_frozen_leaf(cut: Plan) -> None:
    assert all(leaf.trainable for leaf in cut.leaves)
    for fragment in cut.fragments:
        for piece in fragment.slices:
            unit = unit_of(cut.leaves[piece.leaf])
            assert piece.start // unit == (piece.stop - 1) // unit


def test_a_stack_of_experts_has_one_slice_for_each() -> None:
    cut = plan([LeafSpec("experts", (8, 4, 64), unit=256), LeafSpec("w", (2048,))], 4)
    sizes = [[piece.size for piece in fragment.slices] for fragment in cut.fragments]
    assert sorted(sizes) == [[256] * 4, [256] * 4, [1024], [1024]]


def test_an_expert_larger_than_a_share_is_cut_at_its_own_blocks() -> None:
    cut = plan([LeafSpec("experts", (2, 600), unit=600)], 5)
    slices = sorted((piece for f in cut.fragments for piece in f.slices), key=lambda s: s.start)
    assert [(s.start, s.stop) for s in slices] == [
        *((0, 256), (256, 512), (512, 600)),
        *((600, 856), (856, 1112), (1112, 1200)),
    ]


def test_frozen_leaves_are_on_record_and_in_no_fragment() -> None:
    leaves = [LeafSpec("base", (64, 64), trainable=False), LeafSpec("w", (300,))]
    cut = plan(leaves, 1)
    assert [leaf.name for leaf in cut.leaves] == ["w"]
    assert set(cut.specs) == set(leaves)
    assert cut.parameters == 300
    assert plan(cut.specs, 1) == cut, "a run's record makes the same plan again"


@quick
@given(leaves=leaf_specs(), data=st.data())
def test_equal_input_gives_an_equal_plan(leaves: tuple[LeafSpec, ...], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(24, sum(leaf.size for leaf in trainable(leaves)))))
    assert plan(leaves, count) == plan(list(leaves), count)


def test_the_digest_is_pinned() -> None:
    leaves = (LeafSpec("embed", (256, 64), embedding=True), LeafSpec("out", (64, 300)))
    assert plan(leaves, 4).digest == 1054754682839071342


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"shape": (64, 32)}, {"shape": (2048,)}, {"embedding": True}, {"unit": 64}],
    ids=["name", "transposed", "flattened", "embedding", "unit"],
)
def test_the_digest_changes_with_any_property_of_a_leaf(change: dict[str, Any]) -> None:
    leaf = LeafSpec("w", (32, 64))
    assert plan((leaf,), 2).digest != plan((replace(leaf, **change),), 2).digest


def test_the_digest_covers_frozen_leaves() -> None:
    leaf, frozen = LeafSpec("w", (64,)), LeafSpec("base", (64,), trainable=False)
    digests = {plan(leaves, 1).digest for leaves in ([leaf], [leaf, frozen])}
    assert len(digests | {plan([leaf, replace(frozen, shape=(65,))], 1).digest}) == 3


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
    [
        ((LeafSpec("w", (8,)),), 0),
        ((), 1),
        ((LeafSpec("w", (8,), trainable=False),), 1),
        ((LeafSpec("w", (-1, 8)),), 1),
        ((LeafSpec("w", (8,)), LeafSpec("w", (4,))), 1),
        ((LeafSpec("w", (9,), unit=4),), 1),
        ((LeafSpec("w", (8,), unit=-4),), 1),
        ((LeafSpec("w", (MOST_SLICES + 1,), unit=1),), 1),
    ],
    ids=[
        *("no fragments", "no parameters", "all frozen", "negative dimension", "one name twice"),
        *("units that do not divide", "negative units", "too many units"),
    ],
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
