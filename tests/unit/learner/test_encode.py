"""Encoding on a device equals encoding by the host's kernels, so islands of both kinds agree."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, LeafSpec, padded, plan
from skerry.client import encode
from skerry.client.jax_cuts import pieces_of
from skerry.client.jax_fragments import DeviceVector
from skerry.client.mailbox import OutgoingContribution
from skerry.errors import Diverged
from skerry.protocol import door
from tests.support.builders import header
from tests.support.learners import walk

pytestmark = pytest.mark.usefixtures("optimised")

PLAN = plan([LeafSpec("w", (70, 100)), LeafSpec("b", (5,))], 1)
FRAGMENT = PLAN.fragments[0]
HEADER = header()


def on_device(gradient: NDArray[np.float32]) -> DeviceVector:
    """Return a gradient on the device, with room behind each piece."""
    parts = [
        jnp.pad(gradient[piece.offset :][: padded(piece.size)], (0, BLOCK))
        for piece in pieces_of(FRAGMENT)
    ]
    return DeviceVector(FRAGMENT, tuple(parts))


@pytest.mark.parametrize("scheme", ["f32", "bf16", "int8", "int4", "e3m0"])
def test_device_and_host_give_the_same_planes_and_norms(scheme: str) -> None:
    gradient = on_device(walk(FRAGMENT, "x"))
    item = OutgoingContribution(HEADER, gradient, scheme)
    device_planes, device_norms = gradient.quantise(scheme, FRAGMENT)
    host_planes, host_norms, _ = encode._on_host(item, FRAGMENT, None, feedback=False)
    np.testing.assert_array_equal(device_planes.codes, host_planes.codes)
    np.testing.assert_array_equal(device_planes.scales, host_planes.scales)
    assert device_norms == pytest.approx(host_norms, rel=1e-5)


def test_device_refuses_a_gradient_that_is_not_finite() -> None:
    bad = walk(FRAGMENT, "x").copy()
    bad[3] = np.nan
    with pytest.raises(Diverged, match="fragment 0 is not finite"):
        on_device(bad).quantise("int4", FRAGMENT)


def test_a_contribution_says_how_many_tokens_reached_each_expert() -> None:
    """Counts are int32 that run over, and no slice had more tokens than are claimed."""
    cut = plan([LeafSpec("experts", (3, 300), unit=300), LeafSpec("w", (7,))], 1)
    before = {"experts": jnp.array([5, 2**31 - 2, 0], jnp.int32)}
    after = {"experts": jnp.array([5, -(2**31) + 2, 99], jnp.int32)}
    item = OutgoingContribution(
        replace(HEADER, tokens=10),
        walk(cut.fragments[0], "x"),
        "int4",
        (before, after),
    )
    header = encode.encode(item, cut).header
    assert header.slice_tokens == (0, 4, 10, 10)
    door.check_contribution(header, 4)
    everything = replace(item, routed=({}, {"experts": jnp.array([10, 10, 10], jnp.int32)}))
    assert encode.encode(everything, cut).header.slice_tokens == ()
