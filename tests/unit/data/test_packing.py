"""Documents packed whole into rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.data.corpus import Stretch, split, targets_in
from skerry.data.packing import Packed, pack, pieces
from skerry.data.source import text
from skerry.settings.models import DataConfig

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60)


def documents(lengths: list[int], *, masked: bool = False) -> Stretch:
    """Return documents whose tokens are all different."""
    tokens = np.arange(1, 1 + sum(lengths), dtype=np.uint16)
    targets = tokens % 3 == 0 if masked else None
    return Stretch(tokens, np.cumsum(lengths), targets)


@settings(max_examples=200)
@given(st.lists(st.integers(1, 24), max_size=120))
def test_every_piece_is_in_one_row_and_no_row_overflows(sizes: list[int]) -> None:
    order, ends = pack(np.array(sizes, np.int64), 24)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    held = [np.array(sizes)[part].sum() for part in np.split(order, ends[:-1]) if len(part)]
    assert all(1 <= total <= 24 for total in held)
    assert len(held) == len(ends)
    assert sum(sorted(held)[:2]) > 24 or len(held) < 2  # else two rows would be one


@given(lengths=LENGTHS, masked=st.booleans())
def test_every_target_of_every_document_is_predicted_once_after_what_precedes_it(
    lengths: list[int], *, masked: bool
) -> None:
    stretch = documents(lengths, masked=masked)
    rows = Packed([stretch], 15)
    batch = rows.batch(np.arange(len(rows)))
    tokens, segments = batch["tokens"], batch["segments"]
    counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    if masked:
        counted &= batch["weights"] > 0
    firsts = {1, *(1 + np.cumsum(lengths)).tolist()}
    wanted = [t for t in stretch.tokens.tolist() if t not in firsts and (not masked or t % 3 == 0)]
    assert sorted(tokens[:, 1:][counted].tolist()) == wanted
    np.testing.assert_array_equal(tokens[:, :-1][counted] + 1, tokens[:, 1:][counted])
    assert targets_in(batch) == len(wanted)


@given(LENGTHS)
def test_a_document_that_a_row_can_hold_is_in_one_row(lengths: list[int]) -> None:
    found = pieces([documents(lengths)], 16)
    begins = np.cumsum(lengths) - lengths
    for begin, length in zip(begins, lengths, strict=True):
        mine = (found.start >= begin) & (found.start < begin + length)
        assert mine.sum() == -(-(length - 1) // 15)


def test_rows_are_the_same_in_whatever_order_they_are_read() -> None:
    rows = Packed([documents([3, 9, 16, 2]), documents([40, 5])], 15)
    both, one = rows.batch(np.array([1, 0])), rows.batch(np.array([0]))
    np.testing.assert_array_equal(both["segments"][1], one["segments"][0])
    np.testing.assert_array_equal(both["tokens"][1], rows.read(np.array([0]))[0])


def test_training_text_is_packed_and_no_held_out_token_is_padding() -> None:
    files = [bytes([65 + n % 26]) * (5 + n % 40) for n in range(400)]
    corpus = split([text([file] for file in files)], DataConfig(seq_len=31, packing="fit"))
    batch = corpus.train.batch(np.arange(len(corpus.train)))
    assert set(batch) == {"tokens", "segments", "positions"}
    assert corpus.held_out.batch(np.arange(len(corpus.held_out)))["segments"].min() == 1


def test_common_lengths_leave_little_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 20_000).astype(np.int64) + 2
    stretch = Stretch(np.zeros(int(lengths.sum()), np.uint16), np.cumsum(lengths))
    rows = Packed([stretch], 1023)
    segments = rows.batch(np.arange(len(rows)))["segments"]
    assert np.count_nonzero(segments) / segments.size > 0.99
