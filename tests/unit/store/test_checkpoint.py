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
from skerry.protocol.messages import CloseReason, CommitOrigin, RefusalCause, why
from skerry.store import checkpoint as reading
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import fragments, params, read_manifest, verify
from skerry.store.listing import all_summaries, locate, summaries
from skerry.store.local import LocalStore
from skerry.store.manifest import PARAMS_FILE, _trailer, dump, load, outer_file
from tests.support.checkpoints import begun, flip_bit, save

FILES = (PARAMS_FILE, outer_file(0), MANIFEST)
EARLIER = Path(__file__).parents[2] / "golden" / "checkpoint-0.1"

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


async def test_fragments_read_back_as_they_were_committed(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all(step=7)
    await scene.commit(1, step=9)
    for kept, vectors in fragments(store, await save(scene, store)):
        index = kept.commit.fragment
        assert kept.commit == scene.manifests[index].commit
        for name, vector in scene.vectors[index].items():
            np.testing.assert_array_equal(vectors[name], vector, strict=True)


async def test_params_are_the_masters_as_leaves(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all()
    _, tensors = params(store, await save(scene, store))
    flat = [tensors[leaf.name].reshape(-1) for leaf in scene.plan.leaves]
    for fragment in scene.plan.fragments:
        master = scene.vectors[fragment.index]["master"]
        np.testing.assert_array_equal(gather(fragment, flat), master)


async def test_the_manifest_has_step_tokens_versions_and_config(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all(step=7, tokens=70)
    await scene.commit(2, step=9, tokens=90)
    name = await save(scene, store)
    found = read_manifest(store, name)
    assert (name, found.step, found.tokens) == ("step-00000009", 9, 90)
    assert (found.versions, found.index) == ((1, 1, 2), 0)
    assert found.config == json.loads(scene.record.config_json)


def test_the_safetensors_library_opens_both_files(saved: Path) -> None:
    names = {leaf.name for leaf in read_manifest(*of(saved)).leaves}
    assert set(safetensors.numpy.load_file(saved / PARAMS_FILE)) == names
    outer = safetensors.numpy.load_file(saved / outer_file(0))
    assert set(outer) == {"0/outer.count", "0/outer.momentum"}


def test_a_whole_checkpoint_verifies_and_counts_its_bytes(saved: Path) -> None:
    counted: list[int] = []
    checkpoint = verify(*of(saved), on_bytes=counted.append)
    assert sum(counted) == checkpoint.size_bytes


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
    tensors = safetensors.numpy.load_file(saved / PARAMS_FILE)
    forged = {name: np.asarray(t + np.float32(1)) for name, t in tensors.items()}
    draft = store.draft("forged")
    files = (
        draft.write(PARAMS_FILE, [safetensors.numpy.save(forged)]),
        draft.write(outer_file(0), [(saved / outer_file(0)).read_bytes()]),
    )
    draft.commit(dump(replace(read_manifest(*of(saved)), files=files))[0])
    with pytest.raises(CheckpointCorrupt, match="not what the log held"):
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


def test_a_manifest_reads_back_as_it_was_dumped(saved: Path) -> None:
    checkpoint = read_manifest(*of(saved))
    assert load(dump(checkpoint)[0], "manifest") == checkpoint


def test_a_newer_format_says_which_release_reads_it(saved: Path) -> None:
    newer = replace(read_manifest(*of(saved)), format=9, skerry_version="9.1")
    with pytest.raises(StoreError, match=r"use skerry 9\.1"):
        load(dump(newer)[0], "manifest")


def test_a_checkpoint_or_its_runs_folder_can_be_named(saved: Path) -> None:
    for path in (saved, saved.parent):
        store, name = locate(path)
        assert store.read(name, MANIFEST, 10**6) == (saved / MANIFEST).read_bytes()


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


def test_a_folder_without_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no checkpoint at"):
        locate(tmp_path)


def test_a_link_that_leads_nowhere_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StoreError, match=r"Cannot read .*loop"):
        locate(tmp_path / "loop")


def test_a_damaged_checkpoint_is_listed_with_what_is_wrong(saved: Path) -> None:
    (saved / MANIFEST).write_bytes(b"{}")
    (found,) = summaries(saved.parent)
    assert "damaged" in found.error
    with pytest.raises(StoreError, match="There is no checkpoint"):
        locate(saved.parent)


def test_all_runs_below_a_path_are_listed(saved: Path, tmp_path: Path) -> None:
    assert [s.path for s in all_summaries(saved.parent.parent)] == [str(saved)]
    assert all_summaries(tmp_path / "nowhere") == []


def test_a_checkpoint_of_0_1_is_read_with_its_reasons_as_enums() -> None:
    checkpoint = verify(LocalStore(EARLIER), "step-00000024")
    merged, restored, empty = (saved.commit for saved in checkpoint.state)

    assert (checkpoint.format, checkpoint.skerry_version) == (2, "0.1.0")
    assert (merged.origin, merged.reason) == (CommitOrigin.ROUND, CloseReason.GRACE_OVER)
    assert merged.consumed[0].arrived_ns == 7
    assert (restored.origin, restored.reason) == (CommitOrigin.RESTORED, None)
    assert restored.source == "s3://bucket/old/step-00000012"
    assert (empty.reason, empty.final) == (CloseReason.NOTHING_COUNTS, True)
    causes = [RefusalCause.TOO_STALE, RefusalCause.GENESIS, RefusalCause.INCOMPLETE]
    assert [refused.cause for refused in empty.refused] == causes


@pytest.mark.parametrize(
    ("reason", "origin", "shown"),
    [
        ("genesis", CommitOrigin.GENESIS, "genesis"),
        ("all_arrived", CommitOrigin.ROUND, "all_arrived"),
        ("a word of another release", CommitOrigin.ROUND, "round"),
        ("restored from s3://b/at version/1", CommitOrigin.RESTORED, None),
        ("restored from /c/step-1 at version 12", CommitOrigin.REPLACED, None),
    ],
)
def test_reasons_of_0_1_become_an_origin(
    reason: str, origin: CommitOrigin, shown: str | None
) -> None:
    values = json.loads((EARLIER / "step-00000024" / "manifest.json").read_bytes())
    values["state"][0]["commit"]["reason"] = reason
    values["state"][0]["commit"]["refused"] = [{"cause": "of another release", "learner": "a"}]
    body = json.dumps({k: v for k, v in values.items() if k != "digest"}).removesuffix("}")
    commit = load(signed(body.encode()), "there").state[0].commit

    assert (commit.origin, why(commit), commit.refused) == (origin, shown or reason, ())


def test_a_checkpoint_of_0_1_that_makes_no_sense_is_corrupt() -> None:
    with pytest.raises(CheckpointCorrupt):
        load(signed(b'{"format": 2, "state": [{"commit": {"reason": 5}}]'), "there")


def signed(body: bytes) -> bytes:
    """Return a manifest with its digest."""
    return body + _trailer(hashlib.sha256(body).hexdigest())
