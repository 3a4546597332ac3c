"""Reading a cut out of the log while the run goes on.

A fragment's version stays readable until the second commit after it begins to write (the double
buffer of ``skerry.log.state``), so what was committed first is read first. A fragment that was
overtaken nevertheless needs a newer cut, in which all that has not changed stays as it was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.errors import Overtaken
from skerry.log.state import read_part
from skerry.store.checkpoint import MASTER, OUTER
from skerry_checkpointer.cut import take_cut

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Manifest
    from skerry_checkpointer.cut import Cut

    Vector = NDArray[np.float32]
    Keep = Callable[[Manifest, Mapping[str, Vector]], Awaitable[None]]

CUTS = 10
"""Cuts that are begun before the link is said to be too slow."""


async def capture(bus: Bus, run: str, plan: Plan, cut: Cut, keep: Keep) -> Cut:
    """Hand every fragment of a cut to ``keep``, a fragment in memory at a time; return the cut.

    That is ``cut`` itself or a newer one, when the run went on faster than it could be read; then
    ``keep`` gets the fragments again that have changed. Raises Overtaken after CUTS of them,
    StateLost when the log lacks what its newest manifest names.
    """
    held: set[int] = set()
    for _ in range(CUTS):
        if await _read(bus, run, plan, cut, held, keep):
            return cut
        newer = await take_cut(bus, run, plan) or cut
        held = {fragment for fragment in held if newer.same(cut, fragment)}
        cut = newer
    msg = (
        f"Run {run!r} was committed on {CUTS} times before its fragments were read: the link to "
        "the broker is too slow for this sync.h_steps, the checkpoint is tried again next turn."
    )
    raise Overtaken(msg)


async def _read(bus: Bus, run: str, plan: Plan, cut: Cut, held: set[int], keep: Keep) -> bool:
    """Hand on what is not held yet; False as soon as a fragment was overtaken."""
    for fragment in cut.oldest_first:
        if fragment in held:
            continue
        manifest = cut.manifests[fragment]
        names = [p.name for p in manifest.parts if p.name == MASTER or p.name.startswith(OUTER)]
        try:
            parts = {name: await read_part(bus, run, plan, manifest, name) for name in names}
        except Overtaken:
            return False
        await keep(manifest, parts)
        held.add(fragment)
    return True
