"""A corpus cut into pieces, each of them for training or held out by its own content.

Two machines with the same text agree about the split without talking, and so do two that have
the same piece at different places: text that is held out somewhere is trained on nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.errors import CorpusError
from skerry.settings import DataConfig
from skerry_learner.data.source import Tokens, read_source

PIECE_BYTES = 65_536
FEWEST_PIECES = 16
Batch = NDArray[np.int32]


class Sequences:
    """Pieces of tokens as numbered sequences of ``seq_len + 1`` tokens; none crosses a piece.

    Neighbours share one token, so that every token but a piece's first is predicted once.
    """

    def __init__(self, pieces: Sequence[Tokens], seq_len: int) -> None:
        self._pieces = pieces
        self._seq_len = seq_len
        counts = [(len(piece) - 1) // seq_len for piece in pieces]
        self._ends = np.array(list(accumulate(counts)), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: NDArray[np.integer]) -> Batch:
        """Copy the sequences with these numbers: int32 [len(indices), seq_len + 1]."""
        out = np.empty((len(indices), self._seq_len + 1), np.int32)
        pieces = np.searchsorted(self._ends, indices.astype(np.int64), side="right")
        for row, (piece, index) in enumerate(zip(pieces, indices, strict=True)):
            before = int(self._ends[piece - 1]) if piece else 0
            start = (int(index) - before) * self._seq_len
            out[row] = self._pieces[piece][start : start + self._seq_len + 1]
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
    pieces = _pieces(documents, config.seq_len)
    if len(pieces) < 2:
        longest = max((len(d) for d in documents), default=0)
        msg = (
            f"The corpus has {longest} tokens, too few to train on and hold out one sequence of"
            f" {config.seq_len + 1} each: add text or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.seq_len")
    hashes = [xxhash.xxh3_64_intdigest(piece.data.cast("B")) for piece in pieces]
    bound = max(int(config.held_out * 2**64), min(hashes))
    held_out = [p for p, h in zip(pieces, hashes, strict=True) if h <= bound]
    train = [p for p, h in zip(pieces, hashes, strict=True) if h > bound]
    corpus = Corpus(Sequences(train, config.seq_len), Sequences(held_out, config.seq_len), config)
    if corpus.sequences_per_shard == 0:
        msg = (
            f"The corpus has {len(corpus.train)} training sequences for data.streams ="
            f" {config.streams}: add text, lower data.streams or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.streams")
    return corpus


def _pieces(documents: Sequence[Tokens], seq_len: int) -> list[Tokens]:
    """Cut at 64 KiB, finer where the corpus is small; tails below one sequence are dropped."""
    total = sum(len(document) for document in documents)
    pieces: list[Tokens] = []
    for document in documents:
        size = max(seq_len + 1, min(PIECE_BYTES // document.itemsize, total // FEWEST_PIECES))
        cuts = (document[start : start + size] for start in range(0, len(document), size))
        pieces += [piece for piece in cuts if len(piece) > seq_len]
    return pieces
