"""The scheme table, its numpy reference, and the backends that equal it to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from skerry.algorithm import (
    backend,
    merge_numba,
    merge_numpy,
    quantise_jax,
    quantise_numba,
    quantise_numpy,
)
from skerry.algorithm.fragments import BLOCK, Fragment, Slice
from skerry.algorithm.merge_numpy import OuterGradient, Spans
from skerry.algorithm.planes import Planes, peak
from skerry.algorithm.quantise_numpy import quantise
from skerry.algorithm.schemes import DELTAS, SCHEMES, raw_bytes
from skerry.errors import Diverged, UnknownScheme

pytestmark = pytest.mark.usefixtures("optimised")

F32s = NDArray[np.float32]
F32_MAX = float(np.finfo(np.float32).max)
NAMES = tuple(SCHEMES)
SCALED = tuple(name for name, scheme in SCHEMES.items() if scheme.has_scales)
BAD = (np.nan, np.inf, -np.inf)
MAGNITUDES = (0.0, 1e-45, 1e-39, 1e-37, 1e-6, 1.0, 1e30, 5e37)

# Extremes are what break a quantiser: let hypothesis reach for them in every block.
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
extremes = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, F32_MAX, -F32_MAX, 1.0])
vectors = st.integers(0, 3).flatmap(
    lambda blocks: arrays(np.float32, blocks * BLOCK, elements=finite | extremes, fill=st.just(0.0))
)


class OnDevice:
    """The device codec with the functions of the others."""

    @staticmethod
    def quantise(name: str, x: F32s) -> Planes:
        codes, scales, whole = quantise_jax.quantise(name, jnp.array(x))
        if not bool(whole):
            raise Diverged
        return Planes(np.asarray(codes), np.asarray(scales))

    @staticmethod
    def dequantise(name: str, planes: Planes) -> F32s:
        given = jnp.array(planes.codes), jnp.array(planes.scales)
        return np.asarray(quantise_jax.dequantise(name, *given))


CODECS: dict[str, Any] = {"numba": quantise_numba, "jax": OnDevice}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
every_scheme = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True, scope="module")
def strict_jax() -> Iterator[None]:
    """Refuse implicit promotions."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def block(*head: float) -> F32s:
    """One block that starts with ``head``."""
    x = np.zeros(BLOCK, np.float32)
    x[: len(head)] = head
    return x


def gaussian(seed: int, blocks: int) -> F32s:
    return np.random.default_rng(seed).standard_normal(blocks * BLOCK).astype(np.float32)


def sample(magnitude: float) -> F32s:
    """Blocks of all kinds: dense, empty, sparse, with extremes."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(9 * BLOCK) * magnitude).astype(np.float32)
    x[BLOCK : 2 * BLOCK] = 0
    x[2 * BLOCK : 3 * BLOCK] *= rng.random(BLOCK) > 0.99
    x[3 * BLOCK :: BLOCK][:3] = -0.0, np.finfo(np.float32).max, 1e-45
    return x


def round_trip(scheme: str, x: F32s) -> F32s:
    return quantise_numpy.dequantise(scheme, quantise(scheme, x))


def same_bits(a: F32s, b: F32s) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def equals_the_reference(codec: Any, name: str, x: F32s) -> bool:
    expected, found = quantise(name, x), codec.quantise(name, x)
    same = [np.array_equal(a, b) for a, b in zip(found, expected, strict=True)]
    decoded = codec.dequantise(name, expected)
    return all(same) and same_bits(decoded, quantise_numpy.dequantise(name, expected))


@given(x=vectors, name=st.sampled_from(NAMES))
@settings(max_examples=80)
def test_kernels_equal_the_reference(x: F32s, name: str) -> None:
    assert equals_the_reference(quantise_numba, name, x)


@every_codec
@every_scheme
@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_codec_equals_the_reference_at_any_magnitude(
    codec: Any, name: str, magnitude: float
) -> None:
    assert equals_the_reference(codec, name, sample(magnitude))


@every_codec
@pytest.mark.parametrize("name", SCALED)
def test_every_byte_decodes_as_in_the_reference(codec: Any, name: str) -> None:
    codes = np.random.default_rng(4).integers(0, 256, (64, SCHEMES[name].code_bytes))
    planes = Planes(codes.astype(np.uint8), np.full(64, 0x3F81, np.uint16))
    assert same_bits(codec.dequantise(name, planes), quantise_numpy.dequantise(name, planes))


@pytest.mark.parametrize("codec", [quantise_numpy, *CODECS.values()], ids=["numpy", *CODECS])
@every_scheme
@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite_is_refused(codec: Any, name: str, bad: float) -> None:
    x = np.ones(9 * BLOCK, np.float32)
    x[-1] = bad
    with pytest.raises(Diverged):
        codec.quantise(name, x)


@given(x=vectors, name=st.sampled_from(NAMES))
@settings(max_examples=60)
def test_error_stays_within_the_table(x: F32s, name: str) -> None:
    scheme = SCHEMES[name]
    decoded = round_trip(name, x).reshape(-1, BLOCK).astype(np.float64)
    exact = x.reshape(-1, BLOCK).astype(np.float64)
    bound = scheme.relative_error * np.abs(exact).max(axis=1, keepdims=True, initial=0)
    assert bool(np.isfinite(decoded).all())
    assert bool((np.abs(decoded - exact) <= bound + scheme.absolute_error).all())


@given(x=vectors, name=st.sampled_from(SCALED))
@settings(max_examples=30)
def test_scaled_schemes_are_odd_so_they_have_no_bias_towards_a_sign(x: F32s, name: str) -> None:
    assert np.array_equal(round_trip(name, -x), -round_trip(name, x))


@every_scheme
@given(vectors)
def test_no_value_exceeds_the_peak(name: str, x: F32s) -> None:
    planes = quantise(name, x)
    top = peak(name, planes)
    assert float(np.abs(quantise_numpy.dequantise(name, planes)).max(initial=0)) <= top
    assert top <= 1.02 * float(np.abs(x).max(initial=0)) or top < 1e-30


@pytest.mark.parametrize("value", BAD)
def test_the_peak_of_what_is_not_finite_is_infinite(value: float) -> None:
    planes = quantise("f32", np.ones(BLOCK, np.float32))
    planes.codes[0, 8:12] = np.array([value], "<f4").view(np.uint8)
    assert peak("f32", planes) == np.inf


@pytest.mark.parametrize("name", DELTAS)
def test_integers_have_no_bias_and_come_back_as_they_went(name: str) -> None:
    x, levels = gaussian(1, 4096), SCHEMES[name].levels
    assert abs(float(np.dot(x, round_trip(name, x)) / np.dot(x, x)) - 1) < 2e-3
    codes = np.random.default_rng(3).integers(-levels, levels + 1, BLOCK)
    codes[0] = levels
    x = (codes * 2.0**-9).astype(np.float32)
    assert np.array_equal(round_trip(name, x), x)


def test_int4_costs_an_eighth_of_the_norm_on_a_gaussian() -> None:
    x = gaussian(2, 1024)
    assert 0.10 < float(np.linalg.norm(round_trip("int4", x) - x) / np.linalg.norm(x)) < 0.14


@pytest.mark.parametrize("name", ["e3m0", "int2"])
def test_encoding_powers_and_signs_again_changes_nothing(name: str) -> None:
    x = round_trip(name, gaussian(3, 64))
    assert np.array_equal(round_trip(name, x), x)


@every_scheme
def test_an_element_is_stored_alike_wherever_it_lies_in_its_block(name: str) -> None:
    x = np.random.default_rng(5).laplace(size=(64, BLOCK)).astype(np.float32)
    order = np.random.default_rng(6).permutation(BLOCK)
    found = round_trip(name, x[:, order].reshape(-1)).reshape(-1, BLOCK)
    assert np.array_equal(found, round_trip(name, x.reshape(-1)).reshape(-1, BLOCK)[:, order])
    for index in (0, 127, 128, 255):
        x = np.zeros(BLOCK, np.float32)
        x[index] = -1.5
        decoded = round_trip(name, x)
        assert np.flatnonzero(decoded).tolist() == [index]
        assert decoded[index] == pytest.approx(-1.5, rel=2.0**-7)


@pytest.mark.parametrize(
    ("value", "stored"),
    [(64, 64), (46.5, 64), (46.3, 32), (-1.46, -2), (-1.44, -1), (0.73, 1), (0.72, 0), (-0.5, 0)],
)
def test_e3m0_rounds_to_a_power_of_two_from_145_hundredths_up(value: float, stored: float) -> None:
    assert round_trip("e3m0", block(64, value))[1] == stored


BLOCKS_OF = {
    "gaussian": gaussian(8, 4096),
    "laplacian": np.random.default_rng(9).laplace(size=4096 * BLOCK).astype(np.float32),
}


@pytest.mark.parametrize("kind", BLOCKS_OF)
def test_e3m0_keeps_length_and_direction(kind: str) -> None:
    x = BLOCKS_OF[kind]
    decoded = round_trip("e3m0", x)
    along = float(np.dot(x, decoded))
    assert abs(along / float(np.dot(x, x)) - 1) < 5e-3
    assert along / float(np.linalg.norm(x) * np.linalg.norm(decoded)) > 0.98
    error, size = np.abs(decoded - x).reshape(-1, BLOCK), np.abs(x).reshape(-1, BLOCK)
    far_from_zero = size >= 0.74 / 64 * size.max(axis=1, keepdims=True)
    assert float((error[far_from_zero] / size[far_from_zero]).max()) < 0.3804


@pytest.mark.parametrize(("kind", "optimum"), [("gaussian", 0.1902), ("laplacian", 0.2642)])
def test_int2_loses_little_more_energy_than_the_best_three_levels(
    kind: str, optimum: float
) -> None:
    x = BLOCKS_OF[kind].astype(np.float64)
    error = round_trip("int2", BLOCKS_OF[kind]) - x
    assert float(np.square(error).sum() / np.square(x).sum()) < 1.04 * optimum


@given(x=vectors)
@settings(max_examples=60)
def test_int2_never_makes_an_element_worse_than_sending_nothing(x: F32s) -> None:
    exact = x.astype(np.float64)
    assert bool((np.abs(round_trip("int2", x) - exact) <= np.abs(exact)).all())


def test_int2_scale_follows_what_is_not_zero_and_a_third_of_the_peak_at_least() -> None:
    x = gaussian(10, 1)
    x[40:] = 0
    decoded = round_trip("int2", x)
    assert np.abs(decoded).max() == pytest.approx(1.5 * np.abs(x[:40]).mean(), rel=2.0**-7)
    assert not decoded[40:].any()
    spike = round_trip("int2", np.r_[np.float32(1), np.full(255, 1e-3, np.float32)])
    assert spike[0] == pytest.approx(1 / 3, rel=2.0**-7)
    assert not spike[1:].any()
    even = np.full(BLOCK, 0.5, np.float32)
    assert np.array_equal(round_trip("int2", even), even)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [0.0, -0.0, 5e-324, 1e-45, 1e-38, -(2.0**-121)])
def test_a_block_of_nothing_is_all_zero_bytes(name: str, value: float) -> None:
    planes = quantise(name, block(value))
    assert not planes.codes.any()
    assert not planes.scales.any()
    assert not round_trip(name, block(value)).view(np.uint32).any()


@every_scheme
@pytest.mark.parametrize("value", [F32_MAX, -F32_MAX])
def test_the_largest_float_stays_finite(name: str, value: float) -> None:
    decoded = round_trip(name, block(value))
    assert bool(np.isfinite(decoded).all())
    assert decoded[0] == pytest.approx(value, rel=2.0**-7)


def test_floats_keep_negative_zero_and_bf16_rounds_half_to_even() -> None:
    assert all(bool(np.signbit(round_trip(name, block(-0.0))[0])) for name in ("f32", "bf16"))
    decoded = round_trip("bf16", block(1 + 2.0**-8, 1 + 3 * 2.0**-8))
    assert decoded[:2].tolist() == [1.0, 1 + 4 * 2.0**-8]


HALVES = {"int4": (7, -2), "e3m0": (64, -2), "int2": (1, -1, 0, 1)}


@pytest.mark.parametrize(
    ("name", "code"), [("int4", 0xE7), ("e3m0", 0xA7), ("int2", 0b01_00_11_01)]
)
def test_parts_of_a_block_share_a_byte(name: str, code: int) -> None:
    values = np.array(HALVES[name], np.float32)
    assert set(quantise(name, np.repeat(values, BLOCK // values.size)).codes[0]) == {code}


def test_int8_puts_high_nibbles_before_low_ones() -> None:
    x = block(127, -1)
    x[128] = 0x35
    codes = quantise("int8", x).codes[0]
    assert codes[[0, 128, 1, 129]].tolist() == [0x37, 0x5F, 0x0F, 0x0F]


def test_codes_that_are_never_written_decode_to_a_plain_zero() -> None:
    for name, byte in (("e3m0", 0x88), ("int2", 0xAA)):
        codes = np.full((1, SCHEMES[name].code_bytes), byte, np.uint8)
        decoded = quantise_numpy.dequantise(name, Planes(codes, np.full(1, 0x3F80, np.uint16)))
        assert not decoded.view(np.uint32).any()


@every_scheme
def test_raw_bytes_are_the_planes_and_nothing_is_nothing(name: str) -> None:
    planes = quantise(name, np.ones(5 * BLOCK, np.float32))
    assert raw_bytes(name, 5) == planes.codes.nbytes + planes.scales.nbytes
    assert round_trip(name, np.zeros(0, np.float32)).shape == (0,)


def test_ids_are_unique_and_two_bits_alone_are_fed_back() -> None:
    assert len({scheme.id for scheme in SCHEMES.values()}) == len(SCHEMES)
    assert [name for name, scheme in SCHEMES.items() if scheme.feedback] == ["int2"]


ONE = np.zeros(BLOCK, np.float32)


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (lambda: quantise("int3", ONE), UnknownScheme, "'int3'"),
        (lambda: quantise("int4", np.zeros(257, np.float32)), ValueError, "whole blocks"),
        (lambda: quantise_numpy.dequantise("int8", quantise("int4", ONE)), ValueError, "no int8"),
    ],
)
def test_what_does_not_fit_is_refused(
    act: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        act()


@pytest.mark.parametrize("codec", [quantise_numba, quantise_numpy])
def test_decoding_takes_read_only_planes_into_the_given_output(codec: ModuleType) -> None:
    planes, out = quantise("int4", gaussian(2, 2)), np.empty(2 * BLOCK, np.float32)
    codes, scales = planes.codes.copy(), planes.scales.copy()
    codes.flags.writeable = scales.flags.writeable = False
    assert codec.dequantise("int4", Planes(codes, scales), out) is out
    assert same_bits(out, quantise_numpy.dequantise("int4", planes))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_joined_byte_planes_are_the_floats_that_they_were_taken_from(count: int) -> None:
    x = gaussian(5, 3)
    cut = np.uint32(0xFFFF_FFFF << 8 * (4 - count) & 0xFFFF_FFFF)
    planes = [(x.view(np.uint32) >> np.uint32(24 - 8 * n)).astype(np.uint8) for n in range(count)]
    for codec in (quantise_numba, quantise_numpy):
        out = np.full_like(x, np.nan)
        codec.join(planes, out)
        assert np.array_equal(out.view(np.uint32), x.view(np.uint32) & cut)


@pytest.mark.parametrize("codec", [quantise_numba, quantise_numpy])
@pytest.mark.parametrize("sizes", [(), (1, 768), (768, 767), (769, 768), (768,) * 5])
def test_byte_planes_of_another_length_are_refused(
    codec: ModuleType, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="do not make 768 f32"):
        codec.join([np.zeros(size, np.uint8) for size in sizes], np.zeros(768, np.float32))


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
    items = [OuterGradient(s, quantise(s, gaussian(i, 40))) for i, s in enumerate(schemes)]
    spans = Spans(np.array([0, 7]), np.array([7, 40]))
    weights = np.random.default_rng(5).random((len(items), 2)).astype(np.float32)
    expected, found = np.empty((2, 40 * BLOCK), np.float32)
    squares = merge_numpy.accumulate(items, weights, spans, expected)
    assert merge_numba.accumulate(items, weights, spans, found) == pytest.approx(squares)
    assert same_bits(found, expected)
    master, momentum = gaussian(6, 40), gaussian(7, 40)
    given_ = np.array([0.3, 1.7], np.float32), spans, master, momentum
    trace = merge_numpy.step(expected, *given_, lr=0.7, decay=0.9)
    fresh = merge_numba.step(found, *given_, lr=0.7, decay=0.9)
    assert trace is not None
    assert fresh is not None
    assert same_bits(fresh, trace)
    assert same_bits(found, expected)


def test_accumulation_leaves_other_spans_alone() -> None:
    item = OuterGradient("int4", quantise("int4", gaussian(8, 4)))
    for accumulate in (merge_numpy.accumulate, merge_numba.accumulate):
        out = np.full((4, BLOCK), 5, np.float32)
        spans = Spans(np.array([1]), np.array([2]))
        accumulate([item], np.ones((1, 1), np.float32), spans, out.reshape(-1))
        assert (out == 5).all(axis=1).tolist() == [True, False, True, True]


def test_a_scheme_without_kernels_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian(9, 40)
    items = [OuterGradient(s, quantise(s, x)) for s in ("int4", "e3m0")]
    spans, weights = Spans(np.array([0]), np.array([40])), np.ones((2, 1), np.float32)
    compiled, plain = np.empty((2, 40 * BLOCK), np.float32)
    merge_numba.accumulate(items, weights, spans, compiled)
    monkeypatch.setattr(quantise_numba, "COMPILED", quantise_numba.COMPILED - {"e3m0"})
    monkeypatch.setattr(merge_numba, "ACCUMULATED", merge_numba.ACCUMULATED - {"e3m0"})
    assert equals_the_reference(quantise_numba, "e3m0", x)
    merge_numba.accumulate(items, weights, spans, plain)
    assert same_bits(plain, compiled)


def test_encode_measures_the_decoded_value_per_slice() -> None:
    fragment = Fragment(0, (Slice(0, 0, 300), Slice(1, 0, 1), Slice(2, 0, 6 * BLOCK)))
    x = np.zeros(fragment.padded_size, np.float32)
    x[: 2 * BLOCK] = 1e-30
    x[3 * BLOCK :] = gaussian(1, 6)
    sizes = tuple(part.size for part in fragment.slices)
    planes, norms = quantise_jax.encode("int4", sizes, jnp.array(x))
    expected = round_trip("int4", x).astype(np.float64)
    assert bool(planes.finite)
    parts = np.split(expected, fragment.offsets[1:-1])
    assert np.asarray(norms) == pytest.approx([np.linalg.norm(p) for p in parts], rel=1e-5)


UNCACHED = """
from skerry.algorithm.quantise_numba import compiled, i64
def double(n): return n + n
assert compiled(i64)(double)(21) == 42
"""
"""numba refuses cache=True for code without a file, with the error of a read-only image."""
LIGHT = """
import sys, skerry.algorithm.backend, skerry.algorithm.merge, skerry.algorithm.outer
assert not {"numba", "jax", "optax"} & set(sys.modules)
"""


@pytest.mark.parametrize("source", [UNCACHED, LIGHT], ids=["compiles uncached", "imports light"])
def test_backend_in_a_process_of_its_own(source: str) -> None:
    subprocess.run([sys.executable, "-c", source], check=True, timeout=100)


def test_the_backend_is_numba_where_it_is_installed() -> None:
    assert backend.cpu() is quantise_numba
    assert backend.merger() is merge_numba
