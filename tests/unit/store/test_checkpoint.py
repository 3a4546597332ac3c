"""What a checkpoint and its files hold, and that no damage and no forgery goes unseen."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import struct
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from skerry.algorithm.fragments import gather
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.log.state_writer import NewPart
from skerry.protocol.chunks import vector_digest
from skerry.store import checkpoint as reading
from skerry.store import tensorfile
from skerry.store.base import MANIFEST, StoredFile
from skerry.store.checkpoint import (
    PARAMS_FILE,
    dump,
    fragments,
    load,
    params,
    read_manifest,
    snapshot_file,
    verify,
)
from skerry.store.finding import all_summaries, locate, summaries
from skerry.store.local import LocalStore
from tests.support.checkpoints import begun, flip_bit, save

FILES = (PARAMS_FILE, snapshot_file(0), MANIFEST)

Values = dict[str, Any]
F32s = NDArray[np.float32]


def of(saved: Path) -> tuple[LocalStore, str]:
    return LocalStore(saved.parent), saved.name


def digested(body: bytes) -> bytes:
    """Return a manifest whose digest fits."""
    return body + f',\n "digest": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def forge(saved: Path, where: str, value: object) -> None:
    """Change one value of a manifest, such as ``files.0.size``, and make its digest fit again."""
    values = json.loads((saved / MANIFEST).read_bytes())
    del values["digest"]
    *path, last = [int(key) if key.isdecimal() else key for key in where.split(".")]
    inner = reduce(lambda found, key: found[key], path, values)
    inner[last] = value
    body = json.dumps(values, indent=1).removesuffix("\n}").encode()
    (saved / MANIFEST).write_bytes(digested(body))


async def test_everything_reads_back_as_it_was_committed(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all(step=7, tokens=70)
    await scene.commit(2, step=9, tokens=90)
    name = await save(scene, store)
    for kept, vectors in fragments(store, name):
        index = kept.commit.fragment
        assert kept.commit == scene.manifests[index].commit
        for part, vector in scene.vectors[index].items():
            np.testing.assert_array_equal(vectors[part], vector, strict=True)
    found, tensors = params(store, name)
    flat = [tensors[leaf.name].reshape(-1) for leaf in scene.plan.leaves]
    for fragment in scene.plan.fragments:
        read = NewPart.of("keyframe", "bf16", scene.vectors[fragment.index]["master"])
        assert vector_digest(gather(fragment, flat)) == read.digest
    assert (name, found.step, found.tokens) == ("step-00000009", 9, 90)
    assert (found.versions, found.index) == ((1, 1, 2), 0)
    assert found.config == json.loads(scene.record.config_json)


async def test_it_holds_what_learners_read_last_and_the_newest_snapshot_with_its_own_commit(
    store: LocalStore,
) -> None:
    scene = await begun()
    await scene.commit_all(step=7, tokens=70)
    snapshots = dict(scene.manifests)
    for version in (2, 3):
        await scene.commit(1, step=10 * version, tokens=100 * version, whole=False)
    held = [saved for saved, _ in fragments(store, await save(scene, store))]
    assert [saved.commit.version for saved in held] == [1, 3, 1]
    for saved in held:
        assert saved.commit == scene.manifests[saved.commit.fragment].commit
        assert saved.digest == saved.commit.params_digest
        assert saved.snapshot is not None
        assert saved.snapshot.commit == snapshots[saved.commit.fragment].commit
        assert saved.snapshot.parts[0].digest == saved.snapshot.commit.master_digest


@given(st.lists(npst.arrays(np.float32, 5), max_size=3))
def test_parameters_are_kept_in_the_fewest_bytes_that_hold_them(vectors: list[F32s]) -> None:
    kept = tensorfile.dtype_of(vectors)
    tensors = {str(number): vector for number, vector in enumerate(vectors)}
    head = tensorfile.header(dict.fromkeys(tensors, (5,)), {}, kept)
    values = vectors if kept == "F32" else map(tensorfile.bf16_bits, vectors)
    data = head + b"".join(bytes(tensorfile.raw(value)) for value in values)
    assert same(read_file(data), tensors)
    low = [np.frombuffer(v.tobytes(), "<u2")[::2].any() for v in vectors]
    assert kept == ("F32" if any(low) else "BF16")


def test_the_safetensors_library_opens_both_files(saved: Path) -> None:
    names = {leaf.name for leaf in read_manifest(*of(saved)).leaves}
    assert set(safetensors.numpy.load_file(saved / PARAMS_FILE)) == names
    outer = safetensors.numpy.load_file(saved / snapshot_file(0))
    assert set(outer) == {"0/master", "0/outer.count", "0/outer.momentum"}


def test_a_whole_checkpoint_verifies_and_its_manifest_reads_back(saved: Path) -> None:
    checkpoint = verify(*of(saved))
    assert load(dump(checkpoint)[0], "manifest") == checkpoint


@pytest.mark.parametrize("file", FILES)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_is_found_and_the_file_named(
    saved: Path, file: str, position: float, bit: int
) -> None:
    path = saved / file
    put_right = flip_bit(path, int(position * path.stat().st_size), bit)
    try:
        with pytest.raises(CheckpointCorrupt, match=file) as caught:
            verify(*of(saved))
    finally:
        put_right()
    assert caught.value.path == str(path)


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_or_missing_file_is_found(saved: Path, file: str) -> None:
    path = saved / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match=file):
        verify(*of(saved))
    path.unlink()
    with pytest.raises(StoreError, match=file):
        verify(*of(saved))


def test_tensors_of_another_checkpoint_do_not_match_the_log_digests(saved: Path) -> None:
    """Even a manifest whose file digests were made to fit cannot hide other parameters."""
    store, _ = of(saved)
    flip_bit(saved / PARAMS_FILE, -1)
    draft, whole = store.draft("forged"), read_manifest(*of(saved))
    files = tuple(draft.write(f.name, [(saved / f.name).read_bytes()]) for f in whole.files)
    draft.commit(dump(replace(whole, files=files))[0])
    with pytest.raises(CheckpointCorrupt, match=rf"{PARAMS_FILE}.* is not what the log held"):
        verify(store, "forged")


class TestAForgedManifest:
    """Its digest fits: anything that can write a checkpoint can make that."""

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            ("fragments", 10**12),
            ("fragments", 2),
            ("state", []),
            ("state", 7),
            ("state.0.commit.fragment", 1),
            ("state.0.commit.version", 2**70),
            ("state.0.commit.run", "another"),
            ("state.0.snapshot.commit.fragment", 1),
            ("state.0.snapshot.commit.version", 2),
            ("state.0.snapshot.commit.run", "another"),
            ("state.0.snapshot.parts", []),
            ("state.0.snapshot.parts.0.name", "outer.count"),
            ("leaves.0.shape", [2**40, 2**20]),
            ("leaves.0.shape", [-64, -16]),
            ("leaves.0.name", "block/w"),
            ("files", []),
            ("files.0.name", "../../../etc/passwd"),
            ("files.0.name", "/etc/passwd"),
            ("files.0.name", PARAMS_FILE),
            ("run", "a/../b"),
            ("run", "\x1b]0;pwned\x07"),
            ("learners.0.learner", "\x1b[2J"),
            ("skerry_version", "1\n2"),
            ("created_ns", 10**30),
            ("index", -1),
            ("step", "seven"),
        ],
    )
    def test_what_no_release_writes_is_refused(
        self, saved: Path, where: str, value: object
    ) -> None:
        forge(saved, where, value)
        with pytest.raises(CheckpointCorrupt, match="contradicts itself"):
            verify(*of(saved))
        (found,) = summaries(saved.parent)
        assert "contradicts itself" in found.error

    def test_a_size_that_no_file_has_is_never_allocated(self, saved: Path) -> None:
        for file in range(4):
            forge(saved, f"files.{file}.size", 2**60)
        with pytest.raises(CheckpointCorrupt, match="not what the manifest names"):
            verify(*of(saved))

    @pytest.mark.parametrize(
        "body", [b"[", b'{"a":' + b"[" * 200_000, b"\xff", b"[" * 200_000], ids=range(4)
    )
    def test_json_that_is_no_manifest_is_refused(self, body: bytes) -> None:
        with pytest.raises(CheckpointCorrupt):
            load(digested(body), "somewhere")

    def test_one_that_is_too_large_is_refused_before_it_is_parsed(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "MOST_MANIFEST_BYTES", 1000)
        with pytest.raises(CheckpointCorrupt, match=MANIFEST):
            read_manifest(*of(saved))


@pytest.mark.parametrize(("format_", "release"), [(2, "0.1.0"), (3, "0.2.0"), (9, "9.1")])
def test_another_format_says_which_release_reads_it(
    saved: Path, format_: int, release: str
) -> None:
    other = replace(read_manifest(*of(saved)), format=format_, skerry_version=release)
    with pytest.raises(StoreError, match=rf"use skerry {release}, .* from params\.safetensors"):
        load(dump(other)[0], "manifest")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"index": 3, "created_ns": 9}, {"index": 4, "created_ns": 8}),
        ({"index": 3, "ledger_sequence": 90}, {"index": 4, "ledger_sequence": 60}),
        ({"index": 4, "ledger_sequence": 90}, {"index": 4, "ledger_sequence": 91}),
        ({"run_created_ns": 1, "index": 9, "created_ns": 9}, {"run_created_ns": 2, "index": 0}),
    ],
    ids=["clocks", "rolled_back", "at_once", "next_run"],
)
@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_the_newest_is_what_its_run_wrote_last(
    saved: Path, names: tuple[str, str], older: Values, newer: Values
) -> None:
    checkpoint = read_manifest(*of(saved))
    for name, changes in zip(names, (older, newer), strict=True):
        folder = saved.parent / name
        folder.mkdir()
        (folder / MANIFEST).write_bytes(dump(replace(checkpoint, **changes))[0])
    shutil.rmtree(saved)
    assert [s.name for s in summaries(saved.parent)] == list(names)
    assert locate(saved.parent)[1] == names[1]


def test_an_older_checkpoint_does_not_pass_for_one_that_is_damaged(saved: Path) -> None:
    for name in ("step-00000000", "step-99999999"):
        shutil.copytree(saved, saved.parent / name)
    (saved.parent / "step-00000000" / MANIFEST).write_bytes(b"{}")
    assert locate(saved.parent)[1] == "step-99999999"
    (saved.parent / "step-99999999" / MANIFEST).write_bytes(b"{}")
    with pytest.raises(StoreError, match=rf"step-99999999/.* is damaged.* {saved} can be read"):
        locate(saved.parent)
    assert locate(saved)[1] == saved.name


def test_a_checkpoint_or_its_runs_folder_can_be_named(saved: Path, tmp_path: Path) -> None:
    for path in (saved, saved.parent):
        store, name = locate(path)
        assert store.read(name, MANIFEST, 10**6) == (saved / MANIFEST).read_bytes()
    assert [s.path for s in all_summaries(saved.parent.parent)] == [str(saved)]
    assert all_summaries(tmp_path / "nowhere") == []


def test_a_file_that_was_thinned_out_while_it_was_read_says_so(saved: Path) -> None:
    store, name = locate(saved)
    (saved / MANIFEST).unlink()
    with pytest.raises(StoreError, match=r"thinned out meanwhile; name another checkpoint"):
        store.read(name, MANIFEST, 10**6)


def test_a_place_without_a_checkpoint_that_can_be_read_says_so(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=r"Cannot read .*loop"):
        locate(tmp_path / "loop")
    (saved / MANIFEST).write_bytes(b"{}")
    (found,) = summaries(saved.parent)
    assert "damaged" in found.error
    for path in (saved.parent, tmp_path):
        with pytest.raises(StoreError, match="There is no checkpoint at"):
            locate(path)


Tensors = dict[str, F32s]

shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    npst.arrays(np.float32, shapes),
    max_size=4,
)
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
META = {"__metadata__": {"format": "skerry"}}


def file_of(tensors: Tensors) -> bytes:
    head = tensorfile.header({name: t.shape for name, t in tensors.items()}, {"format": "skerry"})
    return head + b"".join(bytes(tensorfile.raw(tensor)) for tensor in tensors.values())


def read_file(data: bytes, size: int | None = None) -> Tensors:
    """Read a file whose digest and, by default, size are what the manifest says."""
    sha256 = hashlib.sha256(data).hexdigest()
    expected = StoredFile("f", len(data) if size is None else size, sha256)
    return tensorfile.read(memoryview(bytearray(data)), "somewhere", expected)


def framed(entries: object, body: bytes = b"\0\0\0\0", length: int | None = None) -> bytes:
    """Return a file with these entries, which is whole but for what they say."""
    if isinstance(entries, dict):
        entries = json.dumps(META | entries, separators=(",", ":")).encode()
        entries += b" " * (-len(entries) % 8)
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def same(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(
        one[name].shape == two[name].shape and one[name].tobytes() == two[name].tobytes()
        for name in one
    )


@given(tensors)
@settings(max_examples=100)
def test_what_we_write_we_and_the_library_read(tensors: Tensors) -> None:
    data = file_of(tensors)
    assert same(safetensors.numpy.load(data), tensors)
    assert same(read_file(data), tensors)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_such_file_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="somewhere"):
        read_file(data)


def test_a_whole_file_is_read() -> None:
    assert read_file(framed({"w": ONE})) == {"w": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    "data",
    [
        framed({"w": ONE}, length=2**63),
        framed({"w": ONE}, length=100),
        framed(b"[" * 100_000),
        framed([]),
        framed({"w": []}),
        framed({"w": {**ONE, "dtype": "F16"}}),
        framed({"w": {**ONE, "dtype": "BF16"}}),
        framed({"w": {**ONE, "dtype": []}}),
        framed({"w": ONE, "v": {**ONE, "dtype": "BF16", "data_offsets": [4, 6]}}, b"\0" * 6),
        framed({"w": {**ONE, "shape": [2]}}),
        framed({"w": {**ONE, "shape": [-1]}}),
        framed({"w": {**ONE, "shape": [1] * 100}}),
        framed({"w": {**ONE, "shape": [-1, -1]}}),
        framed({"w": {**ONE, "shape": [1.0], "data_offsets": [0, 4.0]}}),
        framed({"w": ONE, "__metadata__": 7}),
        framed({"w": {**ONE, "shape": [2**60], "data_offsets": [0, 2**62]}}),
        framed({"w": {**ONE, "data_offsets": [-4, 0]}}),
        framed({"w": {**ONE, "data_offsets": ["0", "4"]}}),
        framed({"w": {**ONE, "data_offsets": [4, 8]}}, b"\0" * 8),
        framed({"w": ONE, "twice": ONE}),
        framed({"w": ONE}, b"\0" * 5),
        framed({"w": ONE}, b"\0" * 3),
        b"\0",
        b"",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="somewhere is not as a release of Skerry"):
        read_file(data)


@pytest.mark.parametrize("size", [0, 2**62])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="not what the manifest names"):
        read_file(framed({"w": ONE}), size)


def test_a_file_that_does_not_fit_into_memory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    with (tmp_path / "entry" / "sparse").open("wb") as file:
        file.truncate(2**43)
    least, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**42, most))  # a kernel may promise any amount
    try:
        with pytest.raises(StoreError, match="this machine's memory"):
            LocalStore(tmp_path).read("entry", "sparse", 2**43)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (least, most))
