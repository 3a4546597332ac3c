"""A shuffle of ``range(size)`` without a table: a Feistel network that walks cycles.

Four rounds over the smallest even number of bits that holds ``size``; values that land outside are
permuted again until they land inside (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002). Memory is constant, and any position is computed on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Indices = NDArray[np.uint64]
ROUNDS = 4
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xD6E8FEB86659FD93)
SHIFT = np.uint64(32)


def _mix(value: Indices, key: np.uint64) -> Indices:
    mixed = (value + key) * MULTIPLIER
    mixed = (mixed ^ (mixed >> SHIFT)) * FINISH
    return mixed ^ (mixed >> SHIFT)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of ``range(size)``; other keys give unrelated ones."""

    size: int
    key: tuple[int, ...]

    def __call__(self, positions: NDArray[np.integer]) -> Indices:
        """Return where each of ``positions`` (any shape, values below ``size``) goes, as uint64."""
        values = np.asarray(positions).astype(np.uint64)
        outside = np.ones(values.shape, np.bool_)
        with np.errstate(over="ignore"):
            while outside.any():
                values[outside] = self._network(values[outside])
                outside = values >= np.uint64(self.size)
        return values

    def _network(self, values: Indices) -> Indices:
        half = max(1, (max(1, self.size - 1).bit_length() + 1) // 2)
        shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
        left, right = values >> shift, values & mask
        for turn in range(ROUNDS):
            text = ":".join(map(str, (*self.key, turn)))
            round_key = np.uint64(xxhash.xxh3_64_intdigest(text.encode()))
            left, right = right, left ^ (_mix(right, round_key) & mask)
        return (left << shift) | right
