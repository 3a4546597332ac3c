"""Corpora, the held-out split, and disjoint resumable streams."""

from __future__ import annotations

import gzip
import re
import resource
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.data.corpus import Corpus, HostBatch, Sequences, Stretch, load_corpus, split
from skerry.data.source import Document, text
from skerry.data.stream import Permutation, Prefetch, Stream, check_tokens
from skerry.errors import CorpusError
from skerry.settings.models import DataConfig


def corpus_of(
    size: int,
    *,
    seq_len: int = 8,
    streams: int = 4,
    seed: int = 0,
    partition: Literal["interleaved", "contiguous"] = "interleaved",
) -> Corpus:
    tokens = np.random.default_rng(0).integers(0, 2**32, size, dtype=np.uint32)
    config = DataConfig(seq_len=seq_len, streams=streams, seed=seed, partition=partition)
    return split([Document(tokens)], config)


def test_a_text_is_told_by_what_it_says_however_it_is_read() -> None:
    corpus, same = corpus_of(3000), corpus_of(3000, streams=2, seed=5, partition="contiguous")
    assert corpus.train.digest == same.train.digest
    assert corpus.held_out.digest == same.held_out.digest
    told = [side.digest for side in (corpus.train, corpus.held_out, corpus_of(2900).train)]
    assert len(set(told)) == len(told)
    halves = [np.arange(9, dtype=np.uint8), np.arange(9, 20, dtype=np.uint8)]
    cuts = ([np.concatenate(halves)], halves, halves[::-1])
    assert len({Sequences(map(Stretch, stretches), 8).digest for stretches in cuts}) == len(cuts)


@settings(max_examples=60)
@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_a_permutation_visits_every_position_once(size: int, key: int) -> None:
    image = Permutation(size, (key,))(np.arange(size))
    np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_other_keys_give_other_orders() -> None:
    orders = [Permutation(1000, (0, epoch))(np.arange(1000)) for epoch in range(2)]
    assert np.mean(orders[0] == orders[1]) < 0.02
    assert np.mean(orders[0] == np.arange(1000)) < 0.02


@settings(max_examples=30)
@given(st.integers(300, 4000), st.integers(1, 6), st.integers(0, 5))
def test_streams_of_one_epoch_are_disjoint(size: int, streams: int, seed: int) -> None:
    corpus = corpus_of(size, streams=streams, seed=seed)
    per_shard = corpus.sequences_per_shard
    orders = [Stream(corpus, rank).order(0, per_shard) for rank in range(streams)]
    together = np.concatenate(orders)
    assert len(np.unique(together)) == streams * per_shard
    assert len(corpus.train) - len(together) < streams


@settings(max_examples=30)
@given(st.integers(300, 4000), st.integers(1, 6), st.integers(0, 12))
def test_a_contiguous_stream_reads_each_sequence_of_its_own_part_once(
    size: int, streams: int, rank: int
) -> None:
    corpus = corpus_of(size, streams=streams, partition="contiguous")
    per_shard = corpus.sequences_per_shard
    part = np.arange(per_shard) + rank % streams * per_shard
    for epoch in range(2):
        order = Stream(corpus, rank).order(epoch * per_shard, per_shard)
        np.testing.assert_array_equal(np.sort(order), part)


def test_a_contiguous_stream_has_another_order_each_epoch_and_for_each_reader() -> None:
    corpus = corpus_of(4000, partition="contiguous")
    per_shard = corpus.sequences_per_shard
    one, other = Stream(corpus, 1), Stream(corpus, 5)
    first = one.order(0, per_shard)
    for order in (one.order(per_shard, per_shard), other.order(0, per_shard), np.sort(first)):
        assert np.mean(order == first) < 0.1


@settings(max_examples=30)
@given(st.integers(0, 500), st.integers(1, 40), st.integers(0, 9))
def test_a_cursor_resumes_exactly_where_it_was(cursor: int, count: int, rank: int) -> None:
    stream = Stream(corpus_of(2000), rank)
    whole = stream.read(0, cursor + count)["tokens"]
    np.testing.assert_array_equal(stream.read(cursor, count)["tokens"], whole[cursor:])


def test_ranks_beyond_the_streams_read_a_reshuffle() -> None:
    corpus = corpus_of(4000)
    first, again = Stream(corpus, 1).order(0, 50), Stream(corpus, 5).order(0, 50)
    assert not np.array_equal(first, again)


def test_the_next_epoch_reads_the_same_sequences_in_another_order() -> None:
    corpus = corpus_of(4000, streams=1)
    size = corpus.sequences_per_shard
    one, two = Stream(corpus, 0).order(0, size), Stream(corpus, 0).order(size, size)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(np.sort(one), np.sort(two))


def test_sequences_share_one_token_and_cover_the_piece() -> None:
    document = np.arange(81, dtype=np.uint32)
    config = DataConfig(seq_len=8, streams=1)
    corpus = split([Document(document), Document(document + 100)], config)
    rows = corpus.train.read(np.arange(len(corpus.train)))
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows[:, 1:] - rows[:, :-1], 1)


def text_files(count: int) -> list[bytes]:
    """Return files of some hundred lines each; no line is there twice."""
    return [
        b"".join(b"line %d of %d: %d\n" % (line, n, (7919 * line + n) ** 3) for line in range(size))
        for n, size in enumerate(np.random.default_rng(0).integers(50, 400, count))
    ]


def split_text(files: Sequence[bytes], held_out: float = 0.3) -> tuple[set[bytes], set[bytes]]:
    """Return the lines that are trained on and those that are held out."""
    corpus = split([text([file] for file in files)], DataConfig(seq_len=16, held_out=held_out))
    train, rest = (
        {
            line
            for stretch in side.stretches
            for line in re.findall(rb"[^\n\0]+", stretch.tokens.tobytes())
        }
        for side in (corpus.train, corpus.held_out)
    )
    return train, rest


@settings(max_examples=20)
@given(st.permutations(range(24)), st.integers(16, 24))
def test_text_that_one_machine_holds_out_no_other_trains_on(order: list[int], count: int) -> None:
    files = text_files(24)
    train, held_out = split_text(files)
    other_train, other_held_out = split_text([files[n] for n in order[:count]])
    assert len(held_out) > 200
    assert len(other_held_out) > 200
    assert not held_out & other_train
    assert not other_held_out & train


@settings(max_examples=20)
@given(st.integers(0, 19), st.integers(0, 2000), st.binary(min_size=1, max_size=40))
def test_an_edit_changes_the_side_of_no_text_in_other_files(n: int, at: int, new: bytes) -> None:
    files = text_files(20)
    before = split_text(files)
    files[n] = files[n][:at] + new + files[n][at:]
    after = split_text(files)
    elsewhere = {line for k, file in enumerate(files) if k != n for line in file.splitlines()}
    for side, other in zip(before, after, strict=True):
        assert side & elsewhere == other & elsewhere


def test_most_of_an_edited_file_stays_on_its_side() -> None:
    rest = text_files(19)
    long = b"\n".join(f"entry {n} {n * n}".encode() for n in range(20_000))
    before = split_text([long, *rest])[1]
    after = split_text([long[:150_000] + b"a new line\n" + long[150_000:], *rest])[1]
    assert len(before & after) > 0.8 * len(before)


def test_text_is_held_once_while_it_is_read_and_cut_and_cut_as_it_is_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "big.txt").write_bytes(b"".join(text_files(400)))
    size = (tmp_path / "big.txt").stat().st_size
    config = DataConfig(source="text", paths=(str(tmp_path),))
    whole = load_corpus(config)
    monkeypatch.setattr("skerry.data.source.BLOCK_BYTES", size // 40)
    monkeypatch.setattr("skerry.data.corpus.SEARCHED", size // 40)
    tracemalloc.start()
    try:
        in_parts = load_corpus(config)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert in_parts.digest == whole.digest
    assert peak < 1.4 * size


def test_text_without_lines_is_cut_all_the_same() -> None:
    line = np.random.default_rng(2).integers(1, 9, 300_000, np.uint8)
    corpus = split([text([[line.tobytes()]])], DataConfig())
    assert len(corpus.held_out.stretches) >= 1
    assert len(corpus.train) * 128 > 250_000


def test_what_is_left_between_held_out_pieces_is_read_without_seams() -> None:
    whole = text([file] for file in [b"a short file\n" * 3] * 2000 + text_files(8))
    corpus = split([whole], DataConfig(seq_len=128, held_out=0.02))
    assert sum(len(s) for s in corpus.train.stretches) > 0.7 * len(whole.tokens)


@pytest.mark.parametrize("seq_len", [128, 1024])
@pytest.mark.parametrize("size", [100, 150])
def test_many_files_that_no_sequence_fits_into_are_a_corpus(seq_len: int, size: int) -> None:
    dice = np.random.default_rng(seq_len + size)
    files = [dice.integers(32, 127, size, np.uint8).tobytes() for _ in range(3000)]
    for more in ([], [dice.integers(32, 127, 3 * size, np.uint8).tobytes() for _ in range(2)]):
        corpus = split([text([file] for file in [*files, *more])], DataConfig(seq_len=seq_len))
        train, held_out = (
            sum(map(len, side.stretches)) for side in (corpus.train, corpus.held_out)
        )
        assert train > 0.9 * 3000 * size
        assert 0.01 * 3000 * size < held_out < 0.04 * 3000 * size


def test_text_of_two_bytes_a_character_is_cut_by_its_files_alone() -> None:
    files = [file.decode().encode("utf-16") for file in text_files(24)]
    corpus = split([text([file] for file in files)], DataConfig(seq_len=64, held_out=0.2))
    held_out = sum(map(len, corpus.held_out.stretches))
    assert 0.05 < held_out / sum(map(len, files)) < 0.5
    assert max(map(len, corpus.held_out.stretches)) > 500


def test_tokens_of_one_byte_are_no_text() -> None:
    tokens = np.random.default_rng(4).integers(0, 20, 200_000).astype(np.uint8)
    narrow, wide = (
        split([Document(tokens.astype(dtype))], DataConfig(source="tokens"))
        for dtype in (np.uint8, np.uint16)
    )
    for corpus in (narrow, wide):
        whole = len(corpus.train) + len(corpus.held_out)
        assert whole * 128 > 0.9 * len(tokens)


@pytest.mark.parametrize("size", [60, 200, 500])
def test_a_handful_of_lines_is_a_corpus_of_short_sequences(size: int) -> None:
    lines = b"".join(
        b"%d: a line that is long enough to end a piece of it\n" % n for n in range(14)
    )
    corpus = split([text([[lines[:size]]])], DataConfig(seq_len=8, streams=1))
    assert len(corpus.held_out) >= 1
    assert len(corpus.train) * 8 > size / 2


def _rows(corpus: Corpus) -> set[bytes]:
    held_out = corpus.held_out
    return {row.tobytes() for row in held_out.read(np.arange(len(held_out)))}


def test_held_out_text_is_never_trained_on() -> None:
    corpus = corpus_of(60_000, seq_len=16)
    trained = corpus.train.read(np.arange(len(corpus.train)))
    assert not _rows(corpus) & {row.tobytes() for row in trained}


def test_a_mixture_trains_on_nothing_that_it_holds_out(tmp_path: Path) -> None:
    for name, lines in (("small", 600), ("large", 6000)):
        text = (f"line {n} of {name}: {n * n}, {n % 97}\n" for n in range(lines))
        (tmp_path / f"{name}.txt").write_text("".join(text))
    paths = tuple(str(tmp_path / f"{name}.txt") for name in ("small", "large"))
    config = DataConfig(source="text", paths=paths, weights=(1, 1), seq_len=64, held_out=0.3)
    corpus = load_corpus(config)
    held_out, trained = (
        {line for one in stretches for line in one.tokens.tobytes().splitlines() if b":" in line}
        for stretches in (
            corpus.held_out.stretches,
            [one for part in corpus.mixed for one in part.train.stretches],
        )
    )
    assert any(b"small" in line for line in held_out)
    assert not held_out & trained


@pytest.mark.parametrize("partition", ["interleaved", "contiguous"])
def test_no_learner_of_any_rank_reads_held_out_text(
    partition: Literal["interleaved", "contiguous"],
) -> None:
    corpus = corpus_of(20_000, partition=partition)
    held_out = {token for row in _rows(corpus) for token in np.frombuffer(row, np.int32).tolist()}
    per_shard = corpus.sequences_per_shard
    for rank in range(2 * corpus.config.streams + 1):
        read = Stream(corpus, rank).read(0, 2 * per_shard)["tokens"]
        # The text is random numbers of 32 bits: a token of it stands at one place only.
        assert held_out.isdisjoint(read.reshape(-1).tolist())


def test_held_out_batches_are_always_the_same() -> None:
    corpus = corpus_of(60_000)
    one, two = (list(corpus.held_out_batches(4, 5)) for _ in range(2))
    assert 1 <= len(one) <= 5
    for mine, theirs in zip(one, two, strict=True):
        np.testing.assert_equal(mine, theirs)


def test_the_standard_library_is_a_corpus() -> None:
    corpus = load_corpus(DataConfig())
    assert len(corpus.train) * 128 > 2_000_000
    assert 0.001 < len(corpus.held_out) / len(corpus.train) < 0.1


def test_text_folders_are_read_by_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("spam " * 200)
    (tmp_path / "b.png").write_bytes(b"\xff" * 5000)
    corpus = load_corpus(DataConfig(source="text", paths=(str(tmp_path),), seq_len=16))
    assert corpus.train.read(np.arange(len(corpus.train))).max() < 128


@pytest.mark.parametrize("name", ["shard.bin", "shard.npy"])
def test_token_shards_are_mapped(tmp_path: Path, name: str) -> None:
    tokens: NDArray[np.uint16] = np.arange(4000, dtype=np.uint16)
    path = tmp_path / name
    np.save(path, tokens) if name.endswith("npy") else tokens.tofile(path)
    corpus = load_corpus(DataConfig(source="tokens", paths=(str(path),), seq_len=16))
    assert corpus.train.read(np.arange(len(corpus.train))).max() > 3000


def test_more_token_shards_are_mapped_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    for number in range(80):
        tokens = np.arange(80 * number, 80 * number + 80, dtype=np.uint16)
        tokens.tofile(tmp_path / f"{number:02}.bin")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/dev/fd").iterdir()]) + 40, hard))
    try:
        corpus = load_corpus(DataConfig(source="tokens", paths=(str(tmp_path),), seq_len=16))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert corpus.train.digest


def test_token_ids_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4000, dtype=np.uint64) + 2**32)
    with pytest.raises(CorpusError, match="at most 32 bits"):
        load_corpus(DataConfig(source="tokens", paths=(str(tmp_path),), seq_len=16))


def test_a_folder_that_cannot_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "readable.txt").write_text("text" * 1000)

    def refuse(folder: str) -> None:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr("os.scandir", refuse)  # the tests may run as root, whom nothing is refused
    config = DataConfig(source="text", paths=(str(tmp_path),))
    with pytest.raises(CorpusError, match=f"Cannot read {tmp_path}: Permission denied"):
        load_corpus(config)


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", {"seq_len": 16}),
        ("short", {"seq_len": 16}),
        ("x" * 40, {"seq_len": 16, "streams": 8}),
        (None, {}),
    ],
)
def test_a_corpus_that_cannot_be_used_is_one_clear_error(
    tmp_path: Path, text: str | None, config: dict[str, int]
) -> None:
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CorpusError, match=r"data\."):
        load_corpus(DataConfig.model_validate({"source": "text", "paths": [str(path)], **config}))


def test_a_table_is_not_read_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1" * 4000)
    config = DataConfig(source="text", paths=(str(tmp_path / "rows.parquet"),), seq_len=16)
    with pytest.raises(CorpusError, match=r"rows\.parquet is a table.*data\.tokenizer_folder"):
        load_corpus(config)


def test_a_compressed_file_is_not_read_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(np.random.default_rng(0).bytes(9000)))
    config = DataConfig(source="text", paths=(str(tmp_path / "*.gz"),), seq_len=16)
    with pytest.raises(CorpusError, match=r"a\.txt\.gz is compressed"):
        load_corpus(config)


def test_a_folder_in_place_of_a_token_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="names no file"):
        load_corpus(DataConfig(source="tokens", paths=(str(tmp_path),)))


def test_prefetched_batches_follow_the_stream() -> None:
    stream = Stream(corpus_of(4000), 2)
    with Prefetch(stream, cursor=12, batch=4, vocab=None) as batches:
        first, second = next(batches), next(batches)
    np.testing.assert_array_equal(first.batch["tokens"], stream.read(12, 4)["tokens"])
    np.testing.assert_array_equal(second.batch["tokens"], stream.read(16, 4)["tokens"])
    assert (first.cursor, second.cursor) == (16, 20)


def test_a_process_reads_its_own_rows_of_each_batch() -> None:
    stream = Stream(corpus_of(4000), 2)
    with Prefetch(stream, cursor=12, batch=4, own=range(1, 3), vocab=None) as batches:
        first, second = next(batches), next(batches)
    np.testing.assert_array_equal(first.batch["tokens"], stream.read(13, 2)["tokens"])
    np.testing.assert_array_equal(second.batch["tokens"], stream.read(17, 2)["tokens"])
    assert (first.cursor, second.cursor) == (16, 20)


def test_a_token_out_of_range_reaches_the_trainer_as_an_error() -> None:
    with (
        Prefetch(Stream(corpus_of(4000), 0), cursor=0, batch=4, vocab=8) as batches,
        pytest.raises(CorpusError, match=r"model\.vocab"),
    ):
        next(batches)


def test_a_token_beyond_32_bits_with_a_sign_is_out_of_range(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(4000, dtype=np.uint32) + 2**31)
    config = DataConfig(source="tokens", paths=(str(tmp_path),), seq_len=16, streams=1)
    rows = Stream(load_corpus(config), 0).read(0, 1)["tokens"]
    with pytest.raises(CorpusError, match="holds token 21474"):
        check_tokens(rows, 256)


def test_whatever_ends_the_prefetching_thread_reaches_the_trainer() -> None:
    class Broken(Stream):
        def read(self, cursor: int, count: int) -> HostBatch:
            msg = f"device out of memory at {cursor} for {count}"
            raise RuntimeError(msg)

    broken = Broken(corpus_of(4000), 0)
    with (
        Prefetch(broken, cursor=0, batch=4, vocab=None) as batches,
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        next(batches)
