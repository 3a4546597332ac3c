"""Closed-loop deltas: learners make of them what the syncer has, and errors never add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm import closed_loop, quantise_numba, quantise_numpy
from skerry.algorithm.backend import cpu
from skerry.algorithm.closed_loop import Version
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import allocate
from skerry.algorithm.schemes import AUTO, DELTAS
from skerry.errors import Diverged
from skerry.protocol.chunks import VectorHash, vector_digest

BLOCKS = 1100
"""More than one piece."""


def decoded(scheme: str, version: Version) -> np.ndarray:
    return cpu().dequantise(scheme, version.held)


def walked(seed: int, steps: int, size: float = 1e-3) -> list[np.ndarray]:
    """Return a master that takes random steps of mixed sizes, one version after the other."""
    rng = np.random.default_rng(seed)
    master = rng.standard_normal(BLOCKS * BLOCK).astype(np.float32)
    found = [master]
    for _ in range(steps):
        scale = size * 10.0 ** rng.uniform(-3, 1, BLOCKS).repeat(BLOCK)
        master = (master + scale * rng.standard_normal(master.size)).astype(np.float32)
        found.append(master)
    return found


@pytest.mark.parametrize("scheme", ["bf16", "f32"])
@pytest.mark.parametrize("delta", [AUTO, *DELTAS])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_a_reader_of_deltas_has_what_the_syncer_has_bit_by_bit(
    scheme: str, delta: str, seed: int
) -> None:
    first, *rest = walked(seed, 3)
    ours = closed_loop.follow(scheme, delta, None, first, VectorHash)
    assert ours.delta is None
    assert ours.digest == vector_digest(decoded(scheme, ours))
    theirs = closed_loop.begin(scheme, decoded(scheme, ours))
    for master in rest:
        ours = closed_loop.follow(scheme, delta, ours.held, master, VectorHash)
        assert ours.delta is not None
        change = quantise_numpy.dequantise(*ours.delta)
        closed_loop.advance(scheme, theirs, change)
        assert vector_digest(change) == ours.digest
        np.testing.assert_array_equal(theirs.codes, ours.held.codes)


@pytest.mark.parametrize("scheme", ["bf16", "f32"])
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("size", [1e-40, 1e-3, 1.0, 1e30])
def test_kernels_take_g_on_as_the_reference_does(scheme: str, delta: str, size: float) -> None:
    first, then = (m[: 40 * BLOCK] * np.float32(size) for m in walked(5, 1, 1.0))
    found: list[tuple[bytes, ...]] = []
    for codec in (quantise_numpy, quantise_numba):
        held, out = quantise_numpy.quantise(scheme, first), np.empty_like(then)
        change = allocate(delta, 40)
        codec.step_towards(scheme, delta, held, then, change, out)
        found.append(tuple(x.tobytes() for x in (*held, *change, out)))
    assert found[0] == found[1]


@pytest.mark.parametrize("scheme", ["bf16", "f32"])
def test_kernels_find_the_change_that_the_reference_finds(scheme: str) -> None:
    first, then = (m[: 40 * BLOCK] for m in walked(6, 1, 1.0))
    held = quantise_numpy.quantise(scheme, first)
    then = then.copy()
    then[:BLOCK], then[3 * BLOCK], then[6 * BLOCK], then[9 * BLOCK] = 0, np.nan, np.inf, 3e38
    ours, reference = (c.changes(scheme, held, then, 3) for c in (quantise_numba, quantise_numpy))
    assert ours.tobytes() == reference.tobytes()
    assert ours.size == 14
    assert 0 <= float(ours.min()) <= float(ours.max()) <= 1


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.1, 1.0])
def test_a_delta_has_the_fewest_bits_that_leave_out_little_of_the_parameters(size: float) -> None:
    first, then = walked(4, 1, size)
    held = closed_loop.follow("f32", AUTO, None, first, VectorHash).held
    new = closed_loop.follow("f32", AUTO, held, then, VectorHash)
    assert new.delta is not None

    def left_out(scheme: str) -> float:
        begun = closed_loop.begin("f32", first)
        error = then - decoded("f32", closed_loop.follow("f32", scheme, begun, then, VectorHash))
        shares = np.abs(error.reshape(-1, BLOCK)).max(axis=1) / np.abs(then.reshape(-1, BLOCK)).max(
            axis=1
        )
        return float(np.sqrt((shares**2).mean()))

    assert left_out(new.delta.scheme) <= closed_loop.LEFT_OUT
    fewer = DELTAS[: DELTAS.index(new.delta.scheme)]
    assert all(left_out(scheme) > 0.8 * closed_loop.LEFT_OUT for scheme in fewer)
    assert {1e-4: "int4", 1.0: "int8"}.get(size, new.delta.scheme) == new.delta.scheme


def test_what_begins_at_zero_is_sent_in_the_most_bits() -> None:
    """As adapters do: all of it is change."""
    zeros, small = np.zeros(BLOCK, np.float32), np.full(BLOCK, 1e-6, np.float32)
    held = closed_loop.begin("bf16", zeros)
    for master, scheme in ((zeros, "int4"), (small, "int8")):
        delta = closed_loop.follow("bf16", AUTO, held, master, VectorHash).delta
        assert delta is not None
        assert delta.scheme == scheme


@pytest.mark.parametrize("delta", DELTAS)
def test_the_error_of_many_deltas_is_that_of_one(delta: str) -> None:
    """Without the loop, the error would grow with the square root of their number."""
    masters, errors = walked(1, 120), list[float]()
    held = closed_loop.follow("bf16", delta, None, masters[0], VectorHash).held
    for master in masters[1:]:
        new = closed_loop.follow("bf16", delta, held, master, VectorHash)
        held = new.held
        errors.append(float(np.abs(decoded("bf16", new) - master).mean()))
    assert np.mean(errors[-50:]) < 1.2 * np.mean(errors[10:60])


def test_a_master_that_stands_still_is_reached_as_closely_as_the_type_allows() -> None:
    first, then = walked(2, 1, size=1e-1)
    held = closed_loop.follow("bf16", "int4", None, first, VectorHash).held
    for _ in range(12):
        held = closed_loop.follow("bf16", "int4", held, then, VectorHash).held
    rounded = cpu().dequantise("bf16", cpu().quantise("bf16", then))
    error = np.abs(cpu().dequantise("bf16", held) - then).mean()
    assert error < 1.1 * np.abs(rounded - then).mean()


def test_only_the_blocks_that_are_held_are_changed() -> None:
    first, then = walked(3, 1)
    whole = closed_loop.begin("bf16", first)
    own = [range(1, 3), range(1090, 1100)]
    part = closed_loop.begin("bf16", first, own)
    delta = cpu().quantise("int4", then - cpu().dequantise("bf16", whole))
    change, partial = cpu().dequantise("int4", delta), cpu().dequantise("int4", delta)
    partial[:BLOCK] = np.nan
    closed_loop.advance("bf16", whole, change)
    closed_loop.advance("bf16", part, partial, own)
    for blocks in own:
        at = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        np.testing.assert_array_equal(partial[at], change[at])
        np.testing.assert_array_equal(part.codes[blocks], whole.codes[blocks])


def test_a_delta_that_leads_out_of_all_bounds_is_refused_by_the_reader() -> None:
    huge = np.full(BLOCK, 3e38, np.float32)
    held = closed_loop.begin("bf16", huge)
    with pytest.raises(Diverged):
        closed_loop.advance("bf16", held, huge.copy())


def test_a_syncer_begins_again_where_no_f32_holds_the_difference() -> None:
    huge = np.full(BLOCK, 3e38, np.float32)
    new = closed_loop.follow("f32", "int4", closed_loop.begin("f32", huge), -huge, VectorHash)
    assert new.delta is None
    np.testing.assert_array_equal(decoded("f32", new), -huge)
