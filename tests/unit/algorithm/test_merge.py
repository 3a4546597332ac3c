"""Average and radial-directional merges of quantised outer gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm import merge, merge_numba, merge_numpy, quantise_numpy
from skerry.algorithm.fragments import BLOCK, Fragment, Slice
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.planes import Planes, peak
from skerry.algorithm.presets import MERGES, ROBUST
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import ConfigError, Diverged

FRAGMENT = Fragment(3, (Slice(0, 0, 1000), Slice(1, 0, 1), Slice(2, 5, 5 + 2 * BLOCK)))
NO_EMBEDDING = (False, False, False)
KINDS = st.sampled_from(tuple(SCHEMES))


def vector(seed: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Gaussian slices of FRAGMENT, zero in the padding."""
    rng = np.random.default_rng(seed)
    x = np.zeros(FRAGMENT.padded_size, np.float32)
    for part, start in zip(FRAGMENT.slices, FRAGMENT.offsets, strict=False):
        x[start : start + part.size] = rng.standard_normal(part.size) * scale
    return x


def contribution(x: NDArray[np.float32], scheme: str = "f32") -> OuterGradient:
    return OuterGradient(scheme, quantise_numpy.quantise(scheme, x))


def decoded(item: OuterGradient) -> NDArray[np.float64]:
    return quantise_numpy.dequantise(item.scheme, item.planes).astype(np.float64)


def rda(items: list[OuterGradient], weights: list[float]) -> NDArray[np.float32]:
    return merge.merge("rda", items, weights, FRAGMENT, NO_EMBEDDING)


def slices_of(x: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [x[a:b] for a, b in zip(FRAGMENT.offsets[:-1], FRAGMENT.offsets[1:], strict=True)]


groups = st.lists(st.tuples(st.integers(0, 99), KINDS, st.integers(1, 5)), min_size=1, max_size=6)


@given(group=groups)
@settings(max_examples=30)
def test_rda_follows_its_formula_per_tensor(group: list[tuple[int, str, int]]) -> None:
    items = [contribution(vector(seed), scheme) for seed, scheme, _ in group]
    shares = np.array([share for *_, share in group], np.float64)
    shares /= shares.sum()
    parts = [slices_of(decoded(item)) for item in items]
    expected: list[NDArray[np.float64]] = []
    for s in range(len(FRAGMENT.slices)):
        norms = [float(np.linalg.norm(p[s])) for p in parts]
        mean = sum(w * p[s] / n for w, p, n in zip(shares, parts, norms, strict=True))
        length = float(np.linalg.norm(mean))
        if length <= merge.DEGENERATE:
            expected.append(np.asarray(sum(w * p[s] for w, p in zip(shares, parts, strict=True))))
        else:
            expected.append(float(np.dot(shares, norms)) * np.asarray(mean) / length)
    assert rda(items, shares.tolist()) == pytest.approx(np.concatenate(expected), abs=2e-4)


@given(group=groups, method=st.sampled_from(MERGES), data=st.data())
@settings(max_examples=40)
def test_a_permutation_of_contributions_changes_no_bit(
    group: list[tuple[int, str, int]], method: str, data: st.DataObject
) -> None:
    total = sum(share for *_, share in group)
    pairs = [(contribution(vector(seed), s), share / total) for seed, s, share in group]
    shuffled = data.draw(st.permutations(pairs))
    first, second = (
        merge.merge(
            method, [i for i, _ in order], [w for _, w in order], FRAGMENT, (True, False, False)
        )
        for order in (pairs, shuffled)
    )
    assert np.array_equal(first.view(np.uint32), second.view(np.uint32))


def test_opposite_contributions_of_equal_weight_and_norm_commute() -> None:
    x = contribution(vector(1))
    y = contribution(-vector(1))
    z = contribution(vector(2))
    weights = [0.25, 0.25, 0.5]
    assert np.array_equal(rda([x, y, z], weights), rda([y, x, z], weights))


@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_rda_keeps_the_norm_whatever_m(count: int) -> None:
    items = [contribution(vector(seed), "int4") for seed in range(count)]
    weights = np.random.default_rng(0).dirichlet(np.ones(count))
    norms = np.array([merge.slice_norms(FRAGMENT, decoded(i).astype(np.float32)) for i in items])
    merged = merge.slice_norms(FRAGMENT, rda(items, weights.tolist()))
    assert merged == pytest.approx(weights @ norms, rel=1e-5)


def test_embeddings_are_averaged_even_by_rda() -> None:
    items = [contribution(vector(seed), "int4") for seed in range(3)]
    weights = [0.5, 0.3, 0.2]
    mixed = merge.merge("rda", items, weights, FRAGMENT, (True, False, True))
    average = merge.merge("average", items, weights, FRAGMENT, NO_EMBEDDING)
    a, b = FRAGMENT.offsets[1], FRAGMENT.offsets[2]
    assert np.array_equal(mixed[:a], average[:a])
    assert np.array_equal(mixed[b:], average[b:])
    assert not np.array_equal(mixed[a:b], average[a:b])


@pytest.mark.parametrize("scheme", tuple(SCHEMES))
@pytest.mark.parametrize("method", MERGES)
def test_one_contribution_is_merged_to_itself(scheme: str, method: str) -> None:
    item = contribution(vector(4), scheme)
    merged = merge.merge(method, [item], [1.0], FRAGMENT, NO_EMBEDDING)
    assert merged == pytest.approx(decoded(item), rel=1e-5)


def test_directions_that_cancel_fall_back_to_the_average() -> None:
    x, y = vector(5), vector(5) * np.float32(-3)
    merged = rda([contribution(x), contribution(y)], [0.5, 0.5])
    assert merged == pytest.approx(-x, rel=1e-5)


def test_nothing_but_zeros_merges_to_zero() -> None:
    zero = contribution(np.zeros(FRAGMENT.padded_size, np.float32), "int4")
    assert not rda([zero, zero], [0.5, 0.5]).any()


def test_padding_stays_zero() -> None:
    merged = rda([contribution(vector(seed), "int8") for seed in range(3)], [0.2, 0.3, 0.5])
    assert not merged[1000 : FRAGMENT.offsets[1]].any()
    assert not merged[FRAGMENT.offsets[1] + 1 : FRAGMENT.offsets[2]].any()


def test_header_norms_save_a_pass_and_give_the_same_merge() -> None:
    items = [contribution(vector(seed), "int4") for seed in range(4)]
    stated = [
        OuterGradient(
            i.scheme, i.planes, merge.slice_norms(FRAGMENT, decoded(i).astype(np.float32))
        )
        for i in items
    ]
    assert np.array_equal(rda(items, [0.25] * 4), rda(stated, [0.25] * 4))


@pytest.mark.parametrize("norms", [(1.0,), (1.0, float("nan"), 1.0), (1.0, -1.0, 1.0)])
def test_header_norms_that_cannot_be_are_ignored(norms: tuple[float, ...]) -> None:
    item = contribution(vector(7))
    lying = OuterGradient(item.scheme, item.planes, norms)
    assert np.array_equal(rda([lying], [1.0]), rda([item], [1.0]))


def test_slice_norms_survive_values_whose_squares_leave_f32() -> None:
    x = np.zeros(FRAGMENT.padded_size, np.float32)
    x[0], x[FRAGMENT.offsets[1]] = 1e-30, 1e30
    assert merge.slice_norms(FRAGMENT, x) == pytest.approx((1e-30, 1e30, 0.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("method", MERGES)
def test_a_contribution_that_decodes_to_nonsense_is_refused(bad: float, method: str) -> None:
    x = vector(8)
    x[3] = bad
    item = OuterGradient("f32", Planes(x.view(np.uint8).reshape(-1, 1024), _NO_SCALES))
    with pytest.raises(Diverged):
        merge.merge(method, [item], [1.0], FRAGMENT, NO_EMBEDDING)


_NO_SCALES = np.zeros(0, np.uint16)


@pytest.mark.parametrize("weights", [[0.5, 0.6], [1.0], [1.5, -0.5], [0.0, 0.0]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    items = [contribution(vector(seed)) for seed in range(2)]
    with pytest.raises(ValueError, match="sum of 1"):
        rda(items, weights)


def test_a_contribution_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks"):
        rda([contribution(np.zeros(BLOCK, np.float32))], [1.0])


@pytest.mark.parametrize(
    ("largest", "of", "counts"),
    [
        (99.0, 0.01, True),
        (150.0, 2.0, True),
        (150.0, 1.0, False),
        (1e30, None, True),
        (np.inf, None, False),
        (np.nan, 1.0, False),
    ],
)
def test_what_no_training_can_have_moved_does_not_count(
    largest: float, of: float | None, *, counts: bool
) -> None:
    x = np.full(FRAGMENT.padded_size, largest, np.float32)
    master = None if of is None else np.full(FRAGMENT.padded_size, of, np.float32)
    planes = quantise_numpy.quantise("f32", np.ones_like(x))
    planes.codes[:] = x.view(np.uint8).reshape(planes.codes.shape)
    item = merge.OuterGradient("f32", planes)
    assert merge.sound(item, FRAGMENT, master) is counts


@pytest.mark.parametrize("scheme", ["f32", "bf16", "int8", "int4", "e3m0", "int2"])
@given(seed=st.integers(0, 2**32 - 1), boast=st.floats(1.01, 1e30))
def test_a_norm_longer_than_the_values_does_not_count(scheme: str, seed: int, boast: float) -> None:
    x = np.random.default_rng(seed).standard_normal(FRAGMENT.padded_size).astype(np.float32)
    planes = quantise_numpy.quantise(scheme, x)
    norms = merge.slice_norms(FRAGMENT, quantise_numpy.dequantise(scheme, planes))
    assert merge.sound(merge.OuterGradient(scheme, planes, norms), FRAGMENT, None)
    longest = np.sqrt(np.diff(FRAGMENT.offsets)) * peak(scheme, planes)
    wrong = (*norms[:-1], float(longest[-1]) * boast)
    assert not merge.sound(merge.OuterGradient(scheme, planes, wrong), FRAGMENT, None)


@pytest.mark.parametrize("norms", [(), (1.0,)])
def test_the_largest_contribution_is_found_in_a_fragment_of_one_tensor(
    norms: tuple[float, ...],
) -> None:
    one = Fragment(0, (Slice(0, 0, 2 * BLOCK),))
    items = [contribution(np.full(2 * BLOCK, size, np.float32)) for size in (1.0, 3.0, 2.0)]
    assert merge.largest([replace(item, norms=norms) for item in items], one) == 1


def median(values: NDArray[np.float32], weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """A rule as CONTRIBUTING describes it."""
    assert weights.sum() == pytest.approx(1)
    return np.median(values, axis=0)


def misspelt(_: NDArray[np.float32], weights: NDArray[np.float64]) -> object:
    return getattr(weights, "medain")  # noqa: B009 - as a person may write it


def one_number(values: NDArray[np.float32], _weights: NDArray[np.float64]) -> NDArray[np.float32]:
    return values[:1, 0]


@pytest.mark.parametrize("method", MERGES)
@given(group=groups, idle=st.integers(0, 2))
@settings(max_examples=30)
def test_an_expert_that_a_learner_never_used_does_not_dilute_the_others(
    method: str, group: list[tuple[int, str, int]], idle: int
) -> None:
    """A learner without tokens for a slice merges, there, as if it had not contributed."""
    items = [contribution(vector(seed), scheme) for seed, scheme, _ in group]
    raw = [float(share) for *_, share in group]
    reach = tuple(float(s != idle) for s in range(3))
    bystander = replace(contribution(vector(100)), reach=reach)
    alone = merge.merge(method, items, shares_of(raw), FRAGMENT, NO_EMBEDDING)
    beside = shares_of([*raw, 2.5])
    both = merge.merge(method, [*items, bystander], beside, FRAGMENT, NO_EMBEDDING)
    plain = [*items, replace(bystander, reach=())]
    without = merge.merge(method, plain, beside, FRAGMENT, NO_EMBEDDING)
    for s, (start, stop) in enumerate(pairwise(FRAGMENT.offsets)):
        expected = alone if s == idle else without
        assert both[start:stop] == pytest.approx(expected[start:stop], rel=1e-5, abs=1e-6)


def shares_of(raw: list[float]) -> list[float]:
    return [share / sum(raw) for share in raw]


@given(group=groups, method=st.sampled_from(MERGES))
@settings(max_examples=30)
def test_tokens_that_reach_every_slice_change_no_bit(
    group: list[tuple[int, str, int]], method: str
) -> None:
    items = [contribution(vector(seed), scheme) for seed, scheme, _ in group]
    weights = shares_of([float(share) for *_, share in group])
    everywhere = [replace(item, reach=(1.0, 1.0, 1.0)) for item in items]
    found = merge.merge(method, everywhere, weights, FRAGMENT, NO_EMBEDDING)
    assert np.array_equal(found, merge.merge(method, items, weights, FRAGMENT, NO_EMBEDDING))


@pytest.mark.parametrize("method", [*MERGES, f"{__name__}:median"])
def test_a_slice_that_nobody_trained_is_zero_and_idle(
    method: str, allow_code: Callable[..., None]
) -> None:
    allow_code(__name__)
    items = [replace(contribution(vector(seed)), reach=(1.0, 0.0, 0.25)) for seed in range(3)]
    found = merge.direction(method, items, [0.2, 0.3, 0.5], FRAGMENT, NO_EMBEDDING)
    assert found.idle.tolist() == [False, True, False]
    start, stop = FRAGMENT.offsets[1:3]
    assert not found.vector[start:stop].any()
    assert found.vector[:start].any()


def test_reach_of_another_number_of_slices_is_refused() -> None:
    with pytest.raises(ValueError, match="3 slices"):
        rda([replace(contribution(vector(0)), reach=(1.0,))], [1.0])


MEDIAN = f"{__name__}:median"
EMBEDDING_FIRST = (True, False, False)


def test_a_rule_of_ones_own_merges_all_but_embeddings(allow_code: Callable[..., None]) -> None:
    allow_code(__name__)
    items = [contribution(vector(seed), "int8") for seed in range(3)]
    weights = [0.2, 0.3, 0.5]
    found = merge.merge(MEDIAN, items, weights, FRAGMENT, EMBEDDING_FIRST)
    average = merge.merge("average", items, weights, FRAGMENT, EMBEDDING_FIRST)
    middle = np.median([decoded(item) for item in items], axis=0)
    first = FRAGMENT.offsets[1]
    assert np.array_equal(found[:first], average[:first])
    assert np.array_equal(found[first:], middle[first:].astype(np.float32))
    assert np.array_equal(
        merge.merge(MEDIAN, items[::-1], weights[::-1], FRAGMENT, EMBEDDING_FIRST), found
    )


def test_a_rule_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set allow_code=tests"):
        merge.rule_of(MEDIAN)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("no_such_module:rule", "no_such_module"),
        (f"{__name__}:missing", "missing"),
        ("mean", "use average, rda, .* or module:function"),
        (f"{__name__}:one_number", r"shape \(1,\) for 1000 values"),
        (f"{__name__}:misspelt", r"failed \(.*'medain'.*; test_merge\.py, line \d+\)"),
    ],
)
def test_a_rule_that_does_not_work_is_a_config_error(
    method: str, problem: str, allow_code: Callable[..., None]
) -> None:
    allow_code(__name__, "no_such_module")
    with pytest.raises(ConfigError, match=problem) as caught:
        merge.merge(method, [contribution(vector(0))], [1.0], FRAGMENT, NO_EMBEDDING)
    assert caught.value.path == "sync.merge"


honest = st.lists(st.integers(0, 99), min_size=2, max_size=8)


@pytest.mark.parametrize("method", ROBUST)
@given(seeds=honest, liar=st.floats(-(2.0**99), 2.0**99, width=32), data=st.data())
@settings(max_examples=40)
def test_one_liar_moves_no_robust_merge_beyond_what_the_others_say(
    method: str, seeds: list[int], liar: float, data: st.DataObject
) -> None:
    """Embeddings included, whatever weight it has."""
    told = [contribution(vector(seed)) for seed in seeds]
    lie = contribution(np.full(FRAGMENT.padded_size, liar, np.float32))
    raw = data.draw(st.lists(st.floats(0.1, 9), min_size=len(told) + 1, max_size=len(told) + 1))
    merged = merge.merge(method, [*told, lie], shares_of(raw), FRAGMENT, (True, False, False))
    others = np.stack([decoded(item) for item in told])
    slack = 1e-5 * np.abs(others).max()
    assert (merged >= others.min(axis=0) - slack).all()
    assert (merged <= others.max(axis=0) + slack).all()


@given(
    count=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
    dropped=st.integers(0, 2),
    ties=st.booleans(),
)
def test_trimming_in_numba_equals_numpy(count: int, seed: int, dropped: int, *, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, 300)).astype(np.float32)
    values = np.round(values) if ties else values
    weights, dropped = rng.random(count) + 0.1, min(dropped, (count - 1) // 2)
    expected, found = np.empty((2, 300), np.float32)
    merge_numpy.trimmed(values, weights, dropped, expected)
    merge_numba.trimmed(values, weights, dropped, found)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("method", MERGES)
@given(group=groups, cut=st.floats(0, 0.99))
@settings(max_examples=20)
def test_what_is_cut_counts_as_if_it_had_been_shorter(
    method: str, group: list[tuple[int, str, int]], cut: float
) -> None:
    items = [contribution(vector(seed)) for seed, _, _ in group]
    weights = shares_of([float(share) for *_, share in group])
    shorter = contribution(decoded(items[0]).astype(np.float32) * np.float32(1 - cut))
    cut_off = [replace(items[0], cut=cut), *items[1:]]
    found = merge.merge(method, cut_off, weights, FRAGMENT, EMBEDDING_FIRST)
    expected = merge.merge(method, [shorter, *items[1:]], weights, FRAGMENT, EMBEDDING_FIRST)
    if method != "median_of_means":  # which groups by an order that depends on contents
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
