"""What a checkpoint holds, and that no damage to it goes unseen."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import gather
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.log.memory import MemoryBroker
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import fragments, params, read_manifest, verify
from skerry.store.listing import all_summaries, locate, summaries
from skerry.store.local import LocalStore
from skerry.store.manifest import PARAMS_FILE, dump, load, outer_file
from skerry_checkpointer.service import Checkpointer
from tests.support.scripted_run import ScriptedRun


async def begun() -> ScriptedRun:
    return await ScriptedRun.begin(MemoryBroker().connect())


FILES = (PARAMS_FILE, outer_file(0), MANIFEST)


async def test_fragments_read_back_as_they_were_committed(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all(step=7)
    await scene.commit(1, step=9)
    written = await Checkpointer.of(scene.bus, scene.record, store).save()
    assert written is not None
    for saved, vectors in fragments(store, written.name):
        index = saved.commit.fragment
        assert saved.commit == scene.manifests[index].commit
        for name, vector in scene.vectors[index].items():
            np.testing.assert_array_equal(vectors[name], vector, strict=True)


async def test_params_are_the_masters_as_leaves(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all()
    written = await Checkpointer.of(scene.bus, scene.record, store).save()
    assert written is not None
    _, tensors = params(store, written.name)
    flat = [tensors[leaf.name].reshape(-1) for leaf in scene.plan.leaves]
    for fragment in scene.plan.fragments:
        master = scene.vectors[fragment.index]["master"]
        np.testing.assert_array_equal(gather(fragment, flat), master)


async def test_the_manifest_tells_step_tokens_versions_and_config(store: LocalStore) -> None:
    scene = await begun()
    await scene.commit_all(step=7, tokens=70)
    await scene.commit(2, step=9, tokens=90)
    written = await Checkpointer.of(scene.bus, scene.record, store).save()
    assert written is not None
    found = read_manifest(store, written.name)
    assert (written.name, found.step, found.tokens) == ("step-00000009", 9, 90)
    assert (found.versions, found.index) == ((1, 1, 2), 0)
    assert found.config == json.loads(scene.record.config_json)


def test_the_safetensors_library_opens_both_files(saved: Path) -> None:
    names = {leaf.name for leaf in read_manifest(LocalStore(saved.parent), saved.name).leaves}
    assert set(safetensors.numpy.load_file(saved / PARAMS_FILE)) == names
    outer = safetensors.numpy.load_file(saved / outer_file(0))
    assert set(outer) == {"0/outer.count", "0/outer.momentum"}


def test_a_whole_checkpoint_verifies_and_counts_its_bytes(saved: Path) -> None:
    counted: list[int] = []
    checkpoint = verify(LocalStore(saved.parent), saved.name, on_bytes=counted.append)
    assert sum(counted) == checkpoint.size_bytes


@pytest.mark.parametrize("file", FILES)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_is_found_and_the_file_named(
    saved: Path, file: str, position: float, bit: int
) -> None:
    path = saved / file
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(position * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        with pytest.raises(CheckpointCorrupt) as caught:
            verify(LocalStore(saved.parent), saved.name)
    finally:
        path.write_bytes(whole)
    assert caught.value.path == str(path)
    assert file in str(caught.value)


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_found(saved: Path, file: str) -> None:
    path = saved / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match=file):
        verify(LocalStore(saved.parent), saved.name)


def test_a_missing_file_is_named(saved: Path) -> None:
    (saved / outer_file(0)).unlink()
    with pytest.raises(StoreError, match=outer_file(0)):
        verify(LocalStore(saved.parent), saved.name)


def test_tensors_of_another_checkpoint_do_not_match_the_log_digests(saved: Path) -> None:
    """Even a manifest whose file digests were made to fit cannot hide other parameters."""
    store = LocalStore(saved.parent)
    checkpoint = read_manifest(store, saved.name)
    tensors = safetensors.numpy.load_file(saved / PARAMS_FILE)
    forged = {name: np.asarray(t + np.float32(1)) for name, t in tensors.items()}
    body = safetensors.numpy.save(forged)
    draft = store.draft("forged")
    draft.append(PARAMS_FILE, body)
    draft.append(outer_file(0), (saved / outer_file(0)).read_bytes())
    files = draft.seal()
    draft.commit(dump(replace(checkpoint, files=files))[0])
    with pytest.raises(CheckpointCorrupt, match="not what the log held"):
        verify(store, "forged")


def test_a_manifest_reads_back_as_it_was_dumped(saved: Path) -> None:
    checkpoint = read_manifest(LocalStore(saved.parent), saved.name)
    assert load(dump(checkpoint)[0], "manifest") == checkpoint


def test_a_newer_format_says_which_release_reads_it(saved: Path) -> None:
    checkpoint = read_manifest(LocalStore(saved.parent), saved.name)
    newer = replace(checkpoint, format=9, skerry_version="9.1")
    with pytest.raises(StoreError, match=r"use skerry 9\.1"):
        load(dump(newer)[0], "manifest")


def test_a_checkpoint_or_its_runs_folder_can_be_named(saved: Path) -> None:
    for path in (saved, saved.parent):
        store, name = locate(path)
        with closing(store.open(name, MANIFEST)) as file:
            assert file.read() == (saved / MANIFEST).read_bytes()


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
    saved: Path, names: tuple[str, str], older: dict[str, int], newer: dict[str, int]
) -> None:
    told = read_manifest(LocalStore(saved.parent), saved.name)
    for name, changes in zip(names, (older, newer), strict=True):
        folder = saved.parent / name
        folder.mkdir()
        (folder / MANIFEST).write_bytes(dump(replace(told, **changes))[0])  # type: ignore[arg-type]
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
