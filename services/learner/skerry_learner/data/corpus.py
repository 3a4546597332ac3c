"""A corpus cut into pieces, each of them for training or held out by its own content.

Machines need not have the same text, nor talk, to agree: equal pieces are on the same side wherever
they stand, so that text that is held out somewhere is trained on nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.errors import CorpusError
from skerry.settings import DataConfig
from skerry_learner.data import pieces
from skerry_learner.data.pieces import Places
from skerry_learner.data.source import Tokens, read_source

Batch = NDArray[np.int32]
Hashes = NDArray[np.uint64]


class Sequences:
    """Stretches of tokens as numbered sequences of ``seq_len + 1``; none crosses a stretch's end.

    Neighbours share one token, so that every token but a stretch's first is predicted once.
    """

    def __init__(self, stretches: Iterable[Tokens], seq_len: int) -> None:
        self.stretches = tuple(s for s in stretches if len(s) > seq_len)
        self._seq_len = seq_len
        counts = [(len(s) - 1) // seq_len for s in self.stretches]
        self._ends = np.array(list(accumulate(counts)), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: NDArray[np.integer]) -> Batch:
        """Copy the sequences with these numbers: int32 [len(indices), seq_len + 1]."""
        out = np.empty((len(indices), self._seq_len + 1), np.int32)
        places = np.searchsorted(self._ends, indices.astype(np.int64), side="right")
        for row, (place, index) in enumerate(zip(places, indices, strict=True)):
            before = int(self._ends[place - 1]) if place else 0
            start = (int(index) - before) * self._seq_len
            out[row] = self.stretches[place][start : start + self._seq_len + 1]
        return out


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and what it is judged by."""

    train: Sequences
    held_out: Sequences
    config: DataConfig

    @cached_property
    def sequences_per_shard(self) -> int:
        """Sequences in one epoch of one stream."""
        return len(self.train) // self.config.streams

    def held_out_batches(self, batch: int, limit: int) -> Iterator[Batch]:
        """Yield at most ``limit`` batches, spread evenly over the held-out text, always equal."""
        total = len(self.held_out)
        batch = min(batch, total)
        batches = min(limit, total // batch)
        picked = np.linspace(0, total - 1, batches * batch).astype(np.int64)
        for rows in picked.reshape(batches, batch):
            yield self.held_out.read(rows)


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text and split it; CorpusError when it is unreadable, empty or too short."""
    return split(read_source(config), config)


def split(documents: Sequence[Tokens], config: DataConfig) -> Corpus:
    """Cut documents into pieces and sort them by content hash into training and held-out text."""
    total = sum(len(document) for document in documents)
    cuts = [_Cut.of(document, config.seq_len, total) for document in documents]
    # One piece at least is held out; it must be one that a sequence fits into.
    lowest = min((cut.lowest(config.seq_len) for cut in cuts), default=0)
    bound = np.uint64(max(int(config.held_out * 2**64), lowest))
    train, held_out = (
        Sequences(chain.from_iterable(side), config.seq_len)
        for side in (
            (cut.stretches(cut.hashes > bound) for cut in cuts),
            (cut.stretches(cut.hashes <= bound) for cut in cuts),
        )
    )
    if not len(train) or not len(held_out):
        longest = max((len(d) for d in documents), default=0)
        msg = (
            f"The corpus has {longest} tokens, too few to train on and hold out one sequence of"
            f" {config.seq_len + 1} each: add text or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.seq_len")
    corpus = Corpus(train, held_out, config)
    if corpus.sequences_per_shard == 0:
        msg = (
            f"The corpus has {len(corpus.train)} training sequences for data.streams ="
            f" {config.streams}: add text, lower data.streams or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.streams")
    return corpus


@dataclass(frozen=True, slots=True)
class _Cut:
    """A document with the ends of its pieces and the xxh3-64 of each."""

    document: Tokens
    ends: Places
    hashes: Hashes

    @classmethod
    def of(cls, document: Tokens, seq_len: int, total: int) -> _Cut:
        ends = pieces.ends(document, seq_len, total)
        begins = chain([0], ends)
        parts = (document[begin:end] for begin, end in zip(begins, ends, strict=False))
        hashes = [xxhash.xxh3_64_intdigest(part.data.cast("B")) for part in parts]
        return cls(document, ends, np.array(hashes, np.uint64))

    def lowest(self, seq_len: int) -> int:
        """Return the lowest hash of a piece longer than ``seq_len``."""
        longer = self.hashes[np.diff(self.ends, prepend=0) > seq_len]
        return int(longer.min()) if len(longer) else 2**64 - 1

    def stretches(self, chosen: NDArray[np.bool_]) -> Iterator[Tokens]:
        """Yield what the chosen pieces are together, neighbours in one."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        at = np.concatenate([[0], self.ends])
        for first, behind in edges.reshape(-1, 2):
            yield self.document[at[first] : at[behind]]
