"""Tokens, tokens per step, and staleness decide how much a contribution counts."""

from __future__ import annotations

import math
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skerry.algorithm.weighting import by_slice, discounted, normalised, shares, weight
from tests.support.strategies import weights, work

quick = settings(max_examples=150)


def test_a_weight_is_tokens_times_tokens_per_step() -> None:
    assert weight(1000, 10) == 1000 * 100
    assert weight(1000, 0) == 0.0
    assert weight(1000, 1, bare=True) == 1000


@quick
@given(raw=weights())
def test_shares_sum_to_one(raw: list[float]) -> None:
    assert math.fsum(normalised(raw)) == pytest.approx(1.0)


@quick
@given(raw=weights(min_size=2), data=st.data())
def test_the_order_of_contributions_changes_no_share(raw: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(raw))))
    shares = normalised(raw)
    assert normalised([raw[i] for i in order]) == tuple(shares[i] for i in order)


@quick
@given(raw=weights())
def test_shares_keep_the_proportions(raw: list[float]) -> None:
    total = math.fsum(raw)
    assume(total > 1e-300)
    assert normalised(raw) == pytest.approx([w / total for w in raw], rel=1e-12, abs=1e-300)


@quick
@given(done=work())
def test_only_contributions_of_work_get_a_share(done: list[tuple[int, int]]) -> None:
    raw = [weight(tokens, steps) for tokens, steps in done]
    assume(any(raw))
    assert all((share > 0) == (w > 0) for share, w in zip(normalised(raw), raw, strict=True))


def test_contributions_without_any_work_share_equally() -> None:
    assert normalised([0.0, 0.0, 0.0, 0.0]) == (0.25, 0.25, 0.25, 0.25)


def test_nothing_in_gives_nothing_out() -> None:
    assert normalised([]) == ()


def test_the_smallest_weights_do_not_vanish() -> None:
    assert normalised([5e-324, 5e-324]) == (0.5, 0.5)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_impossible_weights_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        normalised([1.0, bad])


@pytest.mark.parametrize(
    ("base", "version", "verdict"),
    [
        (7, 7, (1.0, "fresh")),
        (6, 7, (0.5, "late")),
        (4, 7, (0.125, "late")),
        (3, 7, (None, "too_stale")),
        (8, 7, (None, "base_in_future")),
    ],
)
def test_verdicts(base: int, version: int, verdict: tuple[float | None, str]) -> None:
    assert discounted(base, version, 3, 0.5) == verdict


def test_without_tolerance_only_fresh_ones_count() -> None:
    assert [discounted(base, 5, 0, 0.5)[0] for base in (4, 5)] == [None, 1.0]


@settings(max_examples=100)
@given(
    version=st.integers(0, 1000),
    bases=st.tuples(st.integers(0, 1000), st.integers(0, 1000)),
    tolerance=st.integers(0, 20),
    factor=st.floats(0.01, 1.0),
)
def test_being_staler_never_counts_more(
    version: int, bases: tuple[int, int], tolerance: int, factor: float
) -> None:
    older, newer = sorted(min(base, version) for base in bases)
    low, high = (discounted(base, version, tolerance, factor)[0] or 0.0 for base in (older, newer))
    assert 0.0 <= low <= high <= 1.0


@quick
@given(raw=work(), data=st.data())
def test_a_slice_weighs_its_own_tokens_times_the_tokens_of_a_step(
    raw: list[tuple[int, int]], data: st.DataObject
) -> None:
    parts = [data.draw(st.lists(st.integers(0, t), min_size=2, max_size=2)) for t, _ in raw]
    whole = [weight(*item) for item in raw]
    reach = [
        tuple(part / tokens for part in own) if tokens else ()
        for (tokens, _), own in zip(raw, parts, strict=True)
    ]
    shares = by_slice(normalised(whole), reach, 2)
    for s in range(2):
        own = [
            part[s] * (tokens / steps) if steps else 0.0
            for (tokens, steps), part in zip(raw, parts, strict=True)
        ]
        if sum(own):
            assert shares[:, s] == pytest.approx([w / sum(own) for w in own], rel=1e-9, abs=1e-12)
        elif sum(whole):
            assert not shares[:, s].any()


WORK = st.just(0.0) | st.floats(1e-30, 1e38)
"""What ``weight`` makes of any tokens and steps: its values lie within what floats can compare."""
DONE = st.lists(st.tuples(st.sampled_from("abcdef"), WORK), min_size=1, max_size=12)


@pytest.mark.parametrize("tiny", [sys.float_info.min / 8, 5e-324])
def test_next_to_no_work_gets_a_share_and_no_nan(tiny: float) -> None:
    assert math.fsum(shares([0.0, 1.0, tiny], ["a", "b", "c"], 1.0)) == pytest.approx(1)
    assert math.fsum(shares([9e14, 1.0, tiny], ["a", "b", "c"], 1.25)) == pytest.approx(1)


@given(done=DONE, most=st.floats(1, 4))
def test_no_learner_of_three_or_more_has_more_than_its_bound(
    done: list[tuple[str, float]], most: float
) -> None:
    learners = [name for name, _ in done]
    found = shares([amount for _, amount in done], learners, most)
    assert math.fsum(found) == pytest.approx(1)
    held = dict.fromkeys(learners, 0.0)
    for share, learner in zip(found, learners, strict=True):
        held[learner] += share
    working = {name for name, amount in done if amount > 0}
    if len(held) > 2 and len(working) * most > len(held):
        assert max(held.values()) <= most / len(held) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("raw", "most"), [((1.0, 2.0, 1.5, 1.7), 2.0), ((1.0, 9.0), 1.0), ((1.0, 9.0, 1.0), 0.0)]
)
def test_shares_within_their_bound_change_no_bit(raw: tuple[float, ...], most: float) -> None:
    assert shares(raw, "abcd"[: len(raw)], most) == normalised(raw)
