"""Prepared corpora: from files to shards and back, packed, mixed, masked, and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.data import prepare as prepare_module
from skerry.data import tokenizer as tokenizer_module
from skerry.data.corpus import load_corpus, targets_in
from skerry.data.documents import Article, find_sources, read_documents
from skerry.data.prepare import prepare
from skerry.data.shards import MANIFEST, read_manifest, verify
from skerry.data.source import with_tokenizer
from skerry.data.stream import Mixture, Stream, stream_of
from skerry.data.tokenizer import END, FILE, PART, SETTINGS, Words, parts_of, train_tokenizer
from skerry.errors import ConfigError, CorpusError
from skerry.settings.models import DataConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "What floats?"},
    {"role": "assistant", "content": "A skerry does not."},
]


def texts(count: int, about: str = "story") -> list[str]:
    return [f"{about} {n}: " + " ".join(str((n * k) % 97) for k in range(60)) for n in range(count)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    return train_tokenizer(texts(30), 300, tmp_path_factory.mktemp("words") / "bpe")


def prepared(tmp_path: Path, words: Words, documents: Sequence[str], name: str) -> Path:
    prepare([Article(one) for one in documents], words, tmp_path / name)
    return tmp_path / name


def config_of(*folders: Path, **more: object) -> DataConfig:
    paths = [str(folder) for folder in folders]
    base = {"source": "prepared", "paths": paths, "seq_len": 16, "streams": 2, "held_out": 0.2}
    return DataConfig.model_validate(base | more)


def test_a_trained_tokenizer_reads_back_what_it_wrote(words: Words) -> None:
    text = 'Ein Skerry, "ünïcode" & 日本 <|endoftext|>\n'
    (tokens,) = words.encode_batch([text])
    assert words.decode(tokens) == text
    assert words.end[0] not in tokens  # a text cannot end a document
    assert words.size == 300
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(words.folder)
    assert (len(theirs), theirs.eos_token) == (300, END)
    plain = text.replace(END, "")
    assert theirs.encode(plain) == words.encode(plain)


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_does_neither(
    tmp_path: Path, words: Words
) -> None:
    made = Words.of(words.folder)._made
    made.enable_truncation(8)
    made.enable_padding(length=8)
    made.save(str(tmp_path / FILE))
    saved = Words.of(tmp_path)
    for text in ("hi", "a long text " * 9):
        assert saved.encode_batch([text]) == words.encode_batch([text])
        assert saved.encode(text) == words.encode(text)


def test_text_lines_and_tables_give_the_same_documents(tmp_path: Path) -> None:
    wanted = texts(5)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": t}) + "\n\n" for t in wanted))
    pq.write_table(pa.table({"body": wanted, "n": range(5)}), tmp_path / "b.parquet")
    for n, text in enumerate(wanted):
        (tmp_path / f"c{n}.txt").write_text(text)
    read = [
        [one.text for file in find_sources([str(tmp_path / s)]) for one in read_documents(file, f)]
        for s, f in (("a.jsonl", "body"), ("b.parquet", "body"), ("c*.txt", "text"))
    ]
    assert read == [wanted] * 3


@pytest.mark.parametrize(
    ("name", "data", "field", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"', "text", "line 2 is not JSON"),
        ("a.jsonl", b"[1]", "text", "line 1 is not a JSON object"),
        ("a.jsonl", b'{"body": "x"}', "text", "line 1 has no text in 'text'"),
        ("a.jsonl", b'{"messages": [{"role": 1}]}', "messages", "line 1 has no list of messages"),
        ("a.txt", b"\xff\xfe", "text", r"is not UTF-8 text \(byte 0\)"),
        ("a.parquet", b"PAR1 this is none PAR1", "text", "cannot be read as Parquet"),
    ],
)
def test_a_damaged_source_is_named_in_one_sentence(
    tmp_path: Path, name: str, data: bytes, field: str, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=said):
        list(read_documents(tmp_path / name, field))


def test_a_missing_column_and_a_missing_source_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(CorpusError, match="no column 'text', but body"):
        list(read_documents(tmp_path / "b.parquet"))
    with pytest.raises(CorpusError, match="There is no"):
        find_sources([str(tmp_path / "nothing*")])


def test_no_document_is_in_both_parts_and_all_are_in_one(tmp_path: Path, words: Words) -> None:
    documents = texts(80)
    corpus = load_corpus(config_of(prepared(tmp_path, words, documents, "a")))
    train, held_out = (
        {
            words.decode(one.tolist())
            for s in side.stretches
            if s.ends is not None
            for one in np.split(s.tokens, s.ends[:-1])
        }
        for side in (corpus.train, corpus.held_out)
    )
    assert train.isdisjoint(held_out)
    assert train | held_out == set(documents)
    assert len(held_out) >= 5


def test_another_tokenizer_holds_out_the_same_documents(tmp_path: Path, words: Words) -> None:
    other = train_tokenizer(texts(30, "other"), 270, tmp_path / "bpe")
    sides = []
    for tokenizer, name in ((words, "a"), (other, "b")):
        folder = prepared(tmp_path, tokenizer, texts(60), name)
        stretches = load_corpus(config_of(folder)).held_out.stretches
        sides.append("".join(tokenizer.decode(s.tokens.tolist()) for s in stretches))
    assert sides[0] == sides[1]


def test_documents_in_a_row_are_kept_apart(tmp_path: Path, words: Words) -> None:
    folder = prepared(tmp_path, words, [f"{n}." for n in range(400)], "a")
    batch = Stream(load_corpus(config_of(folder, packing="documents")), 0).read(0, 4)
    tokens, segments, positions = (batch[n] for n in ("tokens", "segments", "positions"))
    ended = tokens[:, :-1] == words.end[0]
    np.testing.assert_array_equal(np.diff(segments, axis=1), ended)
    assert (segments[:, 0] == 1).all()
    np.testing.assert_array_equal(positions[:, 1:], np.where(ended, 0, positions[:, :-1] + 1))
    assert targets_in(batch) == ended.size - ended.sum()


def test_only_what_an_assistant_says_is_a_target(tmp_path: Path, words: Words) -> None:
    for name in (FILE, SETTINGS):
        (tmp_path / name).write_bytes((words.folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    chats = Words.of(tmp_path)
    asked = ({"role": "user", "content": f"Question {n}?"} for n in range(40))
    talks = (Article(messages=(*TALK, one, TALK[1])) for one in asked)
    prepare(talks, chats, tmp_path / "a")
    config = config_of(tmp_path / "a", streams=1, seq_len=256)
    batch = Stream(load_corpus(config), 0).read(0, 5)
    learnt = batch["tokens"][:, 1:][batch["weights"] > 0]
    said = chats.decode(learnt.tolist())
    assert "A skerry does not." in said
    assert "What floats?" not in said
    assert "Question" not in said
    assert targets_in(batch) == len(learnt)


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ more }}{% endif %}"
)
"""As Qwen 3's template, which writes thoughts in the last answer alone."""


@pytest.mark.parametrize("begins", ["", "<think>\n", "<reason>\n"])
def test_a_template_that_renders_earlier_turns_otherwise_has_the_last_answer_learnt(
    tmp_path: Path, words: Words, begins: str
) -> None:
    for name in (FILE, SETTINGS):
        (tmp_path / name).write_bytes((words.folder / name).read_bytes())
    template = THINKING.replace("{{ more }}", begins)
    (tmp_path / "chat_template.jinja").write_text(template)
    talk = (*TALK, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Rock."})
    prepare([Article(messages=talk)], Words.of(tmp_path), tmp_path / "a")
    tokens = np.fromfile(tmp_path / "a" / "00000.tokens", np.uint16)
    learnt = np.fromfile(tmp_path / "a" / "00000.weights", np.bool_)
    said, asked = (words.decode(tokens[which].tolist()) for which in (learnt, ~learnt))
    assert said.endswith("</think>\n\nRock.<|im_end|>\n")
    assert "floats" not in said
    assert "Why?" not in said
    assert "What floats?" in asked
    assert "Why?" in asked


def test_a_special_tokens_name_is_text_where_somebody_says_it(tmp_path: Path, words: Words) -> None:
    """Else who writes a message could end it, and speak for others."""
    for name in (FILE, SETTINGS):
        (tmp_path / name).write_bytes((words.folder / name).read_bytes())
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    said = f"Say {END}, and {END}{END}."
    talk = tuple({"role": role, "content": said} for role in ("user", "assistant"))
    manifest = prepare([Article(messages=talk)], Words.of(tmp_path), tmp_path / "a")
    tokens = np.fromfile(tmp_path / "a" / "00000.tokens", np.uint16).tolist()
    assert words.decode(tokens) == said * 2
    assert [token for token in tokens if token in words.end] == [*words.end] * 3
    assert manifest.text_bytes == len(said + END)


def test_a_special_token_is_known_where_a_text_begins_with_it(words: Words) -> None:
    assert words.special_in(f"{END}\n") == words.end
    assert words.special_in(f"\n{END}") == ()


@pytest.mark.parametrize("number", ["0", "9" * 9])
def test_a_message_cannot_forge_an_escaped_special_token(words: Words, number: str) -> None:
    escaped = words.escaped(f"\ufdd0{number}\ufdd1")
    assert words.decode(words.encode_rendered(escaped)) == f"\ufffd{number}\ufdd1"


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 5000))
def test_a_mixture_reads_every_source_in_order_and_by_its_weight(
    weights: list[float], cursor: int
) -> None:
    class Numbers(Stream):
        def __init__(self) -> None: ...

        def read(self, cursor: int, count: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]  # of any kind
            return {"tokens": np.arange(cursor, cursor + count).reshape(-1, 1)}

    mixed = Mixture([Numbers() for _ in weights], weights)
    owner, own = mixed.places(0, cursor + 50)
    for source in range(len(weights)):
        np.testing.assert_array_equal(own[owner == source], np.arange(np.sum(owner == source)))
    np.testing.assert_array_equal(
        mixed.read(cursor, 50)["tokens"][:, 0], own[cursor:]
    )  # where one goes on, and from which cursor, changes nothing
    counts = Counter(mixed.places(0, 3000)[0].tolist())
    for source, weight in enumerate(weights):
        assert abs(counts[source] / 3000 - weight / sum(weights)) < 0.01 + 1 / 500


def test_a_mixture_of_folders_is_read_by_weight(tmp_path: Path, words: Words) -> None:
    folders = [prepared(tmp_path, words, texts(60, name), name) for name in ("aaa", "bbb")]
    corpus = load_corpus(config_of(*folders, weights=[3, 1]))
    rows = stream_of(corpus, 0).read(0, 40)["tokens"]
    own = {row.tobytes() for row in Stream(corpus.mixed[0], 0).read(0, 30)["tokens"]}
    assert sum(row.tobytes() in own for row in rows) == 30


def test_batches_of_a_mixture_have_the_same_arrays_whatever_sources_they_read(
    tmp_path: Path, words: Words
) -> None:
    """A step is compiled once, and processes that share a batch must agree what it holds."""
    plain = prepared(tmp_path, words, texts(60), "plain")
    ids = np.arange(60, dtype=np.uint32)
    chats = [Article(tokens=np.roll(ids, n), weights=ids > 30) for n in range(60)]
    prepare(chats, words, tmp_path / "chats")
    corpus = load_corpus(config_of(plain, tmp_path / "chats", weights=[5, 1]))
    stream = stream_of(corpus, 0)
    rows = [stream.read(cursor, 1) for cursor in range(12)]
    assert {tuple(sorted(row)) for row in rows} == {("tokens", "weights")}
    assert {bool(row["weights"].all()) for row in rows} == {True, False}


def test_a_mixture_takes_a_source_of_a_single_document(tmp_path: Path, words: Words) -> None:
    counts = {"many": 60, "single": 1}
    folders = [prepared(tmp_path, words, texts(n, name), name) for name, n in counts.items()]
    corpus = load_corpus(config_of(*folders, weights=[3, 1]))
    assert len(corpus.mixed[1].train) > 0
    assert len(corpus.mixed[1].held_out) == 0


def test_a_run_names_its_tokenizer_and_refuses_another(tmp_path: Path, words: Words) -> None:
    mine = config_of(prepared(tmp_path, words, texts(60), "a"))
    run = with_tokenizer(mine)
    assert run.tokenizer == words.digest
    other = train_tokenizer(texts(9, "z"), 260, tmp_path / "bpe")
    theirs = prepared(tmp_path, other, texts(60), "b")
    with pytest.raises(CorpusError, match="prepare it with the same one"):
        load_corpus(run.model_copy(update={"paths": (str(theirs),)}))
    with pytest.raises(CorpusError, match="prepare it with the same one"):
        load_corpus(config_of(tmp_path / "a", theirs, weights=[1, 1]))


def test_what_a_folder_says_must_be_so(tmp_path: Path, words: Words) -> None:
    folder = prepared(tmp_path, words, texts(60), "a")
    assert verify(folder) == read_manifest(folder)
    tokens = folder / "00000.tokens"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2] + b"\x09\x00")
    with pytest.raises(CorpusError, match="is damaged"):
        verify(folder)
    tokens.write_bytes(whole)
    hashes = folder / "00000.hashes"
    known = hashes.read_bytes()
    hashes.write_bytes(known[:-1] + bytes([known[-1] ^ 1]))
    with pytest.raises(CorpusError, match=r"00000\.\* is damaged"):
        verify(folder)
    tokens.write_bytes(whole[:-2])
    with pytest.raises(CorpusError, match=r"bytes, .* by its manifest"):
        load_corpus(config_of(folder))
    (folder / MANIFEST).write_text('{"format": 2}')
    with pytest.raises(CorpusError, match="is not valid"):
        load_corpus(config_of(folder))
    (folder / MANIFEST).unlink()
    with pytest.raises(CorpusError, match="is not a prepared corpus"):
        load_corpus(config_of(folder))


def test_a_folder_whose_tokenizer_is_damaged_is_found(tmp_path: Path, words: Words) -> None:
    folder = prepared(tmp_path, words, texts(60), "a")
    data = bytearray((folder / FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / FILE).write_bytes(data)
    with pytest.raises(CorpusError, match=r"tokenizer\.json is damaged"):
        verify(folder)


LONG = """
import resource, sys
from pathlib import Path
from skerry.data.documents import Article
from skerry.data.prepare import prepare
from skerry.data.tokenizer import Words

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

words, out = Words.of(Path(sys.argv[1])), Path(sys.argv[2])
words.encode_batch(["warm"])
text = "".join(f"line {n} of a long text, {n * n} and {n % 97}\\n" for n in range(60_000))
before = peak()
prepare([Article(text)], words, out)
print(len(text), peak() - before)
"""


def test_a_long_text_is_tokenised_in_little_memory(tmp_path: Path, words: Words) -> None:
    """As one text each of its characters takes about 150 bytes."""
    given = [sys.executable, "-c", LONG, str(words.folder), str(tmp_path / "a")]
    said = subprocess.run(given, check=True, capture_output=True, text=True, timeout=120).stdout
    size, grown = map(int, said.split())
    assert size > 8 * PART
    assert grown < 60 * size


def test_a_long_text_keeps_every_character(tmp_path: Path, words: Words) -> None:
    long = "".join(f"line {n}\n" for n in range(PART // 8)) + "x" * (PART + 7) + " y" * PART
    documents = ["one", long, "two"]
    prepared(tmp_path, words, documents, "a")
    tokens = np.fromfile(tmp_path / "a" / "00000.tokens", np.uint16)
    ends = np.fromfile(tmp_path / "a" / "00000.ends", np.int64)
    assert [words.decode(one.tolist()) for one in np.split(tokens, ends[:-1])] == documents
    assert all(0 < len(part) <= PART for part in parts_of(long))


def test_a_tokenizer_is_trained_on_the_parts_of_a_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "PART", 8)
    words = train_tokenizer(["ab" * 2000], 300, tmp_path / "a")
    assert words.encode_batch(["ab" * 8]) == [words.encode("ab" * 4) * 2]


def test_a_folder_is_whole_or_not_there(tmp_path: Path, words: Words) -> None:
    def broken() -> object:
        yield Article("one")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(broken(), words, tmp_path / "a")  # type: ignore[arg-type]  # a generator that ends
    assert not (tmp_path / "a").exists()
    prepare([Article("one")], words, tmp_path / "a")
    with pytest.raises(CorpusError, match="not empty"):
        prepare([Article("one")], words, tmp_path / "a")
    with pytest.raises(CorpusError, match="hold no document"):
        prepare([], words, tmp_path / "b")


def test_an_added_token_counts_where_it_is_used(tmp_path: Path, words: Words) -> None:
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(words.folder / FILE))
    made.add_special_tokens(["<image>"])
    made.save(str(tmp_path / FILE))
    (tmp_path / SETTINGS).write_bytes((words.folder / SETTINGS).read_bytes())
    more = Words.of(tmp_path, vocab=300)
    assert (more.size, more.plain) == (301, 300)
    assert prepare([Article("no <image> here")], more, tmp_path / "a").vocab == 300
    given = Article(tokens=np.array([1, 300], np.uint32))
    assert prepare([given], more, tmp_path / "b").vocab == 301


def test_a_killed_preparation_goes_on_where_it_was(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(prepare_module, "TOGETHER", 4)
    documents, read = [Article(text) for text in texts(60)], Counter[str]()

    def reading(most: int) -> Iterator[Article]:
        for number, one in enumerate(documents):
            if number == most:
                raise KeyboardInterrupt
            yield one

    encode = Words.encode_batch

    def counted(self: Words, given: Sequence[str], *, named: bool = False) -> list[list[int]]:
        read.update(given)
        return encode(self, given, named=named)

    monkeypatch.setattr(Words, "encode_batch", counted)
    for most in (20, 41):
        with pytest.raises(KeyboardInterrupt):
            prepare(reading(most), words, tmp_path / "a", key="k")
        with pytest.raises(CorpusError, match="not a prepared corpus"):
            load_corpus(config_of(tmp_path / "a"))
    prepare(reading(-1), words, tmp_path / "a", key="k")
    assert max(read.values()) <= 2  # only what was not written yet
    assert sum(read.values()) < 60 + 2 * 20
    read.clear()
    whole = prepare(documents, words, tmp_path / "b", key="k")
    assert verify(tmp_path / "a") == whole
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_was_prepared_of_other_sources_is_not_gone_on_with(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 100)

    def broken() -> Iterator[Article]:
        yield from map(Article, texts(9, "old"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(broken(), words, tmp_path / "a", key="old")
    assert prepare(map(Article, texts(3)), words, tmp_path / "a", key="new").documents == 3
    assert verify(tmp_path / "a").documents == 3


def test_the_working_directory_is_no_new_folder(
    tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match="name a new folder"):
        prepare([Article("one")], words, Path())


def test_one_process_prepares_a_folder_at_a_time(tmp_path: Path, words: Words) -> None:
    def reading() -> Iterator[Article]:
        with pytest.raises(CorpusError, match="Another process is preparing"):
            prepare([Article("one")], words, tmp_path / "a")
        yield Article("two")

    assert prepare(reading(), words, tmp_path / "a").documents == 1


def test_bytes_per_token_are_those_that_targets_write(tmp_path: Path, words: Words) -> None:
    documents = texts(80)
    corpus = load_corpus(config_of(prepared(tmp_path, words, documents, "a")))
    held = "".join(words.decode(s.tokens.tolist()) for s in corpus.held_out.stretches)
    tokens = sum(map(len, corpus.held_out.stretches))
    assert corpus.bytes_per_token == pytest.approx(len(held.encode()) / tokens)


def test_a_tokenizer_that_is_none_or_too_large_is_refused(tmp_path: Path, words: Words) -> None:
    with pytest.raises(ConfigError, match="the model 256"):
        Words.of(words.folder, 256)
    (tmp_path / FILE).write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        Words.of(tmp_path)
    with pytest.raises(ConfigError, match="name the folder that has"):
        Words.of(tmp_path / "nowhere")
