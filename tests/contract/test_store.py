"""Every checkpoint store keeps the same promises, whatever it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from errno import ENOLCK
from typing import TYPE_CHECKING

import pytest

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import local
from skerry.store.base import MANIFEST, StoredFile
from skerry.store.finding import locate
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from tests.support.s3_server import BUCKET, S3Server

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.store.base import Store

TOO_LONG = "x" * 300
"""As a file's name it is refused by the kernel, also to root."""
MANIFEST_BYTES = b'{"made": "up"}\n'
MOST = 1000


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, run_id: str) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    server: S3Server = request.getfixturevalue("s3_server")
    return S3Store(f"s3://{BUCKET}/{run_id}/run", server.access())


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

    def test_a_discarded_draft_leaves_nothing(self, store: Store) -> None:
        draft = store.draft("first")
        draft.write("a.bin", [b"abc"])
        for _ in range(2):
            draft.discard()
        assert (store.names(), store.sweep()) == ([], [])

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
        assert store.delete("first")
        assert store.names() == ["first-2"]
        assert not store.delete("first")

    def test_a_live_draft_is_neither_swept_nor_deleted(self, store: Store) -> None:
        written(store, "first")
        draft = store.draft("second")
        draft.write("a.bin", [b"abc"])
        assert (store.sweep(), store.delete("second")) == ([], False)
        draft.commit(MANIFEST_BYTES)
        assert store.names() == ["first", "second"]

    @pytest.mark.parametrize("file", ["missing.bin", MANIFEST])
    def test_opening_what_is_not_there_names_it(self, store: Store, file: str) -> None:
        with pytest.raises(StoreError, match=file):
            store.read("nothing", file, MOST)

    @pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "/etc", ".partial-x", "a\n"])
    def test_a_name_that_leads_elsewhere_is_refused(self, store: Store, name: str) -> None:
        for act in (store.draft, store.delete, lambda name: store.read(name, "a.bin", MOST)):
            with pytest.raises(StoreError, match="cannot name"):
                act(name)
        written(store, "first")
        with pytest.raises(StoreError, match="cannot name"):
            store.read("first", name, MOST)
        draft = store.draft("second")
        with pytest.raises(StoreError, match="cannot name"):
            draft.write(name, [b"x"])
        draft.discard()


class TestLocalStore:
    """What a disk can do, with real processes and a real kernel's refusals."""

    def test_a_link_out_of_the_folder_is_not_followed(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path / "run")
        folder = store.root / written(store, "first")
        (tmp_path / "secret").write_bytes(b"secret")
        (folder / "a.bin").unlink()
        (folder / "a.bin").symlink_to(tmp_path / "secret")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / MANIFEST).write_bytes(MANIFEST_BYTES)
        (store.root / "second").symlink_to(tmp_path / "elsewhere")
        for name, file in (("first", "a.bin"), ("second", MANIFEST)):
            with pytest.raises(StoreError, match="link that leads out of its folder"):
                store.read(name, file, MOST)
        (store.root / "latest").symlink_to(written(store, "third"))
        assert read(store, "latest") == b"content"  # one inside is followed

    def test_a_pipe_is_refused_at_once(self, tmp_path: Path) -> None:
        store = LocalStore(tmp_path)
        os.mkfifo(tmp_path / written(store, "first") / "pipe")
        with pytest.raises(StoreError, match="not a regular file"):
            store.read("first", "pipe", MOST)

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
        store = LocalStore(tmp_path)
        written(store, "first")
        done = subprocess.run(
            [sys.executable, "-c", SMALL_FILES + FULL_WRITER, str(tmp_path)],
            capture_output=True,
            check=False,
            text=True,
        )
        assert "No room for a checkpoint" in done.stdout
        assert (store.names(), [*tmp_path.iterdir()]) == (["first"], [tmp_path / "first"])

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        """A 256 KiB tmpfs in a user namespace: ENOSPC itself, without being root."""
        unshare = shutil.which("unshare")
        private = [str(unshare), "--user", "--map-root-user", "--mount"]
        if unshare is None or subprocess.run([*private, "true"], check=False).returncode:
            pytest.skip("this kernel lets ordinary users make no mount namespace")
        script = f'mount -t tmpfs -o size=256k none "{tmp_path}" && "$0" -c "$1" "{tmp_path}"'
        done = subprocess.run(
            [*private, "sh", "-c", script, sys.executable, FULL_WRITER],
            capture_output=True,
            check=False,
            text=True,
        )
        assert "No room for a checkpoint" in done.stdout, done.stderr
        assert "No space left on device" in done.stdout
        assert "left: []" in done.stdout


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
print("left:", [n for n in os.listdir(sys.argv[1]) if n != "first"])
"""
