"""Checkpoints in a real S3 server: what is in the bucket, writers that die, refusals, commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from skerry.errors import CheckpointCorrupt, ConfigError, StoreError
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import PARAMS_FILE, verify
from skerry.store.finding import locate
from skerry.store.kinds import s3
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from tests.support.checkpoints import begun, save
from tests.support.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.nats

MANIFEST_BYTES = b'{"made": "up"}\n'


@pytest.fixture
def url(run_id: str) -> str:
    return f"s3://{BUCKET}/{run_id}/run"


@pytest.fixture
def store(s3_server: S3Server, url: str) -> S3Store:
    return S3Store(url, s3_server.access())


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when this is called, every draft counts as one whose writer died."""
    return lambda: monkeypatch.setattr(s3, "DEAD_S", -10.0)


def objects(store: S3Store) -> list[str]:
    return sorted(meta["path"] for meta in s3._listed(store._client))


class TestLayout:
    async def test_what_is_downloaded_is_a_local_checkpoint_and_what_was_changed_is_damaged(
        self, store: S3Store, s3_server: S3Server, tmp_path: Path
    ) -> None:
        scripted = await begun()
        await scripted.commit_all(step=7)
        name = await save(scripted, store)
        for path in objects(store):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(obstore.get(store._client, path).bytes())
        assert verify(LocalStore(tmp_path), name) == verify(store, name)

        data = bytearray((tmp_path / name / PARAMS_FILE).read_bytes())
        data[-1] ^= 1
        obstore.put(store._client, f"{name}/{PARAMS_FILE}", bytes(data))
        with pytest.raises(CheckpointCorrupt, match=rf"{name}/{PARAMS_FILE} is damaged"):
            verify(*locate(store.url, s3_server.access()))

    def test_an_object_that_vanished_is_noticed_before_the_entry_appears(
        self, store: S3Store
    ) -> None:
        draft = store.draft("first")
        draft.write("a.bin", [b"content"])
        obstore.delete(store._client, "first/a.bin")
        with pytest.raises(CheckpointCorrupt, match="not as it was sent"):
            draft.commit(MANIFEST_BYTES)
        draft.discard()
        assert objects(store) == []

    def test_a_manifest_is_never_overwritten_but_may_be_repeated(self, store: S3Store) -> None:
        draft = store.draft("first")  # where the answer is lost, the request comes again
        assert [draft.commit(MANIFEST_BYTES) for _ in range(2)] == ["first", "first"]
        draft = store.draft("second")
        obstore.put(store._client, f"second/{MANIFEST}", b"another")
        with pytest.raises(CheckpointCorrupt, match="not as it was sent"):
            draft.commit(MANIFEST_BYTES)


class TestDeadWriters:
    def test_only_the_objects_of_a_dead_writer_are_deleted(
        self, store: S3Store, expire: Callable[[], None]
    ) -> None:
        store.draft("kept").commit(MANIFEST_BYTES)
        store.draft("first").write("a.bin", [b"content"])
        for path in ("notes/readme.txt", "readme.txt"):
            obstore.put(store._client, path, b"mine")
        expire()
        assert store.sweep() == ["first"]
        theirs = ["notes/readme.txt", "readme.txt"]
        assert objects(store) == ["kept/.writer", f"kept/{MANIFEST}", *theirs]

    def test_a_draft_that_stood_still_gives_up(
        self, store: S3Store, expire: Callable[[], None]
    ) -> None:
        draft = store.draft("first")
        expire()
        draft.write("a.bin", [b"content"])
        with pytest.raises(StoreError, match="stood still for too long"):
            draft.commit(MANIFEST_BYTES)
        assert store.names() == []


class TestRefusals:
    def test_a_bucket_that_is_not_there(self, s3_server: S3Server) -> None:
        elsewhere = S3Store("s3://nowhere/run", s3_server.access())
        for act in (elsewhere.names, elsewhere.sweep, lambda: elsewhere.draft("a")):
            with pytest.raises(StoreError, match="There is no bucket 'nowhere'"):
                act()

    def test_credentials_that_may_only_read(self, s3_server: S3Server, url: str) -> None:
        reader = S3Store(url, s3_server.access("reader"))
        assert reader.names() == []
        with pytest.raises(StoreError, match="too little"):
            reader.draft("a")

    def test_wrong_keys_never_show_in_the_sentence(
        self, s3_server: S3Server, url: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "credentials"
        file.write_text("[x]\naws_access_key_id=writer\naws_secret_access_key=not-this-one\n")
        wrong = S3Store(url, s3_server.access("x").model_copy(update={"credentials": file}))
        with pytest.raises(StoreError, match="check the keys") as caught:
            wrong.names()
        assert "not-this-one" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"no keys under \[other\]"):
            S3Store(url, s3_server.access("other"))

    def test_an_endpoint_that_does_not_answer(self, s3_server: S3Server, url: str) -> None:
        changes = {"endpoint": "http://127.0.0.1:1", "timeout_s": 1.0}
        access = s3_server.access().model_copy(update=changes)
        with pytest.raises(StoreError, match="does not answer"):
            S3Store(url, access).names()
