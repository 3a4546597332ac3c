"""Tokenizers and token shards from text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from skerry.data.prepare import END, prepare, train_tokenizer
from skerry.data.source import read_source
from skerry.data.tokenizer import Words
from skerry.errors import ConfigError, CorpusError
from skerry.settings.models import DataConfig

pytest.importorskip("tokenizers")
TEXTS = {"a.txt": "der Fluß fließt, the river flows\n" * 50, "b.md": "never seen: 漢字 🦀\0\n"}
SUFFIXES = (".txt", ".md")


@pytest.fixture
def texts(tmp_path: Path) -> str:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return str(folder)


def test_shards_hold_every_text_and_where_it_ends(texts: str, tmp_path: Path) -> None:
    made, size = train_tokenizer([texts + "/a.txt"], SUFFIXES, 300, tmp_path / "words")
    assert 257 <= size <= 300
    words = Words.of(made)
    found = prepare([texts], SUFFIXES, words, tmp_path / "shards")
    config = DataConfig(source="tokens", paths=(str(tmp_path / "shards"),))
    (document,) = read_source(config)
    assert document.tokens.dtype == np.uint16
    assert (found.documents, found.tokens) == (2, document.tokens.size)
    assert found.text_bytes == sum(len(text.encode()) for text in TEXTS.values())
    ends = np.flatnonzero(document.tokens == words.end[0])
    parts = np.split(document.tokens, ends + 1)[:-1]
    assert [words.decode([int(t) for t in part[:-1]]) for part in parts] == list(TEXTS.values())
    assert (tmp_path / "shards" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "shards" / "corpus.json").read_text())["vocab"] == size


def test_a_trained_tokenizer_is_one_that_transformers_loads(texts: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    made, size = train_tokenizer([texts], SUFFIXES, 300, tmp_path / "words")
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    assert len(theirs) == size
    assert theirs.eos_token == END
    text = TEXTS["b.md"]
    assert theirs.encode(text) == Words.of(made).encode(text)
    assert theirs.decode(theirs.encode(text)) == text


def test_a_folder_that_holds_anything_is_left_as_it_is(texts: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="not empty"):
        train_tokenizer([texts], SUFFIXES, 300, Path(texts))
    assert {path.name for path in Path(texts).iterdir()} == set(TEXTS)


def test_text_that_is_none_leaves_nothing_behind(texts: str, tmp_path: Path) -> None:
    (Path(texts) / "c.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CorpusError, match=r"c\.txt is no UTF-8 text"):
        train_tokenizer([texts], SUFFIXES, 300, tmp_path / "words")
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_a_tokenizer_larger_than_the_model_is_one_sentence(texts: str, tmp_path: Path) -> None:
    made, size = train_tokenizer([texts], SUFFIXES, 300, tmp_path / "words")
    assert Words.of(made, size).size == size
    with pytest.raises(ConfigError, match=f"has {size} tokens, the model {size - 1}"):
        Words.of(made, size - 1)
    with pytest.raises(ConfigError, match=r"cannot be read as a tokenizer"):
        Words.of(tmp_path)
