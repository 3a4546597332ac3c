"""Adoption keeps exactly the progress that each method says."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm.adoption import Method, adopt
from tests.support.strategies import vectors

quick = settings(max_examples=60)
vector = vectors(300, largest=1e6)
NONE = np.float32(0)


@quick
@given(local=vector, captured=vector, fresh=vector)
def test_overwrite_takes_the_global_fragment_whatever_was_local(
    local: NDArray[np.float32], captured: NDArray[np.float32], fresh: NDArray[np.float32]
) -> None:
    assert np.array_equal(adopt("overwrite", local, captured, fresh, np.float32(0.5)), fresh)


@quick
@given(local=vector, fresh=vector)
def test_blending_nothing_is_overwriting_and_blending_all_is_ignoring(
    local: NDArray[np.float32], fresh: NDArray[np.float32]
) -> None:
    assert np.array_equal(adopt("blend", local, local, fresh, np.float32(0)), fresh)
    assert np.array_equal(adopt("blend", local, local, fresh, np.float32(1)), local)


@quick
@given(local=vector, fresh=vector, alpha=st.floats(0, 1))
def test_a_blend_lies_between(
    local: NDArray[np.float32], fresh: NDArray[np.float32], alpha: float
) -> None:
    slack = 1e-6 * (np.abs(local) + np.abs(fresh)) + 1e-37
    mixed = adopt("blend", local, local, fresh, np.float32(alpha))
    assert np.all(mixed <= np.maximum(local, fresh) + slack)
    assert np.all(mixed >= np.minimum(local, fresh) - slack)


@quick
@given(captured=vector, fresh=vector)
def test_rebasing_no_steps_is_overwriting(
    captured: NDArray[np.float32], fresh: NDArray[np.float32]
) -> None:
    assert np.array_equal(adopt("rebase", captured, captured, fresh, NONE), fresh)


@quick
@given(local=vector, captured=vector, fresh=vector)
def test_rebasing_keeps_what_was_done_since_the_capture(
    local: NDArray[np.float32], captured: NDArray[np.float32], fresh: NDArray[np.float32]
) -> None:
    """The next outer gradient holds these steps, neither lost nor contributed a second time."""
    gradient = fresh - adopt("rebase", local, captured, fresh, NONE)
    scale = np.abs(local) + np.abs(captured) + np.abs(fresh)
    assert np.all(np.abs(gradient - (captured - local)) <= 3e-7 * scale + 1e-37)


@pytest.mark.parametrize("method", get_args(Method))
def test_every_method_is_reached_by_name_and_stays_in_f32(method: Method) -> None:
    local, captured, fresh = (np.array([value], np.float32) for value in (5.0, 4.0, 8.0))
    adopted = adopt(method, local, captured, fresh, np.float32(0.5))
    assert adopted.dtype == np.float32
    assert adopted.tolist() == [{"overwrite": 8.0, "blend": 6.5, "rebase": 9.0}[method]]
