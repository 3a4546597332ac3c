"""Which codec and merge run on this CPU: numba where it is installed, else numpy.

The kernels are imported by name at the first use, so that importing the wire costs nothing and an
image without numba (checkpointer, health monitor) works all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import merge_numpy, quantise_numpy
from skerry.algorithm.merge_numpy import OuterGradient, Spans
from skerry.algorithm.planes import Planes

F32s = NDArray[np.float32]


class QuantiseBackend(Protocol):
    """The functions of ``skerry.algorithm.quantise_numpy``; all backends give equal bits."""

    def quantise(self, scheme: str, x: F32s) -> Planes: ...
    def dequantise(self, scheme: str, planes: Planes, out: F32s | None = None) -> F32s: ...
    def join(self, planes: Sequence[NDArray[np.uint8]], out: F32s) -> None: ...
    def step_towards(
        self,
        global_scheme: str,
        delta_scheme: str,
        held: Planes,
        master: F32s,
        delta: Planes,
        out: F32s,
    ) -> None: ...
    def advance(self, scheme: str, held: Planes, change: F32s) -> None: ...
    def changes(self, global_scheme: str, held: Planes, master: F32s, every: int) -> F32s: ...


class MergeBackend(Protocol):
    """The functions of ``skerry.algorithm.merge_numpy``."""

    def segment_squares(self, x: F32s, spans: Spans) -> NDArray[np.float64]: ...
    def decoded_squares(self, item: OuterGradient, spans: Spans) -> NDArray[np.float64]: ...
    def accumulate(
        self, contributions: Sequence[OuterGradient], coefficients: F32s, spans: Spans, out: F32s
    ) -> NDArray[np.float64]: ...
    def trimmed(
        self, values: F32s, weights: NDArray[np.float64], dropped: int, out: F32s
    ) -> None: ...
    def step(
        self,
        out: F32s,
        gains: F32s,
        spans: Spans,
        master: F32s,
        momentum: F32s | None,
        *,
        lr: float,
        decay: float,
        into: F32s | None = None,
    ) -> F32s | None: ...


@cache
def cpu() -> QuantiseBackend:
    """Return the fastest codec this installation has."""
    if find_spec("numba") is None:
        return cast("QuantiseBackend", quantise_numpy)
    return cast("QuantiseBackend", import_module("skerry.algorithm.quantise_numba"))


def decoder(scheme: str) -> QuantiseBackend:
    """Return the codec for decoding a scheme.

    f32 is only copied: loading kernels for that would take 2 s.
    """
    return cast("QuantiseBackend", quantise_numpy) if scheme == "f32" else cpu()


@cache
def merger() -> MergeBackend:
    """Return the fastest merge this installation has."""
    if find_spec("numba") is None:
        return cast("MergeBackend", merge_numpy)
    return cast("MergeBackend", import_module("skerry.algorithm.merge_numba"))
