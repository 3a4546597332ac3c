"""What every checkpoint store promises, whatever it is made of."""

from __future__ import annotations

import fcntl
import hashlib
import random
import shutil
import signal
import subprocess
import sys
from contextlib import closing
from errno import ENOLCK
from typing import TYPE_CHECKING

import pytest

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import local
from skerry.store.base import MANIFEST, StoredFile
from skerry.store.listing import locate
from skerry.store.local import LocalStore
from skerry.store.opening import folders
from skerry.store.s3 import S3Store
from tests.support.s3_server import BUCKET, S3Server

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.store.base import Store

TOO_LONG = "x" * 300
"""As a file's name it is refused by the kernel, whoever asks."""
MANIFEST_BYTES = b'{"made": "up"}\n'


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, run_id: str) -> Store:
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    server: S3Server = request.getfixturevalue("s3_server")
    return S3Store(f"s3://{BUCKET}/{run_id}/run", server.access())


def written(store: Store, name: str, content: bytes = b"content") -> str:
    draft = store.draft(name)
    draft.append("a.bin", content)
    draft.seal()
    return draft.commit(MANIFEST_BYTES)


def read(store: Store, name: str, file: str) -> bytes:
    with closing(store.open(name, file)) as handle:
        return handle.read()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestEveryStore:
    def test_an_empty_store_has_no_entries(self, store: Store) -> None:
        assert store.names() == []

    def test_an_entry_reads_back_as_it_was_appended(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"ab")
        draft.append("b.bin", memoryview(b"x"))
        draft.append("a.bin", bytearray(b"cd"))
        draft.seal()
        name = draft.commit(MANIFEST_BYTES)
        assert (name, read(store, name, "a.bin")) == ("first", b"abcd")
        assert (read(store, name, "b.bin"), read(store, name, MANIFEST)) == (b"x", MANIFEST_BYTES)

    def test_seal_tells_size_and_digest_of_each_file(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"abc")
        sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        assert draft.seal() == (StoredFile("a.bin", 3, sha256),)
        draft.discard()

    def test_an_entry_is_invisible_until_its_manifest_is_in_place(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"abc")
        draft.seal()
        assert store.names() == []
        draft.commit(MANIFEST_BYTES)
        assert store.names() == ["first"]

    def test_a_discarded_draft_leaves_nothing(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"abc")
        draft.discard()
        assert (store.names(), store.sweep()) == ([], [])

    def test_a_dropped_file_can_be_begun_anew(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"earlier")
        draft.append("b.bin", b"b")
        draft.drop("a.bin")
        draft.drop("never begun")
        draft.append("a.bin", b"later")
        assert {stored.name for stored in draft.seal()} == {"a.bin", "b.bin"}
        assert read(store, draft.commit(MANIFEST_BYTES), "a.bin") == b"later"

    def test_an_entry_may_get_another_name_in_the_end(self, store: Store) -> None:
        draft = store.draft("first")
        draft.append("a.bin", b"a")
        assert draft.commit(MANIFEST_BYTES, "second") == "second"
        assert store.names() == ["second"]

    def test_a_large_file_reads_back_from_anywhere(self, store: Store) -> None:
        content = random.Random(1).randbytes(20_000_001)
        draft = store.draft("first")
        for start in range(0, len(content), 6_000_000):
            draft.append("a.bin", memoryview(content)[start : start + 6_000_000])
        (stored,) = draft.seal()
        draft.commit(MANIFEST_BYTES)
        assert (stored.size, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        with closing(store.open("first", "a.bin")) as handle:
            assert handle.read() == content
            handle.seek(7_999_990)
            assert handle.read(30) == content[7_999_990:8_000_020]

    def test_discard_after_commit_changes_nothing(self, store: Store) -> None:
        draft = store.draft("first")
        draft.commit(MANIFEST_BYTES)
        draft.discard()
        assert store.names() == ["first"]

    def test_two_writers_of_one_name_both_keep_their_entry(self, store: Store) -> None:
        one, two = store.draft("same"), store.draft("same")
        one.append("a.bin", b"one")
        two.append("a.bin", b"two")
        names = [draft.commit(MANIFEST_BYTES) for draft in (one, two)]
        assert names == ["same", "same-2"]
        assert [read(store, name, "a.bin") for name in names] == [b"one", b"two"]

    def test_a_deleted_entry_is_gone(self, store: Store) -> None:
        written(store, "first")
        assert store.delete("first")
        assert store.names() == []

    def test_deleting_what_is_gone_says_so(self, store: Store) -> None:
        written(store, "other")
        assert not store.delete("first")

    def test_sweep_leaves_live_drafts_and_whole_entries(self, store: Store) -> None:
        written(store, "first")
        draft = store.draft("second")
        draft.append("a.bin", b"abc")
        assert store.sweep() == []
        draft.commit(MANIFEST_BYTES)
        assert store.names() == ["first", "second"]

    @pytest.mark.parametrize("file", ["missing.bin", MANIFEST])
    def test_opening_what_is_not_there_names_it(self, store: Store, file: str) -> None:
        with pytest.raises(StoreError, match=file):
            store.open("nothing", file)

    @pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", ".partial-x"])
    def test_a_name_that_leads_elsewhere_is_refused(self, store: Store, name: str) -> None:
        with pytest.raises(StoreError, match="cannot name"):
            store.draft(name)


class TestLocalStore:
    """What a disk can do to us, with real processes and a real kernel's refusals."""

    def test_a_folder_without_manifest_is_no_entry(self, tmp_path: Path) -> None:
        (tmp_path / "step-00000001").mkdir()
        assert LocalStore(tmp_path).names() == []

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
        assert (store.names(), read(store, "first", "a.bin")) == (["first"], b"earlier")
        assert len(store.sweep()) == 1
        assert left(tmp_path) == ["first"]

    def test_a_file_that_reads_back_differently_is_never_committed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = LocalStore(tmp_path).draft("first")
        draft.append("a.bin", b"abc")

        def other_digest(_path: Path) -> str:
            return "0" * 64

        monkeypatch.setattr(local, "sha256_from_disk", other_digest)
        with pytest.raises(CheckpointCorrupt, match=r"a\.bin does not read back"):
            draft.seal()
        draft.discard()
        assert left(tmp_path) == []

    def test_a_root_that_cannot_be_made_is_one_sentence_with_the_fix(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match=r"point store\.path elsewhere"):
            LocalStore(tmp_path / "file" / "run").draft("first")

    def test_what_may_not_be_looked_at_counts_as_an_entry_that_cannot_be_read(
        self, tmp_path: Path
    ) -> None:
        """The kernel looks through no such link, as little as into another user's folder."""
        store = LocalStore(tmp_path)
        written(store, "first")
        (tmp_path / "second").symlink_to(TOO_LONG)
        assert store.names() == ["first", "second"]
        with pytest.raises(StoreError, match="check the path"):
            store.open("second", MANIFEST)
        assert locate(tmp_path / "first")[1] == "first"

    def test_a_root_that_may_not_be_looked_at_is_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"point store\.path elsewhere"):
            LocalStore(tmp_path / TOO_LONG).sweep()
        with pytest.raises(StoreError, match="check the path"):
            folders(tmp_path / TOO_LONG)

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
        assert (store.names(), left(tmp_path)) == (["first"], ["first"])

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
draft.append("a.bin", b"x" * 100_000)
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
    for _ in range(100):
        draft.append("a.bin", b"x" * 5_000)
    draft.seal()
except StoreError as error:
    print(error)
finally:
    draft.discard()
print("left:", [n for n in os.listdir(sys.argv[1]) if n != "first"])
"""
