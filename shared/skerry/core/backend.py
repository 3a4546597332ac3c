"""Which implementation of the codec runs on this CPU: numba where it is installed, else numpy.

The kernels are imported by name at the first use, so that importing the wire costs nothing and an
image without numba (checkpointer, health monitor) works all the same.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from skerry.core import quantise as reference

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from skerry.core.quantise import Planes


class Codec(Protocol):
    """What every CPU backend offers; results are equal to the last bit in all of them."""

    def quantise(self, scheme: str, x: NDArray[np.float32]) -> Planes:
        """Quantise f32 (blocks*256,); raises Diverged if anything is not finite."""
        ...

    def dequantise(
        self, scheme: str, planes: Planes, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Decode to f32 (blocks*256,), into ``out`` if given."""
        ...


@cache
def cpu() -> Codec:
    """Return the fastest codec this installation has."""
    if find_spec("numba") is None:
        return cast("Codec", reference)
    return cast("Codec", import_module("skerry.core.kernels"))
