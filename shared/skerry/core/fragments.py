"""Cutting a parameter tree into fragments that are synchronised on their own.

A fragment travels as a *padded vector*: its slices one after another, each padded with zeros to a
whole number of blocks, so that a block never crosses a tensor and every kernel sees ``(blocks, 256)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

BLOCK = 256


def padded(size: int) -> int:
    """Return ``size`` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One tensor of the model: its path in the tree, its shape, and whether it is an embedding."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``[start, stop)`` of leaf number ``leaf``, in row-major order."""

    leaf: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """A fixed part of the parameter tree, synchronised on its own."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Parameters, without padding."""
        return sum(s.size for s in self.slices)

    @property
    def padded_size(self) -> int:
        """Length of the padded vector: a multiple of BLOCK."""
        return sum(padded(s.size) for s in self.slices)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each slice starts in the padded vector; one more entry closes the last."""
        return tuple(accumulate((padded(s.size) for s in self.slices), initial=0))


@dataclass(frozen=True, slots=True)
class Plan:
    """All fragments of a model; equal leaves and P give an equal plan on every machine."""

    leaves: tuple[LeafSpec, ...]
    fragments: tuple[Fragment, ...]
    digest: int
