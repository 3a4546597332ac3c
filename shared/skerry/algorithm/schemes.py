"""The quantisation schemes: how a block of 256 f32 is stored, and with what error.

A new scheme is an entry here and its arithmetic in ``blocks``. This module needs no numpy, so that
settings and plans know every scheme.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from skerry.algorithm.fragments import BLOCK
from skerry.errors import UnknownScheme

_F32_MAX = (2 - 2.0**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a block of 256 f32.

    An element's error is at most ``relative_error`` times the largest magnitude in its block, plus
    ``absolute_error``. ``levels`` is the largest multiple of a block's scale, 0 for a scheme
    without scales. With ``feedback`` a learner adds what one contribution lost to its next one.
    ``for_global`` schemes are exact enough for the global fragments that learners start from,
    ``for_delta`` ones for the differences between these.
    """

    id: int
    name: str
    code_bytes: int
    levels: int
    relative_error: float
    absolute_error: float
    bias: str
    layout: str
    feedback: bool = False
    for_global: bool = False
    for_delta: bool = False

    @property
    def has_scales(self) -> bool:
        return self.levels > 0

    @property
    def low_bits(self) -> int:
        """Bits of an integer's code below its high nibble."""
        return 8 * self.code_bytes // BLOCK - 4

    @property
    def scale_ceiling(self) -> int:
        """Bf16 bits of the largest scale whose largest multiple is still a finite f32."""
        ceiling: int = struct.unpack("<I", struct.pack("<f", _F32_MAX / self.levels))[0]
        return ceiling >> 16


_EXACT = "none: exact"
_NEAREST = "none: round to nearest, half to even, and the scale is never too small to hold the peak"
_NIBBLES = "byte i holds element i in its low and i+128 in its high nibble"
_INT_ERROR = 1 + 2.0**-7
_SPLIT = "two's complement: 128 bytes of high nibbles as int4, then the low bits by part of a block"


def _integer(number: int, name: str, bits: int, layout: str = _SPLIT) -> Scheme:
    """Return the scheme of integers of so many bits, symmetric around 0."""
    levels, size = 2 ** (bits - 1) - 1, bits * BLOCK // 8
    error = _INT_ERROR / (2 * levels) + 2.0**-20
    return Scheme(number, name, size, levels, error, 2.0**-121, _NEAREST, layout, for_delta=True)


_ALL = (
    Scheme(1, "f32", 4 * BLOCK, 0, 0.0, 0.0, _EXACT, "little-endian f32", for_global=True),
    Scheme(
        *(2, "bf16", 2 * BLOCK, 0, 2.0**-8, 2.0**-134),
        "none: round to nearest even; only beyond 3.39e38 towards zero, to stay finite",
        "little-endian bf16",
        for_global=True,
    ),
    _integer(3, "int8", 8),
    _integer(4, "int4", 4, f"two's complement; {_NIBBLES}"),
    Scheme(
        *(5, "e3m0", BLOCK // 2, 64, 0.275 * _INT_ERROR + 2.0**-20, 2.0**-117),
        "below 0.5 % along a Gaussian or Laplacian block, by the choice of where to round up",
        f"sign, then exponent; {_NIBBLES}",
    ),
    Scheme(
        *(6, "int2", BLOCK // 4, 1, 2 / 3 + 2.0**-15, 2.0**-121),
        "towards zero, by a fifth along a Gaussian block: error feedback makes up for it",
        "sign, then magnitude; byte i holds elements i, i+64, i+128, i+192, low bits first",
        feedback=True,
    ),
    _integer(7, "int5", 5),
    _integer(8, "int6", 6),
)
SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in _ALL})
"""Every scheme by name. An id is never used again for other bytes."""
DELTAS = tuple(s.name for s in sorted(_ALL, key=lambda scheme: scheme.code_bytes) if s.for_delta)
"""The schemes that deltas are sent in, fewest bits first."""
AUTO = "auto"
"""As a delta scheme: ``closed_loop`` chooses the one with the fewest bits for each change."""


def scheme_of(name: str) -> Scheme:
    """Return the scheme called ``name``; raises UnknownScheme."""
    found = SCHEMES.get(name)
    if found is None:
        msg = f"there is no quantisation scheme {name!r}; known: {', '.join(SCHEMES)}"
        raise UnknownScheme(msg)
    return found


CHUNK_BYTES = 768 * 1024
"""Data in one message by default, without its envelope. The rest of NATS's 1 MiB holds the norms of
14,000 tensors in a fragment; each message costs its reader time, whatever its size."""


def raw_bytes(scheme: str, blocks: int) -> int:
    """Return the size of ``blocks`` blocks before compression: scales, then codes."""
    kind = scheme_of(scheme)
    return blocks * (kind.code_bytes + 2 * kind.has_scales)
