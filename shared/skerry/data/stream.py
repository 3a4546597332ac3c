"""One learner's stream of sequences: deterministic, disjoint from the others', resumable.

An epoch is a permutation of all training sequences. Shard r of S reads its positions r, r + S,
r + 2S, ...; a learner of rank S or above reads a reshuffle of shard ``rank mod S``. Under
``data.partition = "contiguous"`` shard r is the r-th part of the text instead, in an order of its
own each epoch, so learners read different text. The cursor counts the sequences consumed since the
run began; a stream needs nothing else to resume. A thread reads batches ahead and puts them on the
trainer's devices before it asks for them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.data.corpus import Batch, Corpus, HostBatch, targets_in
from skerry.errors import ConfigError, CorpusError, SkerryError

DEPTH = 4
"""Batches that are read ahead."""
PATIENCE_S = 0.2
Indices = NDArray[np.uint64]
ROUNDS = 4
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FINISH = np.uint64(0xD6E8FEB86659FD93)
SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Permutation:
    """A bijection of ``range(size)`` without a table; other keys give unrelated ones.

    A Feistel network that walks cycles: four rounds over the smallest even number of bits that
    holds ``size``; values that land outside are permuted again until they land inside (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    """

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
            mixed = (right + round_key) * MULTIPLIER
            mixed = (mixed ^ (mixed >> SHIFT)) * FINISH
            left, right = right, left ^ ((mixed ^ (mixed >> SHIFT)) & mask)
        return (left << shift) | right


class Stream:
    """Shard ``rank`` of a corpus; stateless, so that any cursor can be read at any time."""

    def __init__(self, corpus: Corpus, rank: int) -> None:
        self._corpus = corpus
        streams = corpus.config.streams
        self._shard, self._reshuffle = rank % streams, rank // streams

    def order(self, cursor: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the numbers of the sequences at ``[cursor, cursor + count)`` of this stream."""
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

    def read(self, cursor: int, count: int) -> HostBatch:
        """Return ``count`` sequences from ``cursor`` on, in new arrays."""
        return self._corpus.train.batch(self.order(cursor, count))


PERIOD = 1_000
"""Sequences in a period, over which a mixture reads its sources exactly by their weights."""


class Mixture:
    """A stream of several corpora, read by weight; stateless as its parts are.

    In each period source i has n_i turns, spread evenly: so a cursor alone says which turn of which
    source comes next, and no sequence of a source is skipped or read before its turn.
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        self._streams = tuple(streams)
        exact = PERIOD * np.array(weights) / sum(weights)
        self._turns = np.maximum(1, np.round(exact)).astype(np.int64)
        owner = np.repeat(np.arange(len(streams)), self._turns)
        rank = np.concatenate([np.arange(n) for n in self._turns])
        order = np.lexsort((owner, (rank + 0.5) / self._turns[owner]))
        self._owner, self._rank = owner[order], rank[order]

    def places(self, cursor: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sequence from ``cursor`` on, and its cursor in that source."""
        periods, turns = np.divmod(np.arange(cursor, cursor + count), len(self._owner))
        owner = self._owner[turns]
        return owner, periods * self._turns[owner] + self._rank[turns]

    def read(self, cursor: int, count: int) -> HostBatch:
        """Return ``count`` sequences from ``cursor`` on, in new arrays."""
        owner, own = self.places(cursor, count)
        out: HostBatch = {}
        for source in np.unique(owner):
            mine = own[owner == source]
            part = self._streams[source].read(int(mine[0]), len(mine))
            for name, array in part.items():
                out.setdefault(name, np.empty((count, *array.shape[1:]), array.dtype))
                out[name][owner == source] = array
        return out


def stream_of(corpus: Corpus, rank: int) -> Stream | Mixture:
    """Return the stream of the learner of this rank."""
    if not corpus.mixed:
        return Stream(corpus, rank)
    return Mixture([Stream(part, rank) for part in corpus.mixed], corpus.config.weights)


class Prefetched(NamedTuple):
    """A batch (``models.base.Batch``), in numpy or on the device.

    ``cursor`` is the stream's once it is consumed, ``tokens`` the targets that its loss counts.
    """

    batch: dict[str, Any]
    cursor: int
    tokens: int


class Prefetch:
    """An endless iterator over a stream; a context manager that owns its thread.

    An error in the thread (a missing shard, a token out of range) is raised by the next ``next``.
    Only the ``own`` rows of each batch are read, and their targets counted; None: all rows.
    Every batch is a new array, because ``put``, such as ``jax.device_put``, may alias it.
    """

    def __init__(
        self,
        stream: Stream | Mixture,
        cursor: int,
        *,
        batch: int,
        vocab: int | None,
        own: range | None = None,
        put: Callable[[HostBatch], dict[str, Any]] = dict,
    ) -> None:
        self._stream = stream
        self._cursor = cursor
        self._batch = batch
        self._vocab = vocab
        self._own = range(batch) if own is None else own
        self._put = put
        self._ready: queue.Queue[Prefetched | Exception] = queue.Queue(DEPTH)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prefetched:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _fill(self) -> None:
        try:
            while not self._stop.is_set():
                rows = self._stream.read(self._cursor + self._own.start, len(self._own))
                check_tokens(rows["tokens"], self._vocab)
                self._cursor += self._batch
                self._offer(Prefetched(self._put(rows), self._cursor, targets_in(rows)))
        except SkerryError as error:
            self._offer(error)
        except (OSError, ValueError) as error:
            failure = CorpusError(f"The corpus can no longer be read ({error}): restore its files.")
            failure.__cause__ = error
            self._offer(failure)
        except Exception as error:  # noqa: BLE001  a device out of memory: raised where it is read
            self._offer(error)

    def _offer(self, item: Prefetched | Exception) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=PATIENCE_S)
            except queue.Full:
                continue
        return None


def check_tokens(rows: Batch, vocab: int | None) -> None:
    """Raise CorpusError for a token beyond the model's vocabulary; None: any is allowed."""
    most = int(rows.view(np.uint32).max())  # so that those beyond int32 are not negative
    if vocab is not None and most >= vocab:
        msg = f"The corpus holds token {most} but model.vocab is {vocab}: raise model.vocab."
        raise CorpusError(msg, path="model.vocab")


def check_readable(corpus: Corpus, model: object) -> None:
    """Raise ConfigError if a model lacks tokens of a corpus, or cannot take its batches."""
    vocab: int | None = getattr(model, "vocab", None)
    if vocab is not None and corpus.vocab > vocab:
        msg = (
            f"The text's tokenizer has {corpus.vocab} tokens, the model's embedding {vocab}: set"
            f" model.vocab to {corpus.vocab} or more, or prepare the text with the model's own one."
        )
        raise ConfigError(msg, path="model.vocab")
    if corpus.needs_batches and not getattr(model, "takes_batch", False):
        msg = (
            f"data.packing is {corpus.config.packing} but this model takes tokens alone, and would"
            " see documents as one and learn prompts and padding: let its loss take batches, or"
            " give it text without weights and set data.packing=stream."
        )
        raise ConfigError(msg, path="data.packing")
