"""Which codec and merge run on this CPU: numba where it is installed, else numpy.

The kernels are imported by name at the first use, so that importing the wire costs nothing and an
image without numba (checkpointer, health monitor) works all the same.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from skerry.algorithm import merge_numpy, quantise_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.merge_numpy import OuterGradient, Spans
    from skerry.algorithm.planes import Planes


class QuantiseBackend(Protocol):
    """The quantisation functions of a CPU backend; all give equal bits."""

    def quantise(self, scheme: str, x: NDArray[np.float32]) -> Planes:
        """Quantise f32 (blocks*256,); raises Diverged if anything is not finite."""
        ...

    def dequantise(
        self, scheme: str, planes: Planes, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Decode to f32 (blocks*256,), into ``out`` if given."""
        ...

    def join(self, planes: Sequence[NDArray[np.uint8]], out: NDArray[np.float32]) -> None:
        """Put f32 (n,) together from its byte planes u8 (n,), the highest first."""
        ...


class MergeBackend(Protocol):
    """The merge functions of a CPU backend, documented in ``skerry.algorithm.merge_numpy``."""

    def segment_squares(self, x: NDArray[np.float32], spans: Spans) -> NDArray[np.float64]:
        """Sum the squares of f32 (blocks*256,) over each span."""
        ...

    def accumulate(
        self,
        contributions: Sequence[OuterGradient],
        coefficients: NDArray[np.float32],
        spans: Spans,
        out: NDArray[np.float32],
    ) -> NDArray[np.float64]:
        """Write the weighted sum into the spans of ``out``; returns its squares per span."""
        ...

    def step(
        self,
        out: NDArray[np.float32],
        gains: NDArray[np.float32],
        spans: Spans,
        master: NDArray[np.float32],
        momentum: NDArray[np.float32] | None,
        *,
        lr: float,
        decay: float,
        into: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        """Turn ``out`` from a direction into new parameters; returns the new momentum."""
        ...


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
