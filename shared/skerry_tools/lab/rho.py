"""How alike successive merged outer gradients are: the autocorrelation that outer momentum meets.

With momentum mu the steady step is ``lr (1 + mu / (1 - mu rho))`` times the gradient (a geometric
sum over gradients of which each has cosine rho with the one before).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.algorithm.outer import MOMENTUM, Outer
from skerry.errors import Overtaken
from skerry.log import run_records, state
from skerry.log.base import Bus
from skerry.protocol.messages import Commit, Manifest

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
        self._newest: dict[int, _Version] = {}
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
        manifests = run_records.follow(self._bus, self._run, Manifest, self._plan.digest)
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
                self._saw(manifest.commit, parts)

    def _saw(self, commit: Commit, parts: Mapping[str, Vector]) -> None:
        """Take note of a version; what it does not follow directly tells nothing about it."""
        fragment, version = commit.fragment, commit.version
        before = self._newest.get(fragment)
        if before is not None and before.number != version - 1:
            before = None
        if before is not None and not commit.consumed:  # nothing was merged: it is the one before
            self._newest[fragment] = replace(before, number=version)
            return
        gradient = None if before is None else self._between(before.parts, parts)
        self._newest[fragment] = _Version(version, parts, gradient)
        last = None if before is None else before.gradient
        if gradient is not None and last is not None:
            lengths = float(np.linalg.norm(gradient)) * float(np.linalg.norm(last))
            if lengths > 0:
                self.cosines.append(float(gradient @ last) / lengths)

    def _between(self, before: Mapping[str, Vector], after: Mapping[str, Vector]) -> Vector:
        """Return the merged gradient by which a version came from the one before it."""
        assert self._sgd is not None
        if self._sgd.momentum:
            name = OUTER + MOMENTUM
            gradient = after[name] - self._sgd.momentum * before[name]
        else:
            gradient = (before[state.MASTER] - after[state.MASTER]) / self._sgd.lr
        return gradient.astype(np.float32, copy=False)


@dataclass(frozen=True, slots=True)
class _Version:
    """The newest version of a fragment that was read, and the gradient that led to it, if known."""

    number: int
    parts: Mapping[str, Vector]
    gradient: Vector | None
