"""Late contributions count less, very late ones and those from the future not at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.weighting import discounted


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


def test_the_discount_can_be_any_function_of_staleness() -> None:
    assert discounted(3, 7, 9, lambda behind: 1 / (1 + behind)) == (0.2, "late")


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
