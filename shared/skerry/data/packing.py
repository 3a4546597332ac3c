"""Whole documents in rows of one length, as many as fit: best fit, longest documents first.

It works on counts of lengths, not on documents, so that a row costs a few array operations however
many documents there are (Krell et al., "Efficient Sequence Packing without Cross-contamination",
arXiv 2107.02027). What is longer than a row is cut into full rows first, and its rest is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

if TYPE_CHECKING:
    from skerry.data.corpus import Batch, HostBatch, Stretch

Counts = NDArray[np.int64]
LEAST = 2
"""Tokens of a document that has a target."""


class Pieces(NamedTuple):
    """Pieces of documents: the stretch, the first token and the number of tokens of each."""

    stretch: Counts
    start: Counts
    size: Counts


@dataclass(frozen=True, slots=True)
class _Rows:
    """``count`` rows that hold pieces of the same ``sizes``."""

    sizes: tuple[int, ...]
    count: int


def pack(sizes: Counts, capacity: int) -> tuple[Counts, Counts]:
    """Return the pieces in the order of their rows, and where each row ends in that order.

    ``sizes`` are the tokens of each piece, 1 to ``capacity``; ``capacity`` those of a row.
    """
    found = np.bincount(sizes, minlength=capacity + 1).astype(np.int64)
    groups = _fit(found, capacity)
    by_size = np.argsort(sizes, kind="stable")
    taken = np.concatenate([[0], np.cumsum(found)])[:-1]
    order: list[Counts] = []
    per_row: list[Counts] = []
    for group in groups:
        held = np.empty((group.count, len(group.sizes)), np.int64)
        for place, size in enumerate(group.sizes):
            held[:, place] = by_size[taken[size] : taken[size] + group.count]
            taken[size] += group.count
        order.append(held.reshape(-1))
        per_row.append(np.full(group.count, len(group.sizes)))
    if not order:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(order), np.cumsum(np.concatenate(per_row))


def _fit(found: Counts, capacity: int) -> list[_Rows]:
    """Return rows for ``found[size]`` pieces of each size, the fullest that has room taking one."""
    space: dict[int, list[_Rows]] = {}
    for size in range(capacity, 0, -1):
        left = int(found[size])
        while left:
            room = min((room for room in space if room >= size), default=0)
            if room:
                row = space[room].pop()
                if not space[room]:
                    del space[room]
                used = min(left, row.count)
                if row.count > used:
                    space.setdefault(room, []).append(_Rows(row.sizes, row.count - used))
            else:
                row, room, used = _Rows((), 0), capacity, max(1, left // (capacity // size))
            each = min(room // size, left // used)
            grown = _Rows(row.sizes + (size,) * each, used)
            space.setdefault(room - size * each, []).append(grown)
            left -= used * each
    return [row for rows in space.values() for row in rows]


def pieces(stretches: Sequence[Stretch], capacity: int) -> Pieces:
    """Cut documents to at most ``capacity`` tokens; those without a target are left out.

    Neighbours of one document share one token, so that every token but the first is predicted once.
    """
    starts, sizes, whose = ([np.empty(0, np.int64)] for _ in range(3))
    for number, stretch in enumerate(stretches):
        ends = np.array([len(stretch)]) if stretch.ends is None else stretch.ends
        begins = np.concatenate([[0], ends[:-1]])
        targets = np.maximum(ends - begins - 1, 0)
        cuts = -(-targets // (capacity - 1))
        document = np.repeat(np.arange(len(ends)), cuts)
        nth = np.arange(len(document)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        start = begins[document] + nth * (capacity - 1)
        starts.append(start)
        sizes.append(np.minimum(ends[document] - start, capacity))
        whose.append(np.full(len(document), number))
    return Pieces(np.concatenate(whose), np.concatenate(starts), np.concatenate(sizes))


def digest_of(stretches: Sequence[Stretch]) -> str:
    """Return a hash of stretches in their order, 16 hexadecimal digits; reads all of them."""
    digest = xxhash.xxh3_64()
    for stretch in stretches:
        digest.update(len(stretch).to_bytes(8, "little"))
        digest.update(stretch.tokens.data.cast("B"))
    return digest.hexdigest()


class Packed:
    """Stretches as numbered rows of ``seq_len + 1`` tokens, each with the documents that fit.

    A document that a row can hold is in one row, and does not see the others; the rest of a row is
    padding, with segment 0.
    """

    def __init__(self, stretches: Sequence[Stretch], seq_len: int) -> None:
        self.stretches = tuple(stretches)
        self._size = seq_len + 1
        found = pieces(self.stretches, self._size)
        order, self._ends = pack(found.size, self._size)
        self._pieces = Pieces(*(column[order] for column in found))
        self.weighted = any(s.weights is not None for s in self.stretches)

    def __len__(self) -> int:
        return len(self._ends)

    @cached_property
    def digest(self) -> str:
        return digest_of(self.stretches)

    def read(self, indices: NDArray[np.integer]) -> Batch:
        """Copy the tokens of these rows: int32 [len(indices), seq_len + 1]."""
        return self.batch(indices)["tokens"]

    def batch(self, indices: NDArray[np.integer]) -> HostBatch:
        """Return these rows as a batch, in new arrays."""
        shape = (len(indices), self._size)
        batch: dict[str, NDArray[Any]] = {
            name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")
        }
        counted = np.ones(shape, np.float32)
        tokens, segments, positions = batch.values()
        counting = np.arange(self._size, dtype=np.int32)
        for row, index in enumerate(indices):
            at, end = 0, int(self._ends[index])
            for segment, piece in enumerate(range(self._first(index), end), 1):
                whose, start, size = (int(column[piece]) for column in self._pieces)
                stretch, stop = self.stretches[whose], at + size
                tokens[row, at:stop] = stretch.tokens[start : start + size]
                segments[row, at:stop] = segment
                positions[row, at:stop] = counting[:size]
                if stretch.weights is not None:
                    counted[row, at:stop] = stretch.weights[start : start + size]
                at = stop
        if self.weighted:
            batch["weights"] = counted[:, 1:].copy()
        return batch

    def _first(self, row: np.integer) -> int:
        return int(self._ends[row - 1]) if row else 0
