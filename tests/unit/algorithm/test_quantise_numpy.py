"""The scheme table and its numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from skerry.algorithm import quantise_numpy
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import Planes, peak
from skerry.algorithm.schemes import SCHEMES, raw_bytes
from skerry.errors import Diverged, UnknownScheme

F32_MAX = float(np.finfo(np.float32).max)
TINY = 5e-324
NAMES = tuple(SCHEMES)
INTEGERS = ("int8", "int4")
SCALED = tuple(name for name, scheme in SCHEMES.items() if scheme.has_scales)

# Extremes are what break a quantiser: let hypothesis reach for them in every block.
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
extremes = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, F32_MAX, -F32_MAX, 1.0])
vectors = st.integers(0, 3).flatmap(
    lambda blocks: arrays(np.float32, blocks * BLOCK, elements=finite | extremes, fill=st.just(0.0))
)


def block(*head: float) -> NDArray[np.float32]:
    """One block that starts with ``head``."""
    x = np.zeros(BLOCK, np.float32)
    x[: len(head)] = head
    return x


def round_trip(scheme: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return quantise_numpy.dequantise(scheme, quantise_numpy.quantise(scheme, x))


@given(x=vectors, name=st.sampled_from(NAMES))
@settings(max_examples=60)
def test_error_stays_within_the_table(x: NDArray[np.float32], name: str) -> None:
    scheme = SCHEMES[name]
    decoded = round_trip(name, x).reshape(-1, BLOCK).astype(np.float64)
    exact = x.reshape(-1, BLOCK).astype(np.float64)
    bound = scheme.relative_error * np.abs(exact).max(axis=1, keepdims=True, initial=0)
    assert bool(np.isfinite(decoded).all())
    assert bool((np.abs(decoded - exact) <= bound + scheme.absolute_error).all())


@given(x=vectors, name=st.sampled_from(SCALED))
@settings(max_examples=30)
def test_scaled_schemes_are_odd_so_they_have_no_bias_towards_a_sign(
    x: NDArray[np.float32], name: str
) -> None:
    assert np.array_equal(round_trip(name, -x), -round_trip(name, x))


@pytest.mark.parametrize("name", INTEGERS)
def test_rounding_has_no_bias_in_the_mean(name: str) -> None:
    x = np.random.default_rng(1).standard_normal(4096 * BLOCK).astype(np.float32)
    decoded = round_trip(name, x)
    gain = float(np.dot(x, decoded) / np.dot(x, x))
    assert abs(gain - 1) < 2e-3


def test_int4_costs_an_eighth_of_the_norm_on_a_gaussian() -> None:
    x = np.random.default_rng(2).standard_normal(1024 * BLOCK).astype(np.float32)
    error = np.linalg.norm(round_trip("int4", x) - x) / np.linalg.norm(x)
    assert 0.10 < float(error) < 0.14


@pytest.mark.parametrize("name", INTEGERS)
def test_encoding_what_was_decoded_changes_nothing(name: str) -> None:
    levels = SCHEMES[name].levels
    codes = np.random.default_rng(3).integers(-levels, levels + 1, BLOCK)
    codes[0] = levels
    x = (codes * 2.0**-9).astype(np.float32)
    assert np.array_equal(round_trip(name, x), x)


@pytest.mark.parametrize("name", ["e3m0", "int2"])
def test_encoding_powers_and_signs_again_changes_nothing(name: str) -> None:
    x = round_trip(name, np.random.default_rng(3).standard_normal(64 * BLOCK).astype(np.float32))
    assert np.array_equal(round_trip(name, x), x)


@pytest.mark.parametrize("name", NAMES)
def test_an_element_is_stored_alike_wherever_it_lies_in_its_block(name: str) -> None:
    x = np.random.default_rng(5).laplace(size=(64, BLOCK)).astype(np.float32)
    order = np.random.default_rng(6).permutation(BLOCK)
    found = round_trip(name, x[:, order].reshape(-1)).reshape(-1, BLOCK)
    assert np.array_equal(found, round_trip(name, x.reshape(-1)).reshape(-1, BLOCK)[:, order])


@pytest.mark.parametrize(
    ("value", "stored"),
    [(64, 64), (46.5, 64), (46.3, 32), (-1.46, -2), (-1.44, -1), (0.73, 1), (0.72, 0), (-0.5, 0)],
)
def test_e3m0_rounds_to_a_power_of_two_from_145_hundredths_up(value: float, stored: float) -> None:
    assert round_trip("e3m0", block(64, value))[1] == stored


def test_e3m0_is_off_by_at_most_38_hundredths_of_a_value_that_is_not_near_zero() -> None:
    x = np.random.default_rng(7).standard_normal(256 * BLOCK).astype(np.float32)
    error = np.abs(round_trip("e3m0", x) - x).reshape(-1, BLOCK)
    size = np.abs(x).reshape(-1, BLOCK)
    near_zero = size < 0.74 / 64 * size.max(axis=1, keepdims=True)
    assert float((error[~near_zero] / size[~near_zero]).max()) < 0.3804


BLOCKS_OF = {
    "gaussian": np.random.default_rng(8).standard_normal(4096 * BLOCK).astype(np.float32),
    "laplacian": np.random.default_rng(9).laplace(size=4096 * BLOCK).astype(np.float32),
}


def lost_energy(scheme: str, x: NDArray[np.float32]) -> float:
    """The error's share of a vector's energy."""
    error = (round_trip(scheme, x) - x).astype(np.float64)
    return float(np.square(error).sum() / np.square(x.astype(np.float64)).sum())


@pytest.mark.parametrize("kind", BLOCKS_OF)
def test_e3m0_keeps_length_and_direction(kind: str) -> None:
    x = BLOCKS_OF[kind]
    decoded = round_trip("e3m0", x)
    along = float(np.dot(x, decoded))
    assert abs(along / float(np.dot(x, x)) - 1) < 5e-3
    assert along / float(np.linalg.norm(x) * np.linalg.norm(decoded)) > 0.98


@pytest.mark.parametrize(("kind", "optimum"), [("gaussian", 0.1902), ("laplacian", 0.2642)])
def test_int2_loses_little_more_energy_than_the_best_three_levels(
    kind: str, optimum: float
) -> None:
    assert lost_energy("int2", BLOCKS_OF[kind]) < 1.04 * optimum


@given(x=vectors)
@settings(max_examples=60)
def test_int2_never_makes_an_element_worse_than_sending_nothing(x: NDArray[np.float32]) -> None:
    exact = x.astype(np.float64)
    assert bool((np.abs(round_trip("int2", x) - exact) <= np.abs(exact)).all())


def test_int2_scale_follows_what_is_not_zero() -> None:
    x = np.random.default_rng(10).standard_normal(BLOCK).astype(np.float32)
    x[40:] = 0
    decoded = round_trip("int2", x)
    present = np.abs(x[:40])
    assert np.abs(decoded).max() == pytest.approx(1.5 * present.mean(), rel=2.0**-7)
    assert not decoded[40:].any()


def test_int2_sends_a_third_of_a_spike_at_least_and_never_more_than_the_spike() -> None:
    spike = round_trip("int2", np.r_[np.float32(1), np.full(255, 1e-3, np.float32)])
    assert spike[0] == pytest.approx(1 / 3, rel=2.0**-7)
    assert not spike[1:].any()
    even = np.full(BLOCK, 0.5, np.float32)
    assert np.array_equal(round_trip("int2", even), even)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [0.0, -0.0, TINY, 1e-45, 1e-38, -(2.0**-121)])
def test_a_block_of_nothing_is_all_zero_bytes(name: str, value: float) -> None:
    planes = quantise_numpy.quantise(name, block(value))
    assert not planes.codes.any()
    assert not planes.scales.any()
    assert not round_trip(name, block(value)).view(np.uint32).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [F32_MAX, -F32_MAX])
def test_the_largest_float_stays_finite(name: str, value: float) -> None:
    decoded = round_trip(name, block(value))
    assert bool(np.isfinite(decoded).all())
    assert decoded[0] == pytest.approx(value, rel=2.0**-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_nonzero_element_keeps_its_place(name: str) -> None:
    for index in (0, 127, 128, 255):
        x = np.zeros(BLOCK, np.float32)
        x[index] = -1.5
        decoded = round_trip(name, x)
        assert np.flatnonzero(decoded).tolist() == [index]
        assert decoded[index] == pytest.approx(-1.5, rel=2.0**-7)


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_float_schemes_keep_negative_zero(name: str) -> None:
    assert bool(np.signbit(round_trip(name, block(-0.0))[0]))


def test_bf16_rounds_half_to_even() -> None:
    decoded = round_trip("bf16", block(1 + 2.0**-8, 1 + 3 * 2.0**-8))
    assert decoded[:2].tolist() == [1.0, 1 + 4 * 2.0**-8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(name: str, bad: float) -> None:
    x = np.ones(3 * BLOCK, np.float32)
    x[-1] = bad
    with pytest.raises(Diverged):
        quantise_numpy.quantise(name, x)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_vector_is_an_empty_vector(name: str) -> None:
    assert round_trip(name, np.zeros(0, np.float32)).shape == (0,)


def test_int8_puts_high_nibbles_before_low_ones() -> None:
    x = np.zeros(BLOCK, np.float32)
    x[0], x[128], x[1] = 127, 0x35, -1
    codes = quantise_numpy.quantise("int8", x).codes[0]
    assert (codes[0], codes[128]) == (0x37, 0x5F)
    assert (codes[1], codes[129]) == (0x0F, 0x0F)


def test_int4_puts_two_halves_of_a_block_into_one_byte() -> None:
    codes = quantise_numpy.quantise(
        "int4", np.r_[block()[:128] + 7, block()[:128] - 2].astype(np.float32)
    ).codes
    assert codes[0, 0] == 0xE7


def test_e3m0_puts_sign_and_exponent_of_two_halves_into_one_byte() -> None:
    codes = quantise_numpy.quantise(
        "e3m0", np.r_[block()[:128] + 64, block()[:128] - 2].astype(np.float32)
    ).codes
    assert codes[0, 0] == 0xA7


def test_int2_puts_four_quarters_of_a_block_into_one_byte() -> None:
    quarters = np.repeat(np.array([1, -1, 0, 1], np.float32), 64)
    assert set(quantise_numpy.quantise("int2", quarters).codes[0]) == {0b01_00_11_01}


def test_codes_that_are_never_written_decode_to_a_plain_zero() -> None:
    for name, byte in (("e3m0", 0x88), ("int2", 0xAA)):
        codes = np.full((1, SCHEMES[name].code_bytes), byte, np.uint8)
        decoded = quantise_numpy.dequantise(name, Planes(codes, np.full(1, 0x3F80, np.uint16)))
        assert not decoded.view(np.uint32).any()


def test_two_bits_are_fed_back_and_no_others() -> None:
    assert [name for name, scheme in SCHEMES.items() if scheme.feedback] == ["int2"]


@pytest.mark.parametrize("name", NAMES)
def test_raw_bytes_are_the_planes(name: str) -> None:
    planes = quantise_numpy.quantise(name, np.ones(5 * BLOCK, np.float32))
    assert raw_bytes(name, 5) == planes.codes.nbytes + planes.scales.nbytes


def test_scheme_ids_are_unique() -> None:
    assert len({scheme.id for scheme in SCHEMES.values()}) == len(SCHEMES)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(UnknownScheme, match="'int3'"):
        quantise_numpy.quantise("int3", np.zeros(BLOCK, np.float32))


@pytest.mark.parametrize("size", [1, 255, 257])
def test_a_vector_that_is_no_whole_blocks_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        quantise_numpy.quantise("int4", np.zeros(size, np.float32))


def test_planes_of_another_scheme_are_refused() -> None:
    with pytest.raises(ValueError, match="no int8"):
        quantise_numpy.dequantise(
            "int8", quantise_numpy.quantise("int4", np.zeros(BLOCK, np.float32))
        )


def test_decoding_goes_into_the_given_output() -> None:
    x = block(3.0)
    out = np.empty_like(x)
    assert quantise_numpy.dequantise("int8", quantise_numpy.quantise("int8", x), out) is out
    assert out[0] == pytest.approx(3.0, rel=2.0**-7)


@pytest.mark.parametrize("name", NAMES)
@given(vectors)
def test_no_value_exceeds_the_peak(name: str, x: NDArray[np.float32]) -> None:
    planes = quantise_numpy.quantise(name, x)
    top = peak(name, planes)
    assert float(np.abs(quantise_numpy.dequantise(name, planes)).max(initial=0)) <= top
    assert top <= 1.02 * float(np.abs(x).max(initial=0)) or top < 1e-30


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_the_peak_of_what_is_not_finite_is_infinite(value: float) -> None:
    planes = quantise_numpy.quantise("f32", np.ones(BLOCK, np.float32))
    planes.codes[0, 8:12] = np.array([value], "<f4").view(np.uint8)
    assert peak("f32", planes) == np.inf
