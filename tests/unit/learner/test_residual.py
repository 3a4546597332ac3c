"""Error feedback: what a contribution did not hold goes into the next one, once and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.client.encode import Encoded, Residuals, encode
from skerry.client.mailbox import OutgoingContribution
from skerry.errors import Diverged
from tests.support.builders import header

F32 = NDArray[np.float32]
PLAN = plan([LeafSpec("w", (2, BLOCK)), LeafSpec("b", (5,))], 1)
(FRAGMENT,) = PLAN.fragments
SIZE = FRAGMENT.padded_size
HEADER = header()


def outgoing(gradient: F32, identity: int, scheme: str = "int2") -> OutgoingContribution:
    on_device: Any = jnp.asarray(gradient)
    return OutgoingContribution(replace(HEADER, identity=identity), on_device, scheme)


def send(residuals: Residuals, item: OutgoingContribution) -> Encoded:
    """Encode as the network does, and keep what was not held."""
    identity = item.header.identity
    encoded = encode(item, PLAN, residuals.owed(0, identity))
    if encoded.residual is not None:
        residuals.keep(0, identity, encoded.residual)
    return encoded


def decoded(encoded: Encoded) -> F32:
    return cpu().dequantise(encoded.scheme, encoded.planes)


def gaussian(seed: int) -> F32:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)


# Any rounds at all: what matters is that no residual feeds on itself.
values = st.floats(-1, 1, width=32)
rounds = st.lists(arrays(np.float32, BLOCK, elements=values, fill=values), min_size=1, max_size=20)


@given(meant=rounds)
@settings(max_examples=60)
def test_what_was_decoded_stays_within_a_constant_of_what_was_meant(meant: list[F32]) -> None:
    residuals, total = Residuals(), np.zeros(SIZE)
    largest = 0.0
    for number, block in enumerate(meant, start=1):
        gradient = np.zeros(SIZE, np.float32)
        gradient[:BLOCK] = block
        total += gradient - decoded(send(residuals, outgoing(gradient, number)))
        largest = max(largest, float(np.abs(block).max()))
        assert float(np.abs(total).max()) <= 2 * largest + 1e-4


@pytest.mark.parametrize("scheme", ["int4", "int2"])
def test_without_feedback_the_same_small_loss_comes_back_every_round(scheme: str) -> None:
    gradient = np.full(SIZE, 0.05, np.float32)
    gradient[::BLOCK] = 1.0
    fed, plain = np.zeros(SIZE), np.zeros(SIZE)
    residuals = Residuals()
    for number in range(1, 101):
        item = outgoing(gradient, number, scheme)
        fed += decoded(send(residuals, item)) - gradient
        plain += decoded(encode(item, PLAN)) - gradient
    assert float(np.abs(plain).max()) > 2.0
    assert (float(np.abs(fed).max()) < 2.0) is (scheme == "int2")


def test_the_next_contribution_holds_what_the_last_one_did_not() -> None:
    residuals = Residuals()
    first = send(residuals, outgoing(gaussian(1), 1))
    second = send(residuals, outgoing(gaussian(2), 2))
    owed = np.subtract(gaussian(1), decoded(first), dtype=np.float32)
    wanted = cpu().quantise("int2", np.add(gaussian(2), owed, dtype=np.float32))
    np.testing.assert_array_equal(second.planes.codes, wanted.codes)
    assert float(np.abs(owed).max()) > 0


def test_the_norms_are_those_of_what_decodes() -> None:
    residuals = Residuals()
    send(residuals, outgoing(gaussian(1), 1))
    encoded = send(residuals, outgoing(gaussian(2), 2))
    assert encoded.header.norms == slice_norms(FRAGMENT, decoded(encoded))


def test_padding_owes_nothing() -> None:
    residuals, gradient = Residuals(), gaussian(1)
    padding = np.ones(SIZE, np.bool_)
    for part, start in zip(FRAGMENT.slices, FRAGMENT.offsets, strict=False):
        padding[start : start + part.size] = False
    gradient[padding] = 0
    for number in range(1, 4):
        encoded = send(residuals, outgoing(gradient, number))
        assert encoded.residual is not None
        assert not decoded(encoded)[padding].any()
        assert not encoded.residual[padding].any()


@pytest.mark.parametrize("size", [1.0, 1e30])
def test_one_that_is_never_merged_leaves_the_residual_as_it_was_before_it(size: float) -> None:
    residuals = Residuals()
    first = send(residuals, outgoing(gaussian(1), 1))
    send(residuals, outgoing(gaussian(2) * np.float32(size), 2))
    residuals.unmerged(0, 2)
    owed = residuals.owed(0, 3)
    assert owed is not None
    np.testing.assert_array_equal(owed, gaussian(1) - decoded(first))


def test_a_first_one_that_is_never_merged_leaves_none() -> None:
    residuals = Residuals()
    send(residuals, outgoing(gaussian(1), 1))
    residuals.unmerged(0, 1)
    assert residuals.owed(0, 2) is None


@pytest.mark.parametrize("given_up", [None, 1, 2])
def test_a_contribution_encoded_again_has_the_same_bytes_whatever_was_given_up(
    given_up: int | None,
) -> None:
    residuals = Residuals()
    send(residuals, outgoing(gaussian(1), 1))
    again = outgoing(gaussian(2), 2)
    before, owed = list(send(residuals, again).chunks(4096)), residuals.owed(0, 3)
    if given_up is not None:
        residuals.unmerged(0, given_up)
    if given_up == 1:
        assert residuals.owed(0, 3) is owed, "an older one is heard of too late"
    assert list(send(residuals, again).chunks(4096)) == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_one_that_is_not_finite_leaves_no_trace(bad: float) -> None:
    residuals = Residuals()
    huge = np.full(SIZE, 3e38, np.float32)
    huge[::2] = 1e38
    send(residuals, outgoing(huge, 1))
    before = residuals.owed(0, 2)
    with pytest.raises(Diverged):
        send(residuals, outgoing(np.full(SIZE, bad, np.float32), 2))
    assert residuals.owed(0, 2) is before


@pytest.mark.parametrize("scheme", ["f32", "bf16", "int8", "int4", "e3m0"])
def test_other_fragments_and_other_schemes_owe_nothing(scheme: str) -> None:
    residuals = Residuals()
    residuals.keep(0, 1, gaussian(1))
    assert residuals.owed(1, 2) is None
    assert encode(outgoing(gaussian(1), 1, scheme), PLAN).residual is None
