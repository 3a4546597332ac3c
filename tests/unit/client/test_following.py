"""What a process other than a learner's first holds of fragments, on one device."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import LeafSpec, plan
from skerry.client.following import Following, _Quantised
from skerry.client.inner_file import Origin
from skerry.client.jax_fragments import JaxFragments
from skerry.client.jax_processes import SharedFragments
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, FollowingProcess
from skerry.log.memory import MemoryBroker
from skerry.settings.models import SyncConfig

SIZE = 512
PLAN = plan((LeafSpec("w", (SIZE,)),), 1)
(FRAGMENT,) = PLAN.fragments


def holding(scheme: str) -> tuple[JaxFragments, SharedFragments]:
    """Return parameters of zero that were adopted, and the same as several processes hold them."""
    sync = SyncConfig(fragments=1, contribution_scheme=scheme)
    held = JaxFragments(PLAN, sync, {"w": jnp.zeros((SIZE,))})
    held.adopt(0, np.zeros(SIZE, np.float32))
    return held, SharedFragments(held, PLAN, sync)


async def test_a_capture_under_an_identity_that_is_used_again_is_quantised_itself() -> None:
    """The first one was not finite in a third process, so it was never sent."""
    (held, shared), quantised = holding("int2"), _Quantised()
    held.params = {"w": jnp.full((SIZE,), 1.0)}
    never_sent = await quantised.take(shared.capture(0), FRAGMENT, 7)
    quantised.residuals.unmerged(0, 7)
    held.params = {"w": jnp.full((SIZE,), 5.0)}
    gradient = shared.capture(0)
    sent = await quantised.take(gradient, FRAGMENT, 7)
    assert sent.squares[0] == pytest.approx(25 * never_sent.squares[0])
    assert await quantised.take(gradient, FRAGMENT, 7) is sent, "each time that it is asked for"


def test_what_was_fetched_to_be_sent_is_held_on_the_host_alone() -> None:
    held, shared = holding("int4")
    held.params = {"w": jnp.linspace(0, 1, SIZE)}
    gradient = shared.capture(0)
    on_devices = len(jax.live_arrays())
    planes, norms = gradient.quantise("int4", FRAGMENT)
    assert len(jax.live_arrays()) < on_devices
    wanted = cpu().quantise("int4", -np.asarray(held.params["w"]))
    again, same = gradient.quantise("int4", FRAGMENT)
    for made in (planes, again):
        np.testing.assert_array_equal(made.codes, wanted.codes)
        np.testing.assert_array_equal(made.scales, wanted.scales)
    assert norms == same


async def test_a_version_is_adopted_while_another_one_is_read() -> None:
    class Noticing(int):
        """A fragment's number; while it is compared, the event loop has read something more."""

        def __eq__(self, other: object) -> bool:
            following._read[1, len(following._read)] = None
            return int(self) == other

        __hash__ = int.__hash__

    _, shared = holding("int4")
    place = Assignment(Origin("run", 1, PLAN.digest, 2, "a", processes=2), 1, 0, "")
    process = cast("FollowingProcess", None)
    following = Following(MemoryBroker().connect(), place, PLAN, 65_536, shared, process)
    following._read[0, 2] = np.ones(SIZE, np.float32)
    fragment: Any = Noticing(0)
    following.do(Deed.ADOPT, fragment, 2)
    assert {number for number, _ in following._read} == {1}
