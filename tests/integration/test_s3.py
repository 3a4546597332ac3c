"""Checkpoints in a real S3 server: what is in the bucket, writers that die, refusals, commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import obstore
import pytest

from skerry.errors import CheckpointCorrupt, ConfigError, StoreError
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import verify
from skerry.store.kinds import s3
from skerry.store.kinds.s3 import S3Store
from skerry.store.listing import all_summaries, locate
from skerry.store.local import LocalStore
from skerry.store.manifest import PARAMS_FILE
from skerry.store.s3_client import listed
from tests.support.checkpoints import (
    begun,
    save,
)
from tests.support.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.nats

MANIFEST_BYTES = b'{"made": "up"}\n'
EARLIER = Path(__file__).parents[1] / "golden" / "checkpoint-0.1-s3"
"""The objects of a checkpoint that Skerry 0.1 wrote."""
FROM_0_1 = "step-00000009"


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


@pytest.fixture
def earlier(store: S3Store) -> S3Store:
    """A store that holds a checkpoint of Skerry 0.1."""
    for path in (path for path in EARLIER.rglob("*") if path.is_file()):
        obstore.put(store._client, path.relative_to(EARLIER).as_posix(), path)
    return store


def objects(store: S3Store) -> list[str]:
    return sorted(meta["path"] for meta in listed(store._client))


class TestLayout:
    async def test_what_is_downloaded_is_a_local_checkpoint(
        self, store: S3Store, tmp_path: Path
    ) -> None:
        scripted = await begun()
        await scripted.commit_all(step=7)
        name = await save(scripted, store)
        for path in objects(store):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(obstore.get(store._client, path).bytes())
        assert verify(LocalStore(tmp_path), name) == verify(store, name)

    async def test_an_object_that_was_changed_is_found(
        self, store: S3Store, s3_server: S3Server
    ) -> None:
        scripted = await begun()
        await scripted.commit_all()
        path = f"{await save(scripted, store)}/{PARAMS_FILE}"
        data = bytearray(obstore.get(store._client, path).bytes())
        data[-1] ^= 1
        obstore.put(store._client, path, bytes(data))
        with pytest.raises(CheckpointCorrupt, match=rf"{path} is damaged"):
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

    def test_a_manifest_whose_answer_was_lost_keeps_its_name(self, store: S3Store) -> None:
        draft = store.draft("first")
        assert [draft.commit(MANIFEST_BYTES) for _ in range(2)] == ["first", "first"]

    def test_a_manifest_is_never_overwritten(self, store: S3Store) -> None:
        draft = store.draft("first")
        obstore.put(store._client, f"first/{MANIFEST}", b"another")
        with pytest.raises(CheckpointCorrupt, match="not as it was sent"):
            draft.commit(MANIFEST_BYTES)


class TestDeadWriters:
    def test_the_objects_of_a_dead_writer_are_deleted(
        self, store: S3Store, expire: Callable[[], None]
    ) -> None:
        store.draft("kept").commit(MANIFEST_BYTES)
        store.draft("first").write("a.bin", [b"content"])
        expire()
        assert store.sweep() == ["first"]
        assert objects(store) == ["kept/.writer", f"kept/{MANIFEST}"]

    def test_objects_of_others_are_not_touched(
        self, store: S3Store, expire: Callable[[], None]
    ) -> None:
        obstore.put(store._client, "notes/readme.txt", b"mine")
        obstore.put(store._client, "readme.txt", b"mine")
        expire()
        assert store.sweep() == []
        assert len(objects(store)) == 2

    def test_a_draft_that_stood_still_gives_up(
        self, store: S3Store, expire: Callable[[], None]
    ) -> None:
        draft = store.draft("first")
        expire()
        with pytest.raises(StoreError, match="stood still for too long"):
            draft.write("a.bin", [b"content"])
        with pytest.raises(StoreError, match="stood still for too long"):
            draft.commit(MANIFEST_BYTES)
        assert store.names() == []


class TestSkerry01:
    """Checkpoints that 0.1 wrote as parts which are named after their content."""

    def test_one_is_listed_and_verified(self, earlier: S3Store, s3_server: S3Server) -> None:
        access = s3_server.access()
        (found,) = all_summaries(earlier.url.rpartition("/")[0], access=access)
        assert (found.path, found.step, found.tokens) == (earlier.where(FROM_0_1), 9, 90)
        assert verify(*locate(earlier.url, access)).versions == (1, 2, 1)

    def test_one_is_neither_deleted_nor_hidden(
        self, earlier: S3Store, expire: Callable[[], None]
    ) -> None:
        before = objects(earlier)
        assert earlier.draft(FROM_0_1).commit(MANIFEST_BYTES) == f"{FROM_0_1}-2"
        assert earlier.delete(f"{FROM_0_1}-2")
        assert not earlier.delete(FROM_0_1)
        expire()
        assert earlier.sweep() == []
        assert objects(earlier) == before

    @pytest.mark.parametrize(
        "entry",
        [
            b"",
            b"[" * 100_000,
            b"[]",
            b'{"manifest": 7}',
            b'{"files.v1": {"a": [{"key": "../../other/parts/x", "size": 1}]}}',
            b'{"files.v1": {"a": [{"key": "%s", "size": 1}]}}' % (b"0" * 64),
            b'{"files.v1": {"a": [{"key": "%s", "size": 1}]}}' % (b"1" * 64),
        ],
    )
    def test_an_entry_that_makes_no_sense_is_refused(self, store: S3Store, entry: bytes) -> None:
        obstore.put(store._client, "entries/first.json", entry)
        obstore.put(store._client, f"parts/{'1' * 64}", bytes(9_000_000))  # larger than any part
        for file in (MANIFEST, "a"):
            with pytest.raises(CheckpointCorrupt, match="its entry cannot be read"):
                store.read("first", file, 1000)


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

    def test_a_credentials_file_without_the_profile(self, s3_server: S3Server, url: str) -> None:
        with pytest.raises(ConfigError, match=r"no keys under \[other\]"):
            S3Store(url, s3_server.access("other"))

    def test_an_endpoint_that_does_not_answer(self, s3_server: S3Server, url: str) -> None:
        changes = {"endpoint": "http://127.0.0.1:1", "timeout_s": 1.0}
        access = s3_server.access().model_copy(update=changes)
        with pytest.raises(StoreError, match="does not answer"):
            S3Store(url, access).names()
