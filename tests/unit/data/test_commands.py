"""What ``skerry data`` and a learner say to bad input: one sentence, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa  # pyright: ignore[reportMissingTypeStubs]  it ships no types
import pyarrow.parquet as pq  # pyright: ignore[reportMissingTypeStubs]  idem
import pytest
from typer.testing import CliRunner, Result

from skerry import code
from skerry.data.__main__ import app
from skerry.data.documents import Article
from skerry.data.prepare import prepare as prepare_documents
from skerry.data.tokenizer import SETTINGS, Words, train_tokenizer
from skerry.errors import ConfigError
from skerry.settings import loading
from skerry_learner.work import prepare
from tests.support.hf_folder import random_folder

STORIES = [f"story {n}: " + "tale " * (n % 40) for n in range(400)]
TEXT = ('data.source="text"', 'data.paths=["a.txt"]', "data.seq_len=16", "data.streams=1")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Words:
    return train_tokenizer(STORIES, 300, tmp_path_factory.mktemp("words") / "bpe")


@pytest.fixture
def here(tmp_path: Path, words: Words, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, a tokenizer without a chat template, and a prepared corpus."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(STORIES))
    (tmp_path / "words").symlink_to(words.folder)
    prepare_documents(map(Article, STORIES), words, tmp_path / "corpus")
    return tmp_path


def table(folder: Path, change: Callable[[bytearray], object]) -> None:
    pq.write_table(pa.table({"text": STORIES}), folder / "b.parquet")
    data = bytearray((folder / "b.parquet").read_bytes())
    change(data)
    (folder / "b.parquet").write_bytes(data)


def scribbled(folder: Path) -> None:
    def scribble(data: bytearray) -> None:
        data[40:60] = bytes(20)

    table(folder, scribble)


def cut(folder: Path) -> None:
    table(folder, lambda data: data.__delitem__(slice(len(data) // 2, None)))


def chats(folder: Path, template: str, *talk: str) -> None:
    """Write a conversation, and a tokenizer with this chat template."""
    (folder / "chats").mkdir()
    for file in (folder / "words").iterdir():
        (folder / "chats" / file.name).write_bytes(file.read_bytes())
    (folder / "chats" / "chat_template.jinja").write_text(template)
    turns = [{"role": role, "content": "x"} for role in talk]
    (folder / "b.jsonl").write_text(json.dumps({"messages": turns}) + "\n")


def endless(folder: Path) -> None:
    chats(folder, "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "user", "assistant")


def unasked(folder: Path) -> None:
    chats(folder, "{{ messages }}", "user")


def without_end(folder: Path) -> None:
    (folder / "plain").mkdir()
    for file in (folder / "words").iterdir():
        (folder / "plain" / file.name).write_bytes(file.read_bytes())
    (folder / "plain" / SETTINGS).write_text("{}")


def damaged(folder: Path) -> None:
    with (folder / "corpus" / "00000.tokens").open("r+b") as file:
        file.write(b"\x01\x01")


def hollow(folder: Path) -> None:
    (folder / "a.txt").write_text("")


def halved(folder: Path) -> None:
    (folder / "b.jsonl").write_text('{"text": "whole"}\n{"text": "\\ud83d"}\n')


def linked(folder: Path) -> None:
    (folder / "disk").mkdir()
    (folder / "out").symlink_to(folder / "disk")


def piped(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


PREPARE = "prepare {} --tokenizer {} --out out"


@pytest.mark.parametrize(
    ("before", "command", "said"),
    [
        (
            None,
            PREPARE.format("nowhere", "words"),
            "There is no nowhere: correct data.paths, or the command.",
        ),
        (None, PREPARE.format("''", "words"), "One of the texts has no name"),
        (piped, PREPARE.format("pipe", "words"), "pipe is a pipe, and text is read more than once"),
        (None, PREPARE.format("a.txt", "corpus/x"), "cannot be read as a tokenizer"),
        (scribbled, PREPARE.format("b.parquet", "words"), "b.parquet cannot be read as Parquet"),
        (cut, PREPARE.format("b.parquet", "words"), "b.parquet cannot be read as Parquet"),
        (endless, PREPARE.format("b.jsonl", "chats") + " --field messages", "writes more than"),
        (unasked, PREPARE.format("b.jsonl", "chats") + " --field messages", "nothing to learn"),
        (endless, PREPARE.format("b.jsonl", "words") + " --field messages", "no chat template"),
        (endless, PREPARE.format("b.jsonl", "words"), "line 1 has no text in 'text'"),
        (without_end, PREPARE.format("a.txt", "plain"), "no token that ends a text"),
        (None, "prepare a.txt --tokenizer words --out corpus", "corpus is not empty"),
        (linked, PREPARE.format("a.txt", "words"), "out cannot be replaced (Not a directory)"),
        (None, "train-tokenizer a.txt --out corpus", "corpus is not empty"),
        (None, "train-tokenizer a.txt --out a.txt/x", "Cannot write a.txt/x (Not a directory)"),
        (hollow, "train-tokenizer a.txt --out out", "The sources hold no text"),
        (
            halved,
            PREPARE.format("b.jsonl", "words"),
            "line 2 has half a character ('\\ud8",
        ),
        (None, PREPARE.format("file:///a.txt", "words"), "There is no file:///a.txt"),
        (None, PREPARE.format("nowhere:build", "words"), "No module named 'nowhere'"),
        (None, "inspect words", "is not a prepared corpus"),
        (damaged, "inspect corpus", "00000.tokens is damaged: prepare the folder again."),
    ],
)
def test_a_command_says_one_sentence_and_leaves_nothing_behind(
    here: Path, before: Callable[[Path], None] | None, command: str, said: str
) -> None:
    if before is not None:
        before(here)
    found = {path.name for path in here.iterdir()}
    result: Result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code not in {0, 1}, result.output
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert {path.name for path in here.iterdir()} == found


def test_a_dataset_is_prepared_by_its_function(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "typed_data.py").write_text("def build():\n    return ['one text', 'another'] * 30\n")
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(code, "_allowed", set[str]())
    command = PREPARE.format("typed_data:build", "words") + " --json"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["documents"] == 60


def test_a_pattern_with_a_colon_names_files_and_no_function(here: Path) -> None:
    (here / "T10:00.jsonl").write_text('{"text": "at ten"}\n')
    result = CliRunner().invoke(app, PREPARE.format("T10:*.jsonl", "words").split())
    assert result.exit_code == 0, result.stderr


def test_one_document_in_one_shard_is_no_plural(here: Path) -> None:
    (here / "one.txt").write_text("a text of its own " * 40)
    for command in (PREPARE.format("one.txt", "words"), "inspect out"):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.stderr
        assert "tokens of 1 document" in result.stdout
        assert "documents" not in result.stdout
    assert "in 1 shard, as they" in result.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.weights=[1]"], "data.weights is [1.0] but data.paths names 0"),
        ([*TEXT, "data.weights=[0]"], "finite|a weight above 0"),
        (['data.source="prepared"', "data.paths=[]"], "data.paths is empty"),
        (["train.accumulate=3"], "train.accumulate is 3 but data.batch is 8"),
        ([*TEXT, "data.streams=90000"], "training sequences for data.streams = 90000"),
        ([*TEXT, "data.seq_len=100000"], "too few"),
        (['data.source="prepared"', 'data.paths=["words"]'], "is not a prepared corpus"),
        (
            ['data.source="prepared"', 'data.paths=["corpus"]', "model.vocab=256"],
            "tokenizer has 300 tokens, the model's embedding 256: set model.vocab to 300",
        ),
        ([*TEXT, 'data.tokenizer_folder="nowhere"'], "cannot be read as a tokenizer"),
        ([*TEXT, 'model.path="words"'], "config.json"),
        ([*TEXT, 'model.path="other"'], "model_type = 'mamba'"),
        (["data.factory=nowhere:build"], "No module named 'nowhere'"),
    ],
)
def test_a_learner_that_cannot_train_says_one_sentence(
    here: Path, settings: list[str], said: str
) -> None:
    folder = random_folder(here / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ConfigError) as refused:
        prepare(loading.load(None, settings, environ={}).run)
    text = str(refused.value)
    assert any(part in text for part in said.split("|")), text
    assert "\n" not in text
    assert text.endswith(".")
