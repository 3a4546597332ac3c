"""How alike successive merged outer gradients are: the autocorrelation that outer momentum meets.

With momentum mu the steady step is ``lr (1 + mu / (1 - mu rho))`` times the gradient (a geometric
sum over gradients of which each has cosine rho with the one before).
"""

from __future__ import annotations

from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from skerry.bus import state
from skerry.bus.base import Bus
from skerry.core.fragments import Plan
from skerry.core.outer import MOMENTUM, Outer
from skerry.errors import Overtaken

Vector = NDArray[np.float32]
OUTER = "outer."
"""Prefix of the outer optimizer's parts in a manifest."""


class Rho:
    """Follows every commit and recovers the merged gradient from what it did to the state."""

    def __init__(self, bus: Bus, run: str, plan: Plan, outer: Outer) -> None:
        self._bus = bus
        self._run = run
        self._plan = plan
        self._sgd = outer.fused
        self._master: dict[int, Vector] = {}
        self._momentum: dict[int, Vector] = {}
        self._gradient: dict[int, Vector] = {}
        self.cosines: list[float] = []

    @property
    def mean(self) -> float | None:
        """The mean cosine of neighbours, None if there were none."""
        return float(np.mean(self.cosines)) if self.cosines else None

    async def follow(self) -> None:
        """Look at every version of every fragment that can still be read when it is heard of."""
        if self._sgd is None:
            return
        names = [state.MASTER] + ([OUTER + MOMENTUM] if self._sgd.momentum else [])
        manifests = state.follow_manifests(self._bus, self._run, self._plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                try:
                    parts = {
                        name: await state.read_part(
                            self._bus, self._run, self._plan, manifest, name
                        )
                        for name in names
                    }
                except Overtaken:
                    continue
                self._saw(manifest.commit.fragment, parts)

    def _saw(self, fragment: int, parts: dict[str, Vector]) -> None:
        assert self._sgd is not None
        master, before = parts[state.MASTER], self._master.get(fragment)
        self._master[fragment] = master
        if self._sgd.momentum:
            momentum = parts[OUTER + MOMENTUM]
            held = self._momentum.get(fragment)
            self._momentum[fragment] = momentum
            gradient = None if held is None else momentum - self._sgd.momentum * held
        else:
            gradient = None if before is None else (before - master) / self._sgd.lr
        if gradient is None:
            return
        last = self._gradient.get(fragment)
        self._gradient[fragment] = gradient
        if last is not None:
            lengths = float(np.linalg.norm(gradient)) * float(np.linalg.norm(last))
            if lengths > 0:
                self.cosines.append(float(gradient @ last) / lengths)
