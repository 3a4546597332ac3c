"""Datasets of one's own, whosever they are, as a corpus; and text that a run tokenises itself."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem
import pytest
import structlog

from skerry import code
from skerry.code import CodeRefused
from skerry.data import cache
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.documents import Article
from skerry.data.prepare import prepare
from skerry.data.shards import MANIFEST, read_manifest, verify
from skerry.data.source import with_tokenizer
from skerry.data.stream import Stream
from skerry.data.tokenizer import FILE, SETTINGS, Words, train_tokenizer
from skerry.errors import ConfigError, CorpusError
from skerry.settings.checks import check_run
from skerry.settings.models import DataConfig, RunConfig
from skerry.tasks import in_thread

STORIES = [f"story {n}: " + " ".join(str((n * k) % 97) for k in range(40)) for n in range(90)]
ROWS = np.random.default_rng(0).integers(0, 250, (90, 17))
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"

Put = Callable[[Any], None]


class Listed:
    """A dataset that has nothing but a length and items."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    return train_tokenizer(STORIES, 300, tmp_path_factory.mktemp("words") / "bpe")


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Make ``my_data:build`` of a module that is allowed return a dataset; run in a new folder."""
    monkeypatch.chdir(tmp_path)
    module = ModuleType("my_data")
    monkeypatch.setitem(sys.modules, "my_data", module)
    monkeypatch.setattr(code, "_allowed", {"my_data"})

    def place(dataset: Any) -> None:
        def build(**_: object) -> Any:
            return dataset

        build.__module__ = "my_data"
        module.build = build  # type: ignore[attr-defined]  # a module made here

    return place


def corpus_of(words: Words | None, **more: object) -> Corpus:
    base = {"factory": "my_data:build", "seq_len": 16, "streams": 2, "held_out": 0.2}
    base |= {"tokenizer_folder": str(words.folder)} if words is not None else {}
    return load_corpus(DataConfig.model_validate(base | more))


def documents(corpus: Corpus) -> list[list[int]]:
    """All documents of a corpus, sorted."""
    stretches = [*corpus.train.stretches, *corpus.held_out.stretches]
    return sorted(
        one.tolist()
        for stretch in stretches
        if stretch.ends is not None
        for one in np.split(stretch.tokens, stretch.ends[:-1])
    )


def torch_rows() -> Any:
    torch = pytest.importorskip("torch")
    return torch.utils.data.TensorDataset(torch.tensor(ROWS))


def torch_dicts() -> Any:
    torch = pytest.importorskip("torch")

    class Dicts(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]  # it has no types
        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.tensor(ROWS[index])}

    return Dicts()


def hugging_face() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"input_ids": ROWS.tolist()})


def grain_source() -> Any:
    return pytest.importorskip("grain").MapDataset.source(list(ROWS))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Listed(ROWS),
        ROWS.tolist,
        lambda: Listed([{"tokens": row} for row in ROWS]),
        torch_rows,
        torch_dicts,
        hugging_face,
        grain_source,
    ],
    ids=["array", "lists", "dicts", "torch", "torch dicts", "hugging face", "grain"],
)
def test_tokens_of_any_dataset_are_its_documents(put: Put, make: Callable[[], Any]) -> None:
    put(make())
    corpus = corpus_of(None, packing="fit")
    assert documents(corpus) == sorted(ROWS.tolist())
    rows = corpus.train.read(np.arange(len(corpus.train)))
    assert {tuple(row) for row in rows.tolist()} <= {tuple(row) for row in ROWS.tolist()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: STORIES,
        lambda: [story.encode() for story in STORIES],
        lambda: [{"text": story, "id": 1} for story in STORIES],
        lambda: pytest.importorskip("datasets").Dataset.from_dict({"text": STORIES}),
        lambda: pytest.importorskip("grain").MapDataset.source(STORIES),
    ],
    ids=["str", "bytes", "dicts", "hugging face", "grain"],
)
def test_text_of_any_dataset_is_tokenised(put: Put, words: Words, make: Callable[[], Any]) -> None:
    put(make())
    corpus = corpus_of(words)
    assert [words.decode(one) for one in documents(corpus)] == [
        words.decode(one) for one in sorted([*words.encode(s), *words.end] for s in STORIES)
    ]
    assert 1.0 < corpus.bytes_per_token < 4.0


def test_labels_and_weights_say_what_is_learnt(put: Put) -> None:
    labels = np.where(np.arange(17) < 9, -100, ROWS)
    put([{"input_ids": row, "labels": own} for row, own in zip(ROWS, labels, strict=True)])
    batch = Stream(corpus_of(None, packing="fit"), 0).read(0, 4)
    np.testing.assert_array_equal(batch["weights"], np.tile(np.arange(1, 17) >= 9, (4, 1)))
    put([{"tokens": row, "weights": np.arange(17) / 16} for row in ROWS])
    batch = Stream(corpus_of(None, packing="fit", options={"v": 2}), 0).read(0, 4)
    np.testing.assert_allclose(batch["weights"], np.tile(np.arange(1, 17) / 16, (4, 1)))


def test_padding_is_left_out_and_conversations_are_rendered(
    put: Put, words: Words, tmp_path: Path
) -> None:
    padded = [{"input_ids": [*row, 0, 0], "attention_mask": [1] * 17 + [0, 0]} for row in ROWS]
    put(padded)
    assert documents(corpus_of(None)) == sorted(ROWS.tolist())
    for name in (FILE, SETTINGS):
        (tmp_path / name).write_bytes((words.folder / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    turns = [("user", "What floats?"), ("assistant", "A skerry does not.")]
    talk = [{"role": role, "content": content} for role, content in turns]
    put([{"messages": [*talk, {"role": "assistant", "content": f"{n}!"}]} for n in range(90)])
    chats = Words.of(tmp_path)
    batch = Stream(corpus_of(chats, packing="documents"), 0).read(0, 4)
    assert "floats" not in chats.decode(batch["tokens"][:, 1:][batch["weights"] > 0].tolist())


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (iter([1]), "without __len__ and __getitem__"),
        ([], "returned 0 items"),
        ([[1.5, 2.0]], "Item 0 of data.factory is neither text nor a row of token ids"),
        ([[[1], [2]]], r"its shape is \(2, 1\)"),
        ([{"body": "x"}], "Item 0 of data.factory has no text in 'text'"),
        ([{"tokens": [1, 2], "labels": [1]}], "has 2 tokens and 1 labels"),
        ([{"tokens": [1, 2], "labels": [2, 1]}], "labels that are neither its tokens nor -100"),
        ([{"tokens": [1, 2], "weights": [1, -1]}], "weights that are negative"),
        ([[1, -1]], "neither text nor a row of token ids"),
        ([[1, 2**32]], "neither text nor a row of token ids, 0 to 4294967295"),
        (["text"], "name a tokenizer's folder with data.tokenizer_folder"),
        (Listed({1: "x"}), r"Item 0 of data.factory cannot be read \(KeyError: 0\)"),
    ],
)
def test_what_is_no_dataset_is_one_sentence(put: Put, items: Any, said: str) -> None:
    put(items)
    with pytest.raises(ConfigError, match=said):
        corpus_of(None)


def test_a_datasets_code_must_be_allowed(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    put(STORIES)
    monkeypatch.setattr(code, "_allowed", set[str]())
    with pytest.raises(CodeRefused, match="allow_code=my_data"):
        corpus_of(None)


def test_a_tokenizer_that_is_too_small_for_a_datasets_tokens_is_refused(
    put: Put, words: Words
) -> None:
    put(ROWS + 100)
    with pytest.raises(CorpusError, match="name the one it was made with"):
        corpus_of(words)


def test_text_lines_and_tables_are_tokenised_once(
    put: Put, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": s}) + "\n" for s in STORIES))
    pq.write_table(pa.table({"body": STORIES}), tmp_path / "b.parquet")
    for n, story in enumerate(STORIES):
        (tmp_path / f"c{n}.txt").write_text(story)
    found = [
        corpus_of(words, factory="", source="text", paths=[path], field="body")
        for path in ("a.jsonl", "b.parquet", "c*.txt")
    ]
    assert documents(found[0]) == documents(found[1]) == documents(found[2])
    monkeypatch.setattr(cache, "prepare", None)  # it would fail
    again = corpus_of(words, factory="", source="text", paths=["a.jsonl"], field="body")
    assert again.train.digest == found[0].train.digest
    assert read_manifest(Path(again.config.paths[0])).documents == len(STORIES)


@pytest.mark.usefixtures("put")
@pytest.mark.parametrize("name", ["00000.tokens", "00000.ends", MANIFEST])
def test_kept_tokens_that_are_damaged_are_made_again(
    words: Words, tmp_path: Path, name: str
) -> None:
    (tmp_path / "a.txt").write_text(" ".join(STORIES))
    (tmp_path / "b.txt").write_text("another " * 90)

    asked = {"factory": "", "source": "text", "paths": ["*.txt"]}
    corpus = corpus_of(words, **asked)
    (folder,), first = map(Path, corpus.config.paths), documents(corpus)
    (folder / name).write_bytes((folder / name).read_bytes()[:-7])
    assert documents(corpus_of(words, **asked)) == first
    verify(folder)


def test_another_tokenizer_than_the_run_has_is_refused_before_it_is_used(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(cache, "prepare", None)  # it would fail
    with pytest.raises(CorpusError, match="this run's learners have another:"):
        corpus_of(words, factory="", source="text", paths=["."], tokenizer="another")


def test_text_that_has_changed_is_tokenised_again(put: Put, words: Words, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    found: list[Corpus] = []
    for text in (" ".join(STORIES), " ".join(reversed(STORIES))):
        file.write_text(text)
        (tmp_path / "b.txt").write_text("another " * 90)
        found.append(corpus_of(words, factory="", source="text", paths=["."]))
    assert documents(found[0]) != documents(found[1])


def test_tokens_that_were_used_longest_ago_go_first() -> None:
    known = [
        (Path(name), used, size) for name, used, size in (("a", 1, 4), ("b", 3, 4), ("c", 2, 4))
    ]
    assert cache.beyond(known, 12) == []
    assert cache.beyond(known, 8) == [Path("a")]
    assert cache.beyond(known, 0) == [Path("b"), Path("c"), Path("a")]


def test_tokens_that_nobody_reads_are_removed_when_there_are_too_many(
    put: Put, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_KEPT_BYTES", 0)
    monkeypatch.setattr(cache, "_used", [])
    folders: list[Path] = []
    for n in range(3):
        if n == 2:  # whoever read them has ended
            for handle in cache._used:
                os.close(handle)
        (tmp_path / "a.txt").write_text(" ".join(STORIES[n:]))
        (tmp_path / "b.txt").write_text("another " * 90)
        found = corpus_of(words, factory="", source="text", paths=["."])
        folders.append(Path(found.config.paths[0]))
        there = [folder.is_dir() for folder in folders]
        assert there == [[True], [True, True], [False, False, True]][n]


def test_a_folder_that_cannot_keep_tokens_is_named(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".skerry").write_text("a file where the folder should be")
    (tmp_path / "a.txt").write_text(" ".join(STORIES))
    with pytest.raises(CorpusError, match=r"Cannot keep tokens in .*/\.skerry/data"):
        corpus_of(words, factory="", source="text", paths=["a.txt"])


async def test_tokenising_ends_soon_once_it_is_cancelled(words: Words, tmp_path: Path) -> None:
    begun = threading.Event()

    def endless() -> Iterator[Article]:
        while True:
            yield Article(STORIES[0])

    prepared = in_thread(prepare, endless(), words, tmp_path / "out", (), lambda *_: begun.set())
    task = asyncio.create_task(prepared)
    await asyncio.to_thread(begun.wait)
    task.cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not await asyncio.to_thread(os.listdir, tmp_path)


async def test_a_process_that_waits_for_anothers_tokens_says_so_and_can_be_cancelled(
    put: Put, words: Words
) -> None:
    put(["one text", "and two"] * 40)
    corpus_of(words)
    (lock,) = cache.COPIES.glob(".tokens-*.lock")
    with lock.open("w") as held, structlog.testing.capture_logs() as logs:
        fcntl.flock(held, fcntl.LOCK_EX)
        task = asyncio.create_task(in_thread(corpus_of, words))
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await task
    assert [entry["event"] for entry in logs] == ["waits_for_tokens"]


def test_more_text_than_a_learner_tokenises_names_the_command(
    put: Put, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x" * 101)
    monkeypatch.setattr(cache, "MOST_BYTES", 100)
    with pytest.raises(CorpusError, match=r"a.txt has 0\.0 GiB of text"):
        corpus_of(words, factory="", source="text", paths=["a.txt"])


def test_a_run_records_the_tokenizer_of_text_that_its_learners_tokenise(words: Words) -> None:
    config = DataConfig(source="text", paths=("x",), tokenizer_folder=str(words.folder))
    assert with_tokenizer(config).tokenizer == words.digest


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"factory": "a:b", "paths": ["x"], "source": "text"}, "data.factory is 'a:b' but"),
        ({"options": {"n": 1}}, "data.options is set but data.factory is empty"),
        ({"tokenizer_folder": "x"}, 'data.source to "text"'),
    ],
)
def test_settings_that_contradict_each_other_are_refused(data: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_run(RunConfig.model_validate({"data": data}))
