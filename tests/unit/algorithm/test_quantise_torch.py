"""The codec in torch's operations equals the reference to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from skerry.algorithm import quantise_numba
from skerry.algorithm.fragments import BLOCK, Fragment, Slice
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import UnknownScheme

torch = pytest.importorskip("torch")
quantise_torch = pytest.importorskip("skerry.algorithm.quantise_torch")
torch.set_num_threads(1)

F32s = NDArray[np.float32]
F32_MAX = float(np.finfo(np.float32).max)
NAMES = tuple(name for name, scheme in SCHEMES.items() if not scheme.feedback)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
extremes = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, F32_MAX, -F32_MAX, 1.0])
vectors = st.integers(0, 3).flatmap(
    lambda blocks: arrays(np.float32, blocks * BLOCK, elements=floats | extremes)
)


def equals_the_kernels(name: str, x: F32s) -> bool:
    expected = quantise_numba.quantise(name, x)
    found = quantise_torch.quantise(name, torch.from_numpy(x.copy()))
    decoded = quantise_torch.dequantise(name, found).numpy()
    wanted = quantise_numba.dequantise(name, expected)
    return (
        bool(found.finite)
        and np.array_equal(found.codes.numpy(), expected.codes)
        and np.array_equal(found.scales.numpy().view(np.uint16), expected.scales)
        and np.array_equal(decoded.view(np.uint32), wanted.view(np.uint32))
    )


@given(x=vectors, name=st.sampled_from(NAMES))
@settings(max_examples=80)
def test_torch_equals_the_kernels_at_extremes(x: F32s, name: str) -> None:
    assert equals_the_kernels(name, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-39, 1e-37, 1e-6, 1.0, 1e30, 5e37])
def test_torch_equals_the_kernels_at_any_magnitude(name: str, magnitude: float) -> None:
    drawn = np.random.default_rng(0).standard_normal(40 * BLOCK) * magnitude
    assert equals_the_kernels(name, drawn.astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen(name: str, bad: float) -> None:
    x = torch.zeros(2 * BLOCK)
    x[BLOCK + 3] = bad
    assert not quantise_torch.quantise(name, x).finite


def test_a_scheme_with_feedback_is_left_to_the_host() -> None:
    with pytest.raises(UnknownScheme, match="residuals"):
        quantise_torch.quantise("int2", torch.zeros(BLOCK))


def test_norms_are_those_of_every_backend() -> None:
    fragment = Fragment(0, (Slice(0, 0, 100), Slice(1, 0, 300)))
    x = np.random.default_rng(1).standard_normal(fragment.padded_size).astype(np.float32) * 1e20
    found = quantise_torch.slice_norms(fragment, torch.from_numpy(x))
    np.testing.assert_allclose(found.numpy(), slice_norms(fragment, x), rtol=1e-6)
