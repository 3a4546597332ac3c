"""A corpus cut into pieces, each of them for training or held out by its own content.

Machines need neither the same text nor a message to agree: equal pieces are on the same side on all
of them, so that no machine trains on text that another holds out. That needs corpora that are cut
alike. Two kinds are not: small ones (below ``FEWEST_PIECES`` of full size) of different
length, and those without a low hash, of which the pieces with the lowest are held out.

Text is cut after lines whose last bytes hash low, as deduplicating backups do: a file that is
longer on another machine, or missing, moves no cut in any other text. Tokens have no lines; their
shards are files that machines share as they are, and are cut at equal lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.data.source import Document, Places, Tokens, read_source
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig

Batch = NDArray[np.int32]
Hashes = NDArray[np.uint64]
PIECE_TOKENS = 4_096
"""Average tokens of a piece, unless ``PIECE_SEQUENCES`` sequences are more."""
PIECE_SEQUENCES = 16
LONGEST = 4
"""A piece of text without a cut for this many averages is cut at equal lengths, too."""
SHARD_TOKENS = 32_768
FEWEST_PIECES = 16
LINE_BYTES = 32
"""Average bytes of a line of text, which sets the share of lines that end a piece."""
LINE = 10
"""The byte that ends a line."""
WINDOW_WORDS = 6
"""Words of 8 bytes before a line's end that decide whether a cut follows it."""
MIX = np.uint64(0x9E3779B97F4A7C15)


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

    @cached_property
    def digest(self) -> str:
        """A hash of these stretches in their order, 16 hexadecimal digits.

        Reads all of them once.
        """
        digest = xxhash.xxh3_64()
        for stretch in self.stretches:
            digest.update(len(stretch).to_bytes(8, "little"))
            digest.update(stretch.data.cast("B"))
        return digest.hexdigest()

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
    """The training text and the held-out text of a run."""

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


def split(documents: Sequence[Document], config: DataConfig) -> Corpus:
    """Cut documents into pieces and sort them by content hash into training and held-out text."""
    total = sum(len(document.tokens) for document in documents)
    cuts = [_Cut.of(document, config.seq_len, total) for document in documents]
    bound = np.uint64(_bound(cuts, config))
    train, held_out = (
        Sequences(_usable(list(side), config.seq_len), config.seq_len)
        for side in (
            chain.from_iterable(cut.stretches(cut.hashes > bound) for cut in cuts),
            chain.from_iterable(cut.stretches(cut.hashes <= bound) for cut in cuts),
        )
    )
    if not len(train) or not len(held_out):
        msg = (
            f"The corpus has {total} tokens, too few to train on and hold out one sequence of"
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


def _bound(cuts: Sequence[_Cut], config: DataConfig) -> int:
    """Return the largest hash of held-out pieces: for the share asked for, or for one sequence."""
    hashes = np.concatenate([cut.hashes for cut in cuts]) if cuts else np.empty(0, np.uint64)
    sizes = np.concatenate([np.diff(cut.ends, prepend=0) for cut in cuts]) if cuts else hashes
    order = np.argsort(hashes)
    enough = np.flatnonzero(np.cumsum(sizes[order]) > config.seq_len)[:1]
    least = int(hashes[order[enough[0]]]) if len(enough) else 0
    return min(2**64 - 1, max(int(config.held_out * 2**64), least))


def _usable(stretches: Sequence[Tokens], seq_len: int) -> list[Tokens]:
    """Return the stretches that a sequence fits into.

    Short ones are joined where they are most of the text, as in a corpus of many small files.
    """
    long, short = (
        [one for one in stretches if (len(one) > seq_len) is fits] for fits in (True, False)
    )
    if sum(map(len, short)) <= sum(map(len, long)):
        return long
    return [*long, np.concatenate(short)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A document with the ends of its pieces and the xxh3-64 of each."""

    tokens: Tokens
    ends: Places
    hashes: Hashes

    @classmethod
    def of(cls, document: Document, seq_len: int, total: int) -> _Cut:
        ends, tokens = _ends(document, seq_len, total), document.tokens
        begins = chain([0], ends)
        parts = (tokens[begin:end] for begin, end in zip(begins, ends, strict=False))
        hashes = [xxhash.xxh3_64_intdigest(part.data.cast("B")) for part in parts]
        return cls(tokens, ends, np.array(hashes, np.uint64))

    def stretches(self, chosen: NDArray[np.bool_]) -> Iterator[Tokens]:
        """Yield the chosen pieces, neighbours joined."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        at = np.concatenate([[0], self.ends])
        for first, end in edges.reshape(-1, 2):
            yield self.tokens[at[first] : at[end]]


def _ends(document: Document, seq_len: int, total: int) -> Places:
    """Return where the pieces of a document end, ascending; the last is its length.

    ``total`` are the tokens of the whole corpus: a small one is cut finer.
    """
    tokens, files = document.tokens, document.files
    size = max(PIECE_TOKENS, PIECE_SEQUENCES * (seq_len + 1))
    if files is None:
        size = max(size, SHARD_TOKENS)
    size = max(seq_len + 1, min(size, total // FEWEST_PIECES))
    length = np.array([len(tokens)], np.int64)
    if files is None:
        return np.unique(np.concatenate([np.arange(size, len(tokens), size), length]))
    cuts = np.unique(np.concatenate([files, _lines(tokens, files, size), length]))
    begins = np.concatenate([[0], cuts[:-1]])
    long = np.flatnonzero(cuts - begins > LONGEST * size)
    more = [np.arange(begins[n] + size, cuts[n], size) for n in long]
    return np.unique(np.concatenate([cuts, *more])) if more else cuts


def _lines(text: Tokens, files: Places, size: int) -> Places:
    """Return the ends of lines that end a piece; only bytes of the line's own file decide."""
    window = 8 * WINDOW_WORDS
    lines: Places = np.flatnonzero(text == LINE) + 1
    begun = np.concatenate([[0], files])[np.searchsorted(files, lines, side="right")]
    lines = lines[lines - begun >= window]
    if not len(lines):
        return lines
    words = np.ndarray((len(text) - 7,), "<u8", text.data, strides=(1,))
    mixed = np.zeros(len(lines), np.uint64)
    for word in range(WINDOW_WORDS):
        mixed = (mixed ^ words[lines - window + 8 * word]) * MIX
        mixed ^= mixed >> np.uint64(32)
    low: NDArray[np.bool_] = mixed <= np.uint64(min(2**64 - 1, int(LINE_BYTES / size * 2**64)))
    chosen: Places = lines[low]
    return chosen
