"""The numba kernels equal the numpy reference to the last bit."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from skerry.algorithm import backend, merge_numba, merge_numpy, quantise_numba, quantise_numpy
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.merge_numpy import OuterGradient, Spans
from skerry.algorithm.planes import Planes
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import Diverged

NAMES = tuple(SCHEMES)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.integers(0, 3).flatmap(
    lambda blocks: arrays(np.float32, blocks * BLOCK, elements=finite, fill=st.just(0.0))
)


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def gaussian(seed: int, blocks: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(blocks * BLOCK).astype(np.float32)


@given(x=vectors, name=st.sampled_from(NAMES))
@settings(max_examples=80)
def test_codec_equals_the_reference(x: NDArray[np.float32], name: str) -> None:
    expected, found = quantise_numpy.quantise(name, x), quantise_numba.quantise(name, x)
    assert np.array_equal(found.codes, expected.codes)
    assert np.array_equal(found.scales, expected.scales)
    decoded = quantise_numba.dequantise(name, expected)
    assert same_bits(decoded, quantise_numpy.dequantise(name, expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1e-39, 1e-37, 1e-6, 1.0, 5e37])
def test_codec_equals_the_reference_on_dense_blocks(name: str, magnitude: float) -> None:
    x = gaussian(0, 300) * np.float32(magnitude)
    expected, found = quantise_numpy.quantise(name, x), quantise_numba.quantise(name, x)
    assert np.array_equal(found.codes, expected.codes)
    assert np.array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "int2"])
def test_every_byte_decodes_as_in_the_reference(name: str) -> None:
    kind = SCHEMES[name]
    codes = np.random.default_rng(4).integers(0, 256, (64, kind.code_bytes)).astype(np.uint8)
    scales = np.full(64, 0x3F81, np.uint16)
    planes = Planes(codes, scales)
    assert same_bits(
        quantise_numba.dequantise(name, planes), quantise_numpy.dequantise(name, planes)
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_joined_byte_planes_are_the_floats_that_they_were_taken_from(count: int) -> None:
    x = gaussian(5, 3)
    cut = np.uint32(0xFFFF_FFFF << 8 * (4 - count) & 0xFFFF_FFFF)
    planes = [(x.view(np.uint32) >> np.uint32(24 - 8 * n)).astype(np.uint8) for n in range(count)]
    for backend_of in (quantise_numba, quantise_numpy):
        out = np.full_like(x, np.nan)
        backend_of.join(planes, out)
        assert np.array_equal(out.view(np.uint32), x.view(np.uint32) & cut)


@pytest.mark.parametrize("codec", [quantise_numba, quantise_numpy])
@pytest.mark.parametrize("sizes", [(), (1, 768), (768, 767), (769, 768), (768,) * 5])
def test_byte_planes_of_another_length_are_refused(
    codec: ModuleType, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="do not make 768 f32"):
        codec.join([np.zeros(size, np.uint8) for size in sizes], np.zeros(768, np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    x = gaussian(1, 4)
    x[700] = bad
    with pytest.raises(Diverged):
        quantise_numba.quantise(name, x)


def test_read_only_planes_decode() -> None:
    planes = quantise_numba.quantise("int4", gaussian(2, 2))
    frozen = Planes(
        np.frombuffer(planes.codes.tobytes(), np.uint8).reshape(planes.codes.shape),
        np.frombuffer(planes.scales.tobytes(), np.uint16),
    )
    assert same_bits(
        quantise_numba.dequantise("int4", frozen), quantise_numba.dequantise("int4", planes)
    )


@pytest.mark.parametrize(
    "schemes",
    [
        ("int4",) * 4,
        ("int4",) * 9,
        ("int4", "int4"),
        ("int8",),
        ("f32", "bf16", "int8", "int4"),
        ("e3m0",) * 4,
        ("int2", "int4", "e3m0", "int2", "int2"),
    ],
    ids="-".join,
)
def test_accumulation_and_step_equal_the_reference(schemes: tuple[str, ...]) -> None:
    items = [
        OuterGradient(s, quantise_numba.quantise(s, gaussian(i, 40))) for i, s in enumerate(schemes)
    ]
    spans = Spans(np.array([0, 7]), np.array([7, 40]))
    weights = np.random.default_rng(5).random((len(items), 2)).astype(np.float32)
    expected, found = np.empty((2, 40 * BLOCK), np.float32)
    squares = merge_numpy.accumulate(items, weights, spans, expected)
    assert merge_numba.accumulate(items, weights, spans, found) == pytest.approx(squares)
    assert same_bits(found, expected)

    master, momentum = gaussian(6, 40), gaussian(7, 40)
    gains = np.array([0.3, 1.7], np.float32)
    trace = merge_numpy.step(expected, gains, spans, master, momentum, lr=0.7, decay=0.9)
    fresh = merge_numba.step(found, gains, spans, master, momentum, lr=0.7, decay=0.9)
    assert trace is not None
    assert fresh is not None
    assert same_bits(fresh, trace)
    assert same_bits(found, expected)


def test_accumulation_leaves_other_spans_alone() -> None:
    item = OuterGradient("int4", quantise_numba.quantise("int4", gaussian(8, 4)))
    for accumulate in (merge_numpy.accumulate, merge_numba.accumulate):
        out = np.full(4 * BLOCK, 5, np.float32)
        accumulate([item], np.ones((1, 1), np.float32), Spans(np.array([1]), np.array([2])), out)
        assert bool((out[:BLOCK] == 5).all())
        assert bool((out[2 * BLOCK :] == 5).all())
        assert not bool((out[BLOCK : 2 * BLOCK] == 5).any())


def test_kernels_compile_where_nothing_can_be_cached() -> None:
    # numba refuses cache=True for code without a file, with the error of a read-only image.
    source = (
        "from skerry.algorithm.quantise_numba import compiled, i64\n"
        "def double(n): return n + n\n"
        "assert compiled(i64)(double)(21) == 42"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=100)


def test_the_backend_is_numba_where_it_is_installed() -> None:
    assert backend.cpu() is quantise_numba
    assert backend.merger() is merge_numba


def test_importing_the_backend_loads_neither_numba_nor_jax() -> None:
    source = (
        "import sys, skerry.algorithm.backend, skerry.algorithm.merge, skerry.algorithm.outer\n"
        "assert not {'numba', 'jax', 'optax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60)


def test_a_scheme_without_kernels_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(9, 40)
    items = [OuterGradient(s, quantise_numba.quantise(s, x)) for s in ("int4", "e3m0")]
    spans, weights = Spans(np.array([0]), np.array([40])), np.ones((2, 1), np.float32)
    compiled, plain = np.empty((2, 40 * BLOCK), np.float32)
    merge_numba.accumulate(items, weights, spans, compiled)
    for module in (quantise_numba, merge_numba):
        monkeypatch.setattr(module, "COMPILED", quantise_numba.COMPILED - {"e3m0"})
    planes = quantise_numba.quantise("e3m0", x)
    assert np.array_equal(planes.codes, items[1].planes.codes)
    assert same_bits(
        quantise_numba.dequantise("e3m0", planes), quantise_numpy.dequantise("e3m0", planes)
    )
    merge_numba.accumulate(items, weights, spans, plain)
    assert same_bits(plain, compiled)
