"""Cuts a document into pieces, so that equal text is cut alike on every machine.

Text is cut after lines whose last bytes hash low, as deduplicating backups do: a file that is
longer on another machine, or missing, moves no cut in any other text. Tokens
have no lines; their shards are files that machines share as they are, and are cut at equal
lengths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skerry.data.source import Document, Places, Tokens

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


def ends(document: Document, seq_len: int, total: int) -> Places:
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
    return _no_longer(cuts, LONGEST * size, size)


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


def _no_longer(cuts: Places, most: int, size: int) -> Places:
    """Return the cuts with more of them, ``size`` apart, in every piece longer than ``most``."""
    begins = np.concatenate([[0], cuts[:-1]])
    long = np.flatnonzero(cuts - begins > most)
    more = [np.arange(begins[n] + size, cuts[n], size) for n in long]
    return np.unique(np.concatenate([cuts, *more])) if more else cuts
