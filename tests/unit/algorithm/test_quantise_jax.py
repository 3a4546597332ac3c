"""The device codec equals the numpy reference to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import quantise_jax, quantise_numpy
from skerry.algorithm.fragments import BLOCK, Fragment, Slice
from skerry.algorithm.planes import Planes
from skerry.algorithm.schemes import SCHEMES

NAMES = tuple(SCHEMES)
MAGNITUDES = (0.0, 1e-45, 1e-40, 1e-37, 1e-6, 1.0, 1e30, 5e37)


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    """Refuse implicit promotions."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def sample(magnitude: float) -> NDArray[np.float32]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(9 * BLOCK) * magnitude).astype(np.float32)
    x[BLOCK : 2 * BLOCK] = 0
    x[2 * BLOCK : 3 * BLOCK] *= rng.random(BLOCK) > 0.99
    x[3 * BLOCK] = -0.0
    x[4 * BLOCK] = np.finfo(np.float32).max
    x[5 * BLOCK] = 1e-45
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_encoding_equals_the_reference(name: str, magnitude: float) -> None:
    x = sample(magnitude)
    expected, found = quantise_numpy.quantise(name, x), quantise_jax.quantise(name, jnp.array(x))
    assert np.array_equal(np.asarray(found.scales), expected.scales)
    assert np.array_equal(np.asarray(found.codes), expected.codes)
    assert bool(found.finite)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_decoding_equals_the_reference(name: str, magnitude: float) -> None:
    planes = quantise_numpy.quantise(name, sample(magnitude))
    decoded = quantise_jax.dequantise(name, jnp.array(planes.codes), jnp.array(planes.scales))
    expected = quantise_numpy.dequantise(name, planes)
    assert np.array_equal(np.asarray(decoded).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "int2"])
def test_every_byte_decodes_as_in_the_reference(name: str) -> None:
    kind = SCHEMES[name]
    codes = np.random.default_rng(4).integers(0, 256, (64, kind.code_bytes)).astype(np.uint8)
    planes = Planes(codes, np.full(64, 0x3F81, np.uint16))
    decoded = quantise_jax.dequantise(name, jnp.array(codes), jnp.array(planes.scales))
    assert np.array_equal(np.asarray(decoded), quantise_numpy.dequantise(name, planes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_flagged(name: str, bad: float) -> None:
    x = sample(1.0)
    x[-1] = bad
    assert not bool(quantise_jax.quantise(name, jnp.array(x)).finite)


def test_encode_measures_the_decoded_value_per_slice() -> None:
    fragment = Fragment(0, (Slice(0, 0, 300), Slice(1, 0, 1), Slice(2, 0, 6 * BLOCK)))
    x = np.zeros(fragment.padded_size, np.float32)
    x[: 2 * BLOCK] = 1e-30
    x[3 * BLOCK :] = np.random.default_rng(1).standard_normal(6 * BLOCK)
    planes, decoded, norms = quantise_jax.encode("int4", fragment, jnp.array(x))
    expected = quantise_numpy.dequantise("int4", quantise_numpy.quantise("int4", x)).astype(
        np.float64
    )
    assert np.array_equal(np.asarray(decoded), expected)
    assert bool(planes.finite)
    wanted = [
        np.linalg.norm(expected[a:b])
        for a, b in zip(fragment.offsets[:-1], fragment.offsets[1:], strict=True)
    ]
    assert np.asarray(norms) == pytest.approx(wanted, rel=1e-5)
