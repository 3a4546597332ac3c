"""Every checkpoint store keeps the same promises; what a disk and a real S3 server add to them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from errno import ENOLCK
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import obstore
import pytest

from skerry.errors import CheckpointCorrupt, ConfigError, StoreError
from skerry.settings.local import StoreSettings
from skerry.store import local
from skerry.store.base import MANIFEST, Store, StoredFile
from skerry.store.checkpoint import PARAMS_FILE, verify
from skerry.store.finding import locate
from skerry.store.kinds import s3
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from tests.support.checkpoints import begun, save
from tests.support.s3_server import BUCKET, S3Server

TOO_LONG = "x" * 300
"""As a file's name it is refused by the kernel, also to root."""
MANIFEST_BYTES = b'{"made": "up"}\n'
MOST = 1000


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    bucket: S3Store = request.getfixturevalue("bucket")
    return bucket


def written(store: Store, name: str, content: bytes = b"content") -> str:
    draft = store.draft(name)
    draft.write("a.bin", [content])
    return draft.commit(MANIFEST_BYTES)


def read(store: Store, name: str, file: str = "a.bin") -> bytes:
    return bytes(store.read(name, file, MOST))


class TestEveryStore:
    def test_an_entry_reads_back_as_it_was_written(self, store: Store) -> None:
        assert (store.names(), store.folders(), store.sweep()) == ([], [], [])
        draft = store.draft("first")
        draft.write("a.bin", [b"earlier, and longer"])
        sha256 = hashlib.sha256(b"abcd").hexdigest()
        stored = draft.write("a.bin", [b"ab", bytearray(b"cd")])
        assert stored == StoredFile("a.bin", 4, sha256)
        draft.write("b.bin", [memoryview(b"x")])
        draft.write("empty.bin", [])
        assert store.names() == []  # invisible until its manifest is in place
        assert draft.commit(MANIFEST_BYTES) == "first"
        draft.discard()
        found = [read(store, "first", f) for f in ("a.bin", "b.bin", "empty.bin", MANIFEST)]
        assert found == [b"abcd", b"x", b"", MANIFEST_BYTES]
        assert (store.names(), store.folders()) == (["first"], ["first"])

    def test_a_large_file_reads_back_whole_or_its_beginning(self, store: Store) -> None:
        content = random.Random(1).randbytes(20_000_001)
        draft = store.draft("first")
        stored = draft.write("a.bin", [memoryview(content)[:9_000_000], content[9_000_000:]])
        draft.commit(MANIFEST_BYTES)
        assert (stored.size, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert store.read("first", "a.bin", len(content)) == content
        assert store.read("first", "a.bin", 8_388_638) == content[:8_388_638]

    def test_two_writers_of_one_name_both_keep_their_entry(self, store: Store) -> None:
        one, two = store.draft("same"), store.draft("same")
        one.write("a.bin", [b"one"])
        two.write("a.bin", [b"two"])
        names = [draft.commit(MANIFEST_BYTES) for draft in (one, two)]
        assert names == ["same", "same-2"]
        assert [read(store, name) for name in names] == [b"one", b"two"]

    def test_a_deleted_entry_is_gone_and_only_it(self, store: Store) -> None:
        for name in ("first", "first-2"):
            written(store, name)
        assert [store.delete("first") for _ in range(2)] == [True, False]
        assert store.names() == ["first-2"]

    def test_a_draft_is_neither_swept_nor_deleted_and_leaves_nothing_when_discarded(
        self, store: Store
    ) -> None:
        written(store, "first")
        draft, other = store.draft("second"), store.draft("third")
        draft.write("a.bin", [b"abc"])
        other.write("a.bin", [b"abc"])
        assert (store.sweep(), store.delete("second")) == ([], False)
        draft.commit(MANIFEST_BYTES)
        for _ in range(2):
            other.discard()
        assert (store.names(), store.sweep()) == (["first", "second"], [])

    @pytest.mark.parametrize("file", ["missing.bin", MANIFEST])
    def test_opening_what_is_not_there_names_it(self, store: Store, file: str) -> None:
        with pytest.raises(StoreError, match=file):
            store.read("nothing", file, MOST)

    @pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", ".partial-x", "a\n"])
    def test_a_name_that_leads_elsewhere_is_refused(self, store: Store, name: str) -> None:
        written(store, "first")
        draft = store.draft("second")
        for act in (
            lambda: store.draft(name),
            lambda: store.delete(name),
            lambda: store.read(name, "a.bin", MOST),
            lambda: store.read("first", name, MOST),
            lambda: draft.write(name, [b"x"]),
        ):
            with pytest.raises(StoreError, match="cannot name"):
                act()
        draft.discard()


class TestLocalStore:
    """What a disk can do, with real processes and a real kernel's refusals."""

    def test_a_link_out_of_the_folder_and_a_pipe_are_refused(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "run")
        folder = store.root / written(store, "first")
        (folder / "link").symlink_to(tmp_path)
        os.mkfifo(folder / "pipe")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / MANIFEST).write_bytes(MANIFEST_BYTES)
        (store.root / "second").symlink_to(tmp_path / "elsewhere")
        for name, file, why in (
            ("first", "link", "link that leads out of its folder"),
            ("second", MANIFEST, "link that leads out of its folder"),
            ("first", "pipe", "not a regular file"),
        ):
            with pytest.raises(StoreError, match=why):
                store.read(name, file, MOST)
        (store.root / "latest").symlink_to(written(store, "third"))
        assert read(store, "latest") == b"content"  # one inside is followed

    def test_a_writer_killed_half_way_leaves_earlier_entries_and_is_swept(
        self, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path)
        written(store, "first", b"earlier")
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        with writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"half written\n"
            assert store.sweep() == []
            writer.send_signal(signal.SIGKILL)
        assert (store.names(), read(store, "first")) == (["first"], b"earlier")
        assert len(store.sweep()) == 1
        assert list(tmp_path.iterdir()) == [tmp_path / "first"]

    def test_discarding_the_only_draft_removes_the_folder_that_it_made(
        self, tmp_path: Path
    ) -> None:
        store = LocalStore(tmp_path / "run")
        store.draft("first").discard()
        assert list(tmp_path.iterdir()) == []
        one, two = store.draft("first"), store.draft("second")
        one.discard()
        assert two.commit(MANIFEST_BYTES) == "second"
        assert store.names() == ["second"]

    def test_a_file_that_reads_back_differently_is_never_committed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = LocalStore(tmp_path).draft("first")

        def other_digest(_path: Path) -> str:
            return "0" * 64

        monkeypatch.setattr(local, "sha256_from_disk", other_digest)
        with pytest.raises(CheckpointCorrupt, match=r"a\.bin does not read back"):
            draft.write("a.bin", [b"abc"])
        draft.discard()
        assert list(tmp_path.iterdir()) == []

    def test_what_may_not_be_looked_at_counts_as_an_entry_that_cannot_be_read(
        self, tmp_path: Path
    ) -> None:
        """The kernel looks through no such link, as little as into another user's folder."""
        store = LocalStore(tmp_path)
        written(store, "first")
        (tmp_path / "no-manifest").mkdir()
        (tmp_path / "second").symlink_to(TOO_LONG)
        assert store.names() == ["first", "second"]
        assert store.folders() == ["first", "no-manifest", "second"]
        with pytest.raises(StoreError, match="check the path"):
            store.read("second", MANIFEST, MOST)
        assert locate(tmp_path / "first")[1] == "first"

    def test_a_root_that_cannot_be_made_or_looked_at_is_one_sentence_with_the_fix(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        barred = LocalStore(tmp_path / TOO_LONG)
        for act in (lambda: LocalStore(tmp_path / "file" / "run").draft("first"), barred.sweep):
            with pytest.raises(StoreError, match=r"point store\.path elsewhere"):
                act()
        with pytest.raises(StoreError, match="check the path"):
            barred.folders()

    def test_a_disk_without_locks_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_locks(_handle: int, _operation: int) -> None:
            raise OSError(ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(StoreError, match=r"No locks available.*point store\.path elsewhere"):
            LocalStore(tmp_path).sweep()

    def test_a_write_that_the_kernel_refuses_for_size_leaves_nothing(self, tmp_path: Path) -> None:
        """RLIMIT_FSIZE is a refusal in the middle of a write that ordinary users can set up."""
        assert "No room for a checkpoint" in full_writer([], tmp_path, SMALL_FILES)

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        """A 256 KiB tmpfs in a user namespace: ENOSPC itself, without being root."""
        unshare = shutil.which("unshare")
        private = [str(unshare), "--user", "--map-root-user", "--mount"]
        if unshare is None or subprocess.run([*private, "true"], check=False).returncode:
            pytest.skip("this kernel lets ordinary users make no mount namespace")
        mount = f'mount -t tmpfs -o size=256k none "{tmp_path}" && "$0" "$@"'
        said = full_writer([*private, "sh", "-c", mount], tmp_path)
        assert "No room for a checkpoint" in said
        assert "No space left on device" in said


@pytest.fixture
def bucket(s3_server: S3Server, run_id: str) -> S3Store:
    return S3Store(f"s3://{BUCKET}/{run_id}/run", s3_server.access())


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when this is called, every draft counts as one whose writer died."""
    return lambda: monkeypatch.setattr(s3, "DEAD_S", -10.0)


def objects(bucket: S3Store) -> list[str]:
    return sorted(meta["path"] for meta in s3._listed(bucket._client))


class TestS3Store:
    """What is in the bucket, writers that die, and refusals."""

    async def test_what_is_downloaded_is_a_local_checkpoint_and_what_was_changed_is_damaged(
        self, bucket: S3Store, s3_server: S3Server, tmp_path: Path
    ) -> None:
        scripted = await begun()
        await scripted.commit_all(step=7)
        name = await save(scripted, bucket)
        for path in objects(bucket):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(obstore.get(bucket._client, path).bytes())
        assert verify(LocalStore(tmp_path), name) == verify(bucket, name)

        data = bytearray((tmp_path / name / PARAMS_FILE).read_bytes())
        data[-1] ^= 1
        obstore.put(bucket._client, f"{name}/{PARAMS_FILE}", bytes(data))
        with pytest.raises(CheckpointCorrupt, match=rf"{name}/{PARAMS_FILE} is damaged"):
            verify(*locate(bucket.url, s3_server.access()))

    def test_an_object_that_vanished_is_noticed_before_the_entry_appears(
        self, bucket: S3Store
    ) -> None:
        draft = bucket.draft("first")
        draft.write("a.bin", [b"content"])
        obstore.delete(bucket._client, "first/a.bin")
        with pytest.raises(CheckpointCorrupt, match="not as it was sent"):
            draft.commit(MANIFEST_BYTES)
        draft.discard()
        assert objects(bucket) == []

    def test_a_manifest_is_never_overwritten_but_may_be_repeated(self, bucket: S3Store) -> None:
        draft = bucket.draft("first")  # where the answer is lost, the request comes again
        assert [draft.commit(MANIFEST_BYTES) for _ in range(2)] == ["first", "first"]
        draft = bucket.draft("second")
        obstore.put(bucket._client, f"second/{MANIFEST}", b"another")
        with pytest.raises(CheckpointCorrupt, match="not as it was sent"):
            draft.commit(MANIFEST_BYTES)

    def test_only_the_objects_of_a_dead_writer_are_deleted(
        self, bucket: S3Store, expire: Callable[[], None]
    ) -> None:
        bucket.draft("kept").commit(MANIFEST_BYTES)
        bucket.draft("first").write("a.bin", [b"content"])
        for path in ("notes/readme.txt", "readme.txt"):
            obstore.put(bucket._client, path, b"mine")
        expire()
        assert bucket.sweep() == ["first"]
        theirs = ["notes/readme.txt", "readme.txt"]
        assert objects(bucket) == ["kept/.writer", f"kept/{MANIFEST}", *theirs]

    def test_a_draft_that_stood_still_gives_up(
        self, bucket: S3Store, expire: Callable[[], None]
    ) -> None:
        draft = bucket.draft("first")
        expire()
        for act in (lambda: draft.write("a.bin", [b"x"]), lambda: draft.commit(MANIFEST_BYTES)):
            with pytest.raises(StoreError, match="stood still for too long"):
                act()
        assert bucket.names() == []

    def test_a_bucket_that_is_not_there(self, s3_server: S3Server) -> None:
        elsewhere = S3Store("s3://nowhere/run", s3_server.access())
        for act in (elsewhere.names, elsewhere.sweep, lambda: elsewhere.draft("a")):
            with pytest.raises(StoreError, match="There is no bucket 'nowhere'"):
                act()

    def test_credentials_that_may_only_read(self, s3_server: S3Server, bucket: S3Store) -> None:
        reader = S3Store(bucket.url, s3_server.access("reader"))
        assert reader.names() == []
        with pytest.raises(StoreError, match="too little"):
            reader.draft("a")

    def test_wrong_keys_never_show_in_the_sentence(
        self, s3_server: S3Server, bucket: S3Store, tmp_path: Path
    ) -> None:
        file = tmp_path / "credentials"
        file.write_text("[x]\naws_access_key_id=writer\naws_secret_access_key=not-this-one\n")
        wrong = S3Store(bucket.url, s3_server.access("x").model_copy(update={"credentials": file}))
        with pytest.raises(StoreError, match="check the keys") as caught:
            wrong.names()
        assert "not-this-one" not in str(caught.value)
        with pytest.raises(ConfigError, match=r"no keys under \[other\]"):
            S3Store(bucket.url, s3_server.access("other"))

    def test_an_endpoint_that_does_not_answer(self, s3_server: S3Server, bucket: S3Store) -> None:
        changes = {"endpoint": "http://127.0.0.1:1", "timeout_s": 1.0}
        access = s3_server.access().model_copy(update=changes)
        with pytest.raises(StoreError, match="does not answer"):
            S3Store(bucket.url, access).names()

    def test_a_busy_s3_is_asked_again_and_a_refusal_says_what_helps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        with refusing() as (answers, endpoint):
            access = StoreSettings(endpoint=endpoint, region="us-east-1")
            answers.extend([(503, "SlowDown")] * 8)
            assert S3Store(f"s3://{BUCKET}/run", access).names() == []
            impatient = S3Store(f"s3://{BUCKET}/run", access.model_copy(update={"timeout_s": 0.5}))
            for status, code, said in (
                (503, "SlowDown", "too busy"),
                (429, "TooManyRequests", "too busy"),
                (403, "RequestTimeTooSkewed", "clock of this machine is wrong"),
            ):
                answers[:] = [(status, code)] * 99
                with pytest.raises(StoreError, match=said):
                    impatient.names()


@contextmanager
def refusing() -> Generator[tuple[list[tuple[int, str]], str]]:
    """Serve as an S3 that gives these answers, status and code, and then an empty list."""
    answers: list[tuple[int, str]] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = answers.pop(0) if answers else (200, "")
            kind = "Error" if code else "ListBucketResult"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f"<{kind}><Code>{code}</Code></{kind}>".encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield answers, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def full_writer(prefix: list[str], folder: Path, before: str = "") -> str:
    """Return what a process says whose writes are refused; it has to leave nothing."""
    words = [*prefix, sys.executable, "-c", before + FULL_WRITER, str(folder)]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    assert "left: []" in done.stdout, done.stderr
    return done.stdout


SMALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
"""

KILLED_WRITER = """
import signal, sys
from pathlib import Path
from skerry.store.local import LocalStore
draft = LocalStore(Path(sys.argv[1])).draft("second")
draft.write("a.bin", [b"x" * 100_000])
print("half written", flush=True)
signal.pause()
"""

FULL_WRITER = """
import os, sys
from pathlib import Path
from skerry.errors import StoreError
from skerry.store.local import LocalStore
draft = LocalStore(Path(sys.argv[1])).draft("second")
try:
    draft.write("a.bin", [b"x" * 5_000] * 100)
except StoreError as error:
    print(error)
finally:
    draft.discard()
print("left:", os.listdir(sys.argv[1]))
"""
