"""What may be said about a store in a config file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skerry.errors import ConfigError
from skerry.settings import loading
from skerry.settings.local import STORE_KINDS, StoreSettings
from skerry.store import kinds
from skerry.store.base import MANIFEST
from skerry.store.finding import is_url, locate, open_store, root_of, store_of
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore

SHELF = """
from pathlib import Path
from urllib.parse import urlsplit
from skerry.store.local import LocalStore

def open_store(url, access):
    at = urlsplit(url)
    return LocalStore(Path("/", at.netloc, at.path.lstrip("/")))
"""


def settings(assignment: str) -> StoreSettings:
    return loading.load(None, [assignment], {}).local.store


def test_a_url_takes_the_place_of_the_folder() -> None:
    store = settings("store.url=s3://bucket/prefix")
    assert root_of(store) == "s3://bucket/prefix"
    assert isinstance(store_of(store, "run"), S3Store)
    assert store_of(store, "run").where("step-1") == "s3://bucket/prefix/run/step-1"


def test_a_bucket_without_a_name_is_refused() -> None:
    for address in ("s3://", "s3:///"):
        with pytest.raises(ConfigError, match="write s3://bucket/prefix"):
            locate(address)


def test_without_a_url_it_is_the_folder(tmp_path: Path) -> None:
    store = store_of(settings(f"store.path={tmp_path}"), "run")
    assert isinstance(store, LocalStore)
    assert store.root == tmp_path / "run"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("store.url=s4://bucket", "must look like s3://bucket/prefix"),
        ("store.url=s3:///prefix", "must look like s3://bucket/prefix"),
        ("store.url=s3://user:secret@bucket", "without keys"),
        ("store.endpoint=host:9000", "must look like https://host"),
        ("store.timeout_s=0", "must be more than 0"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        settings(assignment)
    assert "secret" not in str(caught.value)


def test_a_store_whose_extra_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, f"{STORE_KINDS}.s3", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"Checkpoints in S3 need obstore.*\[s3\]'"):
        open_store("s3://bucket/run")


def test_a_new_kind_of_store_is_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf.py").write_text(SHELF)
    monkeypatch.setattr(kinds, "__path__", [*kinds.__path__, str(tmp_path)])
    store = settings(f"store.url=shelf:/{tmp_path}/books")
    held = store_of(store, "run")
    held.draft("step-1").commit(b"manifest")
    assert [bytes(held.read(name, MANIFEST, 100)) for name in held.names()] == [b"manifest"]
    assert is_url("shelf://books/step-1")
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix or shelf://bucket/prefix"):
        settings("store.url=s4://bucket")
