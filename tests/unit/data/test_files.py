"""Corpora in a bucket and by pattern."""

from __future__ import annotations

from pathlib import Path

import obstore
import pytest

from skerry import folders
from skerry.data.corpus import load_corpus
from skerry.data.documents import Article, find_sources, fingerprint
from skerry.data.files import COPIES, files_below
from skerry.data.prepare import prepare
from skerry.data.source import read_source
from skerry.data.tokenizer import train_tokenizer
from skerry.errors import ConfigError, CorpusError
from skerry.settings import loading
from skerry.settings.models import DataConfig
from skerry.store.kinds import s3
from tests.support.s3_server import BUCKET, S3Server


@pytest.fixture
def url(s3_server: S3Server, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two texts and a file of another kind in a bucket that the environment says how to reach."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "_stores", [])
    monkeypatch.setenv("SKERRY_STORE__ENDPOINT", s3_server.endpoint)
    monkeypatch.setenv("SKERRY_STORE__CREDENTIALS", str(s3_server.credentials))
    monkeypatch.setenv("SKERRY_STORE__PROFILE", "writer")
    for name, text in (("a.txt", "one"), ("below/b.txt", "two"), ("c.png", "no")):
        put(s3_server, f"{run_id}/{name}", text)
    return f"s3://{BUCKET}/{run_id}"


def read(sources: list[str]) -> list[str]:
    return [path.read_text() for path in find_sources(sources)]


def put(server: S3Server, key: str, text: str) -> None:
    obstore.put(s3._connect(f"s3://{BUCKET}", server.access()), key, text.encode())


def test_texts_below_an_address_are_read_and_copied_once(
    url: str, s3_server: S3Server, run_id: str
) -> None:
    assert read([url]) == ["one", "two"]
    assert read([f"{url}/below/b.txt"]) == ["two"]
    copied = {path: path.stat().st_mtime_ns for path in COPIES.rglob("*.txt")}
    assert len(copied) == 2
    put(s3_server, f"{run_id}/a.txt", "new")
    assert read([url]) == ["new", "two"]
    assert {path: path.stat().st_mtime_ns for path in copied} == copied
    assert read_source(DataConfig(source="text", paths=(url,)))[0].tokens.tobytes() == b"new\0two\0"


def test_a_bucket_is_reached_as_the_settings_of_this_process_say(
    url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ENDPOINT", "CREDENTIALS", "PROFILE"):
        monkeypatch.delenv(f"SKERRY_STORE__{name}")
    loading.load(None, s3_server.settings("s3://checkpoints/elsewhere"))
    assert read([url]) == ["one", "two"]


@pytest.mark.parametrize("below", ["nothing", "nothing.txt"])
def test_an_address_without_text_is_one_sentence(url: str, below: str) -> None:
    with pytest.raises(CorpusError, match=below):
        read([f"{url}/{below}"])


def test_a_prepared_folder_in_a_bucket_is_read_like_one_on_disk(
    url: str, s3_server: S3Server, run_id: str, tmp_path: Path
) -> None:
    words = train_tokenizer(["some words"], 270, tmp_path / "bpe")
    prepare((Article(f"story {n} of a hundred") for n in range(99)), words, tmp_path / "shards")
    for file in (tmp_path / "shards").iterdir():
        obstore.put(
            s3._connect(f"s3://{BUCKET}", s3_server.access()), f"{run_id}/p/{file.name}", file
        )
    near, far = (
        load_corpus(DataConfig(source="prepared", paths=(path,), seq_len=16, streams=1))
        for path in (str(tmp_path / "sha*"), f"{url}/p")
    )
    assert near.train.digest == far.train.digest
    with pytest.raises(CorpusError, match="There is no s3"):
        load_corpus(DataConfig(source="prepared", paths=(f"{url}/a.json",)))


def test_a_file_that_is_gone_before_it_is_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    files = find_sources([str(tmp_path)])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"Cannot read .*/a\.txt: No such file"):
        fingerprint(files, "text")


@pytest.mark.parametrize("name", ["a**/*.txt", "a" * 5000])
def test_a_name_that_can_be_no_file_is_one_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.paths"):
        read([name])
    assert not folders.is_allowed(name)


def test_a_pattern_names_the_files_that_it_matches(tmp_path: Path) -> None:
    for name in ("a1.txt", "a2.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    assert read([str(tmp_path / "a*.txt")]) == ["a1.txt", "a2.txt"]
    with pytest.raises(CorpusError, match="There is no"):
        read([str(tmp_path / "c*.txt")])


@pytest.mark.parametrize("pattern", ["**", "**/*"])
def test_a_pattern_of_folders_and_of_what_is_in_them_names_each_file_once(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("1.txt", "a/2.txt", "a/b/3.txt"):
        (tmp_path / name).write_text(name)
    assert sorted(read([f"{tmp_path}/{pattern}"])) == ["1.txt", "a/2.txt", "a/b/3.txt"]


def test_folders_linked_below_a_folder_are_read_once_and_loops_left_out(tmp_path: Path) -> None:
    texts, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    for folder in (texts, elsewhere):
        folder.mkdir()
    (texts / "a.txt").write_text("one")
    (elsewhere / "b.txt").write_text("two")
    (texts / "linked").symlink_to(elsewhere)
    (texts / "also").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(texts)
    (texts / "itself").symlink_to(texts)
    found = sorted(files_below(texts))
    assert [path.relative_to(texts).as_posix() for path in found] == ["a.txt", "also/b.txt"]
