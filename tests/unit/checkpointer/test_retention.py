"""Which checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skerry_checkpointer.retention import keep

indices = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 200), max_size=40)
newest = st.integers(1, 10)
every = st.integers(0, 12)


def named(count: int) -> dict[str, int]:
    return {f"step-{index:04d}": index for index in range(count)}


def test_the_newest_and_every_mth_stay() -> None:
    kept = keep(named(25), newest=2, every=10)
    assert sorted(kept) == ["step-0000", "step-0010", "step-0020", "step-0023", "step-0024"]


def test_the_first_counts_as_an_mth_one() -> None:
    assert "step-0000" in keep(named(100), newest=1, every=7)


def test_none_stays_for_ever_when_every_is_zero() -> None:
    assert keep(named(5), newest=1, every=0) == {"step-0004"}


@given(indices, newest, every)
def test_at_least_the_newest_n_stay(indices: dict[str, int], newest: int, every: int) -> None:
    kept = keep(indices, newest, every)
    gone = [indices[name] for name in indices.keys() - kept]
    assert len(kept) >= min(newest, len(indices))
    assert all(sum(indices[name] >= index for name in kept) >= newest for index in gone)


@given(st.integers(1, 120), newest, every)
def test_thinning_out_after_each_leaves_what_thinning_out_once_leaves(
    count: int, newest: int, every: int
) -> None:
    left: dict[str, int] = {}
    for name, index in named(count).items():
        left[name] = index
        left = {kept: left[kept] for kept in keep(left, newest, every)}
    assert set(left) == keep(named(count), newest, every)
