"""A corpus cut into pieces, each of them for training or held out by its own content.

Machines agree on this without the same text and without a message: equal pieces are on the same
side on all of them, so no machine trains on text that another holds out. That requires corpora that
are cut alike. Two kinds are not: small ones (below ``FEWEST_PIECES`` of full size) of different
length, and those without a low hash, of which the pieces with the lowest are held out.

Text is cut after lines whose last bytes hash low, as deduplicating backups do: a file that is
longer on another machine, or missing, moves no cut in any other text. Tokens have no lines; their
shards are files that machines share as they are, and are cut at equal lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.data.cache import tokenised
from skerry.data.packing import Packed, digest_of
from skerry.data.source import Document, Places, Tokens, read_source, with_tokenizer
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig

Batch = NDArray[np.int32]
HostBatch = dict[str, NDArray[Any]]
"""``tokens`` int32 [batch, seq + 1] and, where documents are kept apart, the further arrays of
``models.base.Batch``."""
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
SEARCHED = 1 << 24
"""Bytes of text that are searched for line ends at once, which bounds memory."""
WINDOW_WORDS = 6
"""Words of 8 bytes before a line's end that decide whether a cut follows it."""
MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that follow each other in the corpus.

    ``ends`` are those of its documents, where they are known: ascending, the last is its length.
    ``weights`` is how much each token counts as a target; None: all alike.
    """

    tokens: Tokens
    ends: Places | None = None
    weights: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


class Sequences:
    """Stretches of tokens as numbered sequences of ``seq_len + 1``; none crosses a stretch's end.

    Neighbours share one token: every token but a stretch's first is predicted once. With ``apart``,
    documents in one row do not see each other.
    """

    def __init__(self, stretches: Iterable[Stretch], seq_len: int, *, apart: bool = False) -> None:
        self.stretches = tuple(s for s in stretches if len(s) > seq_len)
        self._seq_len = seq_len
        self._apart = apart
        self.weighted = any(s.weights is not None for s in self.stretches)
        counts = [(len(s) - 1) // seq_len for s in self.stretches]
        self._ends = np.array(list(accumulate(counts)), np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @cached_property
    def digest(self) -> str:
        return digest_of(self.stretches)

    def read(self, indices: NDArray[np.integer]) -> Batch:
        """Copy the sequences with these numbers: int32 [len(indices), seq_len + 1]."""
        out = np.empty((len(indices), self._seq_len + 1), np.int32)
        for row, (stretch, start) in zip(out, self._places(indices), strict=True):
            row[:] = stretch.tokens[start : start + self._seq_len + 1]
        return out

    def batch(self, indices: NDArray[np.integer]) -> HostBatch:
        """Return the sequences with these numbers as a batch, in new arrays."""
        batch: HostBatch = {"tokens": self.read(indices)}
        if self._apart:
            segments, positions = (np.empty_like(batch["tokens"]) for _ in range(2))
            for n, (stretch, start) in enumerate(self._places(indices)):
                segments[n], positions[n] = _apart(stretch, start, self._seq_len + 1)
            batch |= {"segments": segments, "positions": positions}
        if self.weighted:
            weights = np.ones((len(indices), self._seq_len), np.float32)
            for row, (stretch, start) in zip(weights, self._places(indices), strict=True):
                if stretch.weights is not None:
                    row[:] = stretch.weights[start + 1 : start + self._seq_len + 1]
            batch["weights"] = weights
        return batch

    def _places(self, indices: NDArray[np.integer]) -> Iterator[tuple[Stretch, int]]:
        """Yield the stretch of each sequence, and where it begins there."""
        places = np.searchsorted(self._ends, indices.astype(np.int64), side="right")
        for place, index in zip(places, indices, strict=True):
            before = int(self._ends[place - 1]) if place else 0
            yield self.stretches[place], (int(index) - before) * self._seq_len


def _apart(stretch: Stretch, start: int, size: int) -> tuple[Places, Places]:
    """Return the documents of a stretch's tokens from ``start`` on, and the places in them.

    Documents count from 1; the first one's places count from ``start``.
    """
    ends = np.array([start + size])
    if stretch.ends is not None:
        first, last = np.searchsorted(stretch.ends, [start, start + size - 1], side="right")
        ends = np.append(stretch.ends[first:last], ends)
    begins = np.concatenate([[start], ends[:-1]])
    sizes = ends - begins
    document = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return document, np.arange(size) - np.repeat(begins - start, sizes)


def targets_in(batch: HostBatch) -> int:
    """Return how many targets a batch's loss counts, whatever each of them weighs."""
    tokens, segments, weights = (batch.get(name) for name in ("tokens", "segments", "weights"))
    assert tokens is not None  # every batch has them
    counted = np.ones((len(tokens), tokens.shape[1] - 1), np.bool_)
    if segments is not None:
        counted &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    if weights is not None:
        counted &= weights > 0
    return int(np.count_nonzero(counted))


@dataclass(frozen=True)
class Corpus:
    """The training text and the held-out text of a run.

    ``digest`` is of all its text, in order. ``mixed`` are its parts if they are read by weight, one
    for each of ``data.paths``. ``bytes_per_token`` are the bytes of text per target in the held-out
    text, ``vocab`` is that of its tokenizer; 0 if not known.
    """

    train: Sequences | Packed
    held_out: Sequences
    config: DataConfig
    digest: str
    mixed: tuple[Corpus, ...] = ()
    bytes_per_token: float = 0.0
    vocab: int = 0

    @property
    def needs_batches(self) -> bool:
        """True if batches need more arrays than tokens: segments or weights."""
        return self.config.packing != "stream" or self.train.weighted or self.held_out.weighted

    @cached_property
    def sequences_per_shard(self) -> int:
        """Sequences in one epoch of one stream."""
        return len(self.train) // self.config.streams

    def held_out_batches(self, batch: int, limit: int) -> Iterator[HostBatch]:
        """Yield at most ``limit`` batches, the same each time, spread over the held-out text."""
        total = len(self.held_out)
        batch = min(batch, total)
        batches = min(limit, total // batch)
        picked = np.linspace(0, total - 1, batches * batch).astype(np.int64)
        for rows in picked.reshape(batches, batch):
            yield self.held_out.batch(rows)


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text and split it; CorpusError when it is unreadable, empty or too short.

    The parts of a mixture are cut and held out as its whole text is: no text is trained on in one
    and held out in another, and a small part need hold out nothing.
    """
    config = with_tokenizer(tokenised(config))
    named = [(path,) for path in config.paths] if config.weights else [config.paths]
    parts = [config.model_copy(update={"paths": paths, "weights": ()}) for paths in named]
    documents = [read_source(part) for part in parts]
    cuts, bound = _cut(list(chain.from_iterable(documents)), config)
    whole = _corpus(cuts, bound, config)
    if not config.weights:
        return whole
    left, mixed = iter(cuts), list[Corpus]()
    for part, own in zip(parts, documents, strict=True):
        mixed.append(_corpus(list(islice(left, len(own))), bound, part, part.paths[0]))
        mixed[-1].train.weighted = whole.train.weighted  # all batches have the same arrays
    return replace(whole, mixed=tuple(mixed))


def split(documents: Sequence[Document], config: DataConfig) -> Corpus:
    """Cut documents into pieces and sort them by content hash into training and held-out text."""
    return _corpus(*_cut(documents, config), config)


def _cut(documents: Sequence[Document], config: DataConfig) -> tuple[list[_Cut], np.uint64]:
    """Return documents cut into pieces, and the largest hash of those that are held out."""
    total = sum(len(document.tokens) for document in documents)
    cuts = [_Cut.of(document, config.seq_len, total) for document in documents]
    return cuts, np.uint64(_bound(cuts, config))


def _corpus(cuts: Sequence[_Cut], bound: np.uint64, config: DataConfig, part: str = "") -> Corpus:
    """Return the corpus of pieces; ``part`` is its name in a mixture, which holds out for it."""
    apart = config.packing != "stream"
    chosen, left_out = (
        list(chain.from_iterable(cut.stretches(cut.hashes > bound) for cut in cuts)),
        list(chain.from_iterable(cut.stretches(cut.hashes <= bound) for cut in cuts)),
    )
    held_out = Sequences(_usable(left_out, config.seq_len), config.seq_len, apart=apart)
    train: Sequences | Packed
    if config.packing == "fit":
        train = Packed(chosen, config.seq_len)
    else:
        train = Sequences(_usable(chosen, config.seq_len), config.seq_len, apart=apart)
    name = part or "The corpus"
    if not len(train) or not (part or len(held_out)):
        total = sum(len(cut.document.tokens) for cut in cuts)
        pieces = sum(len(cut.ends) for cut in cuts)
        msg = (
            f"{name} has {total} tokens in {pieces} piece{'s' * (pieces != 1)}, too few"
            f" to train on and hold out one sequence of {config.seq_len + 1} each: add text that"
            " differs (prepared text is held out by whole documents), or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.seq_len")
    written = _bytes_per_token(cuts, bound)
    corpus = Corpus(train, held_out, config, _digest(cuts), bytes_per_token=written)
    corpus = replace(corpus, vocab=max((cut.document.vocab for cut in cuts), default=0))
    if corpus.sequences_per_shard == 0:
        msg = (
            f"{name} has {len(corpus.train)} training sequences for data.streams ="
            f" {config.streams}: add text, lower data.streams or lower data.seq_len."
        )
        raise CorpusError(msg, path="data.streams")
    return corpus


def _digest(cuts: Sequence[_Cut]) -> str:
    """Return a hash of all pieces of text, 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for cut in cuts:
        for numbers in (cut.ends, cut.hashes):
            digest.update(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def _bytes_per_token(cuts: Sequence[_Cut], bound: np.uint64) -> float:
    """Return the bytes of text per target of the held-out text; 0 if not known."""
    written, targets = 0, 0
    for cut in cuts:
        held, whole = cut.hashes <= bound, cut.document
        if whole.text_bytes is None:
            return 1.0 if whole.files is not None and whole.hashes is None else 0.0
        written += int(whole.text_bytes[held].sum())
        for stretch in cut.stretches(held):
            weights = stretch.weights
            targets += len(stretch) if weights is None else int(np.count_nonzero(weights))
    return written / max(1, targets)


def _bound(cuts: Sequence[_Cut], config: DataConfig) -> int:
    """Return the largest hash of held-out pieces: for the share asked for, or for one sequence."""
    hashes = np.concatenate([cut.hashes for cut in cuts]) if cuts else np.empty(0, np.uint64)
    sizes = np.concatenate([np.diff(cut.ends, prepend=0) for cut in cuts]) if cuts else hashes
    order = np.argsort(hashes)
    enough = np.flatnonzero(np.cumsum(sizes[order]) > config.seq_len)[:1]
    least = int(hashes[order[enough[0]]]) if len(enough) else 0
    return min(2**64 - 1, max(int(config.held_out * 2**64), least))


def _usable(stretches: Sequence[Stretch], seq_len: int) -> list[Stretch]:
    """Return the stretches that a sequence fits into.

    Short ones are joined where they are most of the text, as in a corpus of many small files.
    """
    long, short = (
        [one for one in stretches if (len(one) > seq_len) is fits] for fits in (True, False)
    )
    if sum(map(len, short)) <= sum(map(len, long)):
        return long
    return [*long, _one(short)]


def _one(stretches: Sequence[Stretch]) -> Stretch:
    """Join stretches; the end of each is the end of a document."""
    begins = accumulate((len(s) for s in stretches[:-1]), initial=0)
    ends = [
        begin + (np.array([len(s)]) if s.ends is None else s.ends)
        for begin, s in zip(begins, stretches, strict=True)
    ]
    weighted = any(s.weights is not None for s in stretches)
    weights = [np.ones(len(s), np.bool_) if s.weights is None else s.weights for s in stretches]
    tokens = np.concatenate([s.tokens for s in stretches])
    return Stretch(tokens, np.concatenate(ends), np.concatenate(weights) if weighted else None)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A document with the ends of its pieces and the xxh3-64 of each."""

    document: Document
    ends: Places
    hashes: Hashes

    @classmethod
    def of(cls, document: Document, seq_len: int, total: int) -> _Cut:
        if document.hashes is not None and document.files is not None:
            return cls(document, document.files, document.hashes)
        ends, tokens = _ends(document, seq_len, total), document.tokens
        begins = chain([0], ends)
        parts = (tokens[begin:end] for begin, end in zip(begins, ends, strict=False))
        hashes = [xxhash.xxh3_64_intdigest(part.data.cast("B")) for part in parts]
        return cls(document, ends, np.array(hashes, np.uint64))

    def stretches(self, chosen: NDArray[np.bool_]) -> Iterator[Stretch]:
        """Yield the chosen pieces, neighbours joined."""
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        at, whole = np.concatenate([[0], self.ends]), self.document
        for first, end in edges.reshape(-1, 2):
            begin, stop = int(at[first]), int(at[end])
            weights = None if whole.weights is None else whole.weights[begin:stop]
            ends = None
            if whole.files is not None:
                inside = slice(*np.searchsorted(whole.files, [begin + 1, stop]))
                ends = np.append(whole.files[inside], stop) - begin
            yield Stretch(whole.tokens[begin:stop], ends, weights)


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
    found = [_lines_in(text, files, size, at) for at in range(0, len(text), SEARCHED)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _lines_in(text: Tokens, files: Places, size: int, at: int) -> Places:
    """Return what ``_lines`` does, for the SEARCHED bytes from ``at`` on."""
    window = 8 * WINDOW_WORDS
    lines: Places = np.flatnonzero(text[at : at + SEARCHED] == LINE) + at + 1
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
