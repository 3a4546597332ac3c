"""The share of time in which islands compute, by method and bandwidth; Streaming DiLoCo's table.

The paper (arXiv 2501.18512, section 3.1 and table 4) simulates a graph of layers: forward, two
backward nodes and a reduction each. Its nodes are equal within a kind, so closed forms follow. One
step takes T, a third of it forward and the rest backward, from the last layer to the first; a layer
can be sent when its backward is done, and is needed by its forward pass of a later step::

    data-parallel      T / (T/3 + max(2T/3 + l/B, 2T/(3L) + L l/B))            l: bits of one layer
    DiLoCo             H T / ((H - 1) T + a data-parallel step)
    streaming          I T / (I T + stall), one fragment of three layers each I steps, strided
    overlapped         the same, needed tau steps later

A stall is how long after its turn the first layer of a fragment is complete, averaged over
fragments. Bits per parameter are the one thing that is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Method: TypeAlias = Literal["data-parallel", "diloco", "streaming", "overlapped"]

BACKWARD = 2 / 3
"""Share of a step that is its backward pass: twice the forward pass's operations."""
PAPER_STEP = 10 ** (4 / 49)
"""The grid of the paper's bandwidths: 50 from 0.1 to 1000 Gbit/s, 1.21 apart."""


@dataclass(frozen=True, slots=True)
class Island:
    """One island beside its equals: ``layer_bits`` are those of one layer on the wire."""

    step_s: float
    layers: int
    layer_bits: float
    h_steps: int = 100
    fragment_layers: int = 3
    overlap_steps: int = 1

    @property
    def fragments(self) -> int:
        return max(1, self.layers // self.fragment_layers)


def data_parallel_step_s(island: Island, bits_s: float, latency_s: float = 0.0) -> float:
    """Return how long a step takes whose gradients are reduced layer by layer behind it.

    The last layer is sent first; the step ends when the first layer has been reduced too.
    """
    backward, layer_s = BACKWARD * island.step_s, island.layer_bits / bits_s
    reduced = max(backward + layer_s, backward / island.layers + island.layers * layer_s)
    return island.step_s - backward + reduced + latency_s


def utilisation(method: Method, island: Island, bits_s: float) -> float:
    """Return the share of time in which an island computes at this bandwidth, bit/s."""
    step = island.step_s
    if method == "data-parallel":
        return step / data_parallel_step_s(island, bits_s)
    if method == "diloco":
        whole = (island.h_steps - 1) * step + data_parallel_step_s(island, bits_s)
        return island.h_steps * step / whole
    if method == "streaming":
        island = replace(island, overlap_steps=0)
    count = island.fragments
    interval = island.h_steps * step / count
    stalls = sum(_stall_s(island, fragment, bits_s) for fragment in range(count)) / count
    return interval / (interval + stalls)


def _stall_s(island: Island, fragment: int, bits_s: float) -> float:
    """Return how long the first layer of a fragment is late, its layers spread over the depth."""
    layer_s, count = island.layer_bits / bits_s, island.fragments
    done = -math.inf
    for place in reversed(range(island.fragment_layers)):
        ready = -BACKWARD * island.step_s * (fragment + place * count) / island.layers
        done = max(done, ready) + layer_s
    forward = (1 - BACKWARD) * island.step_s * fragment / island.layers
    return max(0.0, done - island.overlap_steps * island.step_s - forward)


def required_bits_s(method: Method, island: Island, target: float) -> float:
    """Return the bandwidth at which an island computes this share of the time, bit/s.

    ``target`` is below 1: a method that cannot hide all never gets there.
    """
    return least_rate(lambda rate: utilisation(method, island, rate) >= target)


def least_rate(enough: Callable[[float], bool], low: float = 1.0, high: float = 1e18) -> float:
    """Return the least rate that is enough, to a millionth, by halving on a logarithmic scale."""
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def paper_index(gbit_s: float) -> int:
    """Return the place on the paper's grid at or above this bandwidth: 0 is 0.1 Gbit/s."""
    return math.ceil(math.log(gbit_s / 0.1) / math.log(PAPER_STEP) - 1e-6)


def paper_nearest(gbit_s: float) -> int:
    """Return the place on the paper's grid nearest to a printed, hence rounded, bandwidth."""
    return round(math.log(gbit_s / 0.1) / math.log(PAPER_STEP))
