"""Which vectors a manifest names, where they lie, and which way a reader takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import Corrupt
from skerry.protocol.messages import ChunkRef, CommitOrigin, Manifest, Part
from skerry.protocol.parts import (
    DELTA,
    KEYFRAME,
    MASTER,
    MOST_DELTA_CHUNKS,
    is_due,
    is_snapshot_due,
    kept,
    kind_of,
    newest,
    path,
    slot,
)
from skerry.protocol.records import encode
from tests.support.builders import commit, part

MOMENTUM = "outer.momentum"


def history(
    every: int,
    versions: int,
    *,
    lost: frozenset[int] = frozenset(),
    snapshots: int = 1,
    chunks: int = 1,
) -> list[Manifest]:
    """Return the manifests of a run, in which the syncer finds no keyframe before ``lost`` ones.

    Deltas have ``chunks``, those of every other version twice as many.
    """
    found: list[Manifest] = []
    for version in range(1, versions + 1):
        previous = found[-1] if found else None
        names = [MASTER, MOMENTUM] if is_due(0, version, previous, MASTER, snapshots) else []
        delta = previous is not None and version not in lost
        names += [DELTA] * delta
        if not delta or is_due(0, version, previous, KEYFRAME, every):
            names.append(KEYFRAME)
        fresh = [
            part(
                name,
                *[ChunkRef(version, 1000 if name == KEYFRAME else 250, 0)]
                * (chunks * (1 + version % 2) if name == DELTA and chunks > 1 else 1),
                version=version,
                slot=slot(name, version, previous, every),
            )
            for name in names
        ]
        found.append(Manifest(commit(version), kept(previous, fresh, every)))
    return found


def places(manifest: Manifest) -> set[tuple[str, int]]:
    return {(kind_of(part.name), part.slot) for part in manifest.parts}


def leads_to(manifest: Manifest, held: int | None) -> list[Part]:
    """Return the way, after checking that it leads from what is held to the manifest's version."""
    way = list(path(manifest, held))
    at = held
    for step in way:
        assert step.name == KEYFRAME or step.version == (at or 0) + 1
        at = step.version
    assert at == manifest.commit.version
    return way


@given(st.integers(1, 9), st.integers(1, 40), st.frozensets(st.integers(2, 40), max_size=3))
def test_every_reader_finds_a_way_from_any_version(
    every: int, versions: int, lost: frozenset[int]
) -> None:
    newest_one = history(every, versions, lost=lost)[-1]
    for held in (None, *range(1, versions + 1)):
        leads_to(newest_one, held)


@given(
    st.integers(1, 9),
    st.integers(2, 40),
    st.frozensets(st.integers(2, 40), max_size=3),
    st.integers(1, 3),
)
def test_a_commit_writes_nothing_that_a_reader_of_the_manifest_before_reads(
    every: int, versions: int, lost: frozenset[int], times: int
) -> None:
    manifests = history(every, versions, lost=lost, snapshots=every * times)
    for before, after in pairwise(manifests):
        fresh = {
            (kind_of(p.name), p.slot) for p in after.parts if p.version == after.commit.version
        }
        assert not fresh & places(before)


@pytest.mark.parametrize(("every", "chunks"), [(256, 200), (16, 1000), (16, 4500), (16, 8000)])
def test_a_manifest_has_room_in_a_record_however_long_its_deltas_are(
    every: int, chunks: int
) -> None:
    manifests = history(every, every + 3, snapshots=16, chunks=chunks)
    for before, after in pairwise(manifests):
        deltas = [p for p in after.parts if p.name == DELTA]
        assert sum(len(p.chunks) for p in deltas) <= MOST_DELTA_CHUNKS
        assert deltas[-1].version == after.commit.version
        for held in (None, before.commit.version):
            leads_to(after, held)
    assert encode(manifests[-1])


def test_a_learner_in_step_reads_the_delta_also_where_there_is_a_keyframe() -> None:
    manifest = history(4, 8)[-1]
    assert [p.name for p in leads_to(manifest, 7)] == [DELTA]
    assert [p.name for p in leads_to(manifest, None)] == [KEYFRAME]
    assert leads_to(manifest, 8) == []


@pytest.mark.parametrize(("held", "names"), [(4, [DELTA] * 3), (3, [DELTA] * 4), (2, [KEYFRAME])])
def test_a_learner_behind_takes_the_way_of_fewer_bytes(held: int, names: list[str]) -> None:
    manifest = history(16, 7)[-1]
    frame = part(KEYFRAME, ChunkRef(7, 1100, 0), version=7)
    both = Manifest(manifest.commit, (*(p for p in manifest.parts if p.name != KEYFRAME), frame))
    assert [p.name for p in leads_to(both, held)] == names


def test_a_manifest_names_the_newest_keyframe_and_the_deltas_of_the_last_versions() -> None:
    manifest = history(4, 11)[-1]
    assert [p.version for p in manifest.parts if p.name == DELTA] == [8, 9, 10, 11]
    assert [p.version for p in manifest.parts if p.name == KEYFRAME] == [8]
    held = newest(manifest, MASTER)
    assert held is not None
    assert held.version == 11


@pytest.mark.parametrize("held", [None, 1, 3, 9, 2**60])
def test_a_manifest_without_a_way_is_refused(held: int | None) -> None:
    deltas = tuple(part(DELTA, version=version) for version in (3, 5))
    with pytest.raises(Corrupt, match="no keyframe from which its deltas lead to version 5"):
        path(Manifest(commit(5), deltas), held)


def test_a_manifest_names_the_newest_snapshot_whole_until_the_next_one() -> None:
    manifests = history(4, 17, snapshots=8)
    for manifest in manifests:
        held = [p for p in manifest.parts if kind_of(p.name) == "snapshot"]
        assert sorted(p.name for p in held) == [MASTER, MOMENTUM]
        assert {p.version for p in held} == {max(1, manifest.commit.version // 8 * 8)}


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 99))
def test_fragments_take_turns_those_of_a_shard_too(
    fragments: int, shards: int, version: int
) -> None:
    every = 16
    held = history(1, 1)[0]
    due = [f for f in range(fragments) if is_due(f, version, held, KEYFRAME, every)]
    assert fragments // every <= len(due) <= -(-fragments // every)
    for shard in range(shards):
        of_it = len(range(shard, fragments, shards))
        assert sum(f % shards == shard for f in due) <= -(-of_it // every) + 1


ROUND = CommitOrigin.ROUND


@pytest.mark.parametrize(
    ("version", "origin", "final", "uncovered", "due"),
    [
        (16, ROUND, False, 0.0, True),
        (17, ROUND, False, 0.0, False),
        (17, ROUND, False, 0.51, True),
        (17, ROUND, True, 0.0, True),
        (17, CommitOrigin.RESTORED, False, 0.0, True),
        (17, CommitOrigin.REPLACED, False, 0.0, True),
    ],
)
def test_a_snapshot_is_due_at_its_turn_where_no_round_commits_and_before_the_window_drops_any(
    version: int, origin: CommitOrigin, final: bool, uncovered: float, due: bool
) -> None:
    previous = history(16, 16)[-1]
    made = commit(version, origin=origin, final=final)
    assert is_snapshot_due(made, previous, 16, uncovered) is due
    assert is_snapshot_due(made, None, 16, 0.0)
