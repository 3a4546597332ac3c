"""What a checkpoint holds, and that no damage and no forgery goes unseen."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import gather
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import checkpoint as reading
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import (
    PARAMS_FILE,
    dump,
    fragments,
    load,
    outer_file,
    params,
    read_manifest,
    verify,
)
from skerry.store.finding import all_summaries, locate, summaries
from skerry.store.local import LocalStore
from tests.support.checkpoints import begun, flip_bit, save

FILES = (PARAMS_FILE, outer_file(0), MANIFEST)

Values = dict[str, Any]


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
        master = scene.vectors[fragment.index]["master"]
        np.testing.assert_array_equal(gather(fragment, flat), master)
    assert (name, found.step, found.tokens) == ("step-00000009", 9, 90)
    assert (found.versions, found.index) == ((1, 1, 2), 0)
    assert found.config == json.loads(scene.record.config_json)


def test_the_safetensors_library_opens_both_files(saved: Path) -> None:
    names = {leaf.name for leaf in read_manifest(*of(saved)).leaves}
    assert set(safetensors.numpy.load_file(saved / PARAMS_FILE)) == names
    outer = safetensors.numpy.load_file(saved / outer_file(0))
    assert set(outer) == {"0/outer.count", "0/outer.momentum"}


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


@pytest.mark.parametrize(("format_", "release"), [(2, "0.1.0"), (9, "9.1")])
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


def test_a_checkpoint_or_its_runs_folder_can_be_named(saved: Path, tmp_path: Path) -> None:
    for path in (saved, saved.parent):
        store, name = locate(path)
        assert store.read(name, MANIFEST, 10**6) == (saved / MANIFEST).read_bytes()
    assert [s.path for s in all_summaries(saved.parent.parent)] == [str(saved)]
    assert all_summaries(tmp_path / "nowhere") == []


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
