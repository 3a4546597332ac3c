"""Which layers of a decoder repeat, so that one loop computes them; without JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from skerry.algorithm.presets import INNERS
from skerry.models.arch import Layer

DEEP = 12
"""Number of layers from which loops are worth their stacks (docs/results/restart.md)."""


class Run(NamedTuple):
    """Layers from ``first`` on: a pattern of ``period`` layers, ``repeats`` times."""

    first: int
    period: int
    repeats: int

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.period * self.repeats)


def scanned(setting: str, layers: Sequence[Layer], *, adapters: bool) -> bool:
    """Return True if loops compute the layers, by ``train.layers``; ``auto``: in deep models.

    With adapters the weights are frozen in the type of the arithmetic: stacks would be an extra
    copy of them.
    """
    if setting != "auto":
        return setting == "scanned"
    blocks = sum(run.period for run in runs_of(layers))
    return not adapters and len(layers) >= DEEP and 2 * blocks <= len(layers)


def trains_stacks(inner: str) -> bool:
    """Return True if an inner optimizer treats a stack like its leaves; others get leaves."""
    return inner in INNERS


def apart(layers: Sequence[Layer]) -> list[Run]:
    """Return each layer as a run of its own."""
    return [Run(number, 1, 1) for number in range(len(layers))]


def runs_of(layers: Sequence[Layer]) -> list[Run]:
    """Return the layers as runs, each as long as possible from the front, with a short period.

    A layer whose keys and values another one uses counts as equal to no other.
    """
    sources = {layer.source for layer in layers}
    kinds = [(layer, number if number in sources else None) for number, layer in enumerate(layers)]
    runs: list[Run] = []
    while (first := runs[-1].layers.stop if runs else 0) < len(kinds):
        left = kinds[first:]
        periods = range(1, len(left) // 2 + 1)
        found = [Run(first, period, _repeats(left, period)) for period in periods]
        loops = [run for run in found if run.repeats > 1]
        runs.append(max(loops, key=lambda run: len(run.layers), default=Run(first, 1, 1)))
    return runs


def _repeats(kinds: Sequence[object], period: int) -> int:
    """Return how often the first ``period`` kinds come, one after the other."""
    same = 0
    while same + period < len(kinds) and kinds[same + period] == kinds[same]:
        same += 1
    return 1 + same // period
