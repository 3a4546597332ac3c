"""One learner's stream of sequences: deterministic, disjoint from the others', resumable.

An epoch is a permutation of all training sequences. Of it, shard r of S reads the positions
r, r + S, r + 2S, ...; a learner of rank S or above reads a reshuffle of shard ``rank mod S``. Under
``data.partition = "contiguous"`` shard r is the r-th part of the text instead, in an order of its
own each epoch, so that learners differ in what they read. The cursor counts the sequences
consumed since the run began; a stream needs nothing else to resume.
"""

from __future__ import annotations

import numpy as np

from skerry.data.corpus import Batch, Corpus
from skerry.data.permutation import Permutation


class Stream:
    """Shard ``rank`` of a corpus; stateless, so that any cursor can be read at any time."""

    def __init__(self, corpus: Corpus, rank: int) -> None:
        self._corpus = corpus
        streams = corpus.config.streams
        self._shard, self._reshuffle = rank % streams, rank // streams

    def order(self, cursor: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return which training sequences ``[cursor, cursor + count)`` of this stream are."""
        config, per_epoch = self._corpus.config, self._corpus.sequences_per_shard
        contiguous = config.partition == "contiguous"
        shuffled = per_epoch if contiguous else len(self._corpus.train)
        cursors = np.arange(cursor, cursor + count, dtype=np.int64)
        epochs, turns = np.divmod(cursors, per_epoch)
        indices = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            permutation = Permutation(shuffled, (config.seed, int(epoch), self._reshuffle))
            picked = epochs == epoch
            if contiguous:
                first = self._shard * per_epoch
                indices[picked] = first + permutation(turns[picked]).astype(np.int64)
            else:
                positions = turns[picked] * config.streams + self._shard
                indices[picked] = permutation(positions).astype(np.int64)
        return indices

    def read(self, cursor: int, count: int) -> Batch:
        """Return ``count`` sequences from ``cursor`` on, a new int32 [count, seq_len + 1]."""
        return self._corpus.train.read(self.order(cursor, count))
