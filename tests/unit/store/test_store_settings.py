"""What may be said about a store in a config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import ConfigError
from skerry.service.stores import root_of, store_of
from skerry.settings import loading
from skerry.store.local import LocalStore
from skerry.store.opening import is_url, normal
from skerry.store.s3 import S3Store


def test_a_bucket_takes_the_place_of_the_folder() -> None:
    local = loading.load(None, ["store.url=s3://bucket/prefix"], {}).local
    assert root_of(local.store) == "s3://bucket/prefix"
    assert isinstance(store_of(local.store, "run"), S3Store)
    assert store_of(local.store, "run").where("step-1") == "s3://bucket/prefix/run/step-1"


def test_without_a_bucket_it_is_the_folder(tmp_path: Path) -> None:
    local = loading.load(None, [f"store.path={tmp_path}"], {}).local
    store = store_of(local.store, "run")
    assert isinstance(store, LocalStore)
    assert store.root == tmp_path / "run"


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("store.url=s4://bucket", "must look like s3://bucket/prefix"),
        ("store.url=s3:///prefix", "must look like s3://bucket/prefix"),
        ("store.endpoint=host:9000", "must look like https://host"),
        ("store.timeout_s=0", "must be more than 0"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(assignment: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loading.load(None, [assignment], {})


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="without keys") as caught:
        loading.load(None, ["store.url=s3://user:secret@bucket"], {})
    assert "secret" not in str(caught.value)


def test_an_address_that_went_through_a_path_is_the_same() -> None:
    folded = Path("s3://bucket/prefix/run/step-1/")
    assert is_url(folded)
    assert normal(folded) == "s3://bucket/prefix/run/step-1"
