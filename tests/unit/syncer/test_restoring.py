"""A syncer takes over in the middle: snapshot and contributions give what was there before."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from skerry.algorithm.fragments import Fragment
from skerry.errors import StateLost
from skerry.log import ledger
from skerry.log.memory_stream import MemoryStream
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit, MasterOrigin
from skerry.protocol.parts import DELTA, KEYFRAME, MASTER, newest, snapshot_version
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import ShardStream, Subjects
from skerry.settings.models import OuterConfig
from skerry.store.checkpoint import verify
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from skerry_syncer.following import StandbyFollower
from skerry_syncer.restoring import FragmentVectors, Restorer
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.replay import replay
from tests.support import learners
from tests.support.builders import until
from tests.unit.syncer.driven import RUN, DrivenSyncer

NESTEROV = OuterConfig(preset="nesterov")
OUTERS = [NESTEROV, OuterConfig(preset="direct"), OuterConfig(preset="adamw")]
EVERY = {"keyframe_every": 2, "snapshot_every": 4}


def held(driven: DrivenSyncer, index: int) -> dict[str, Any]:
    """Return all that a syncer knows of a fragment, as bytes."""
    vectors = driven.committer.vectors[index]
    shared = vectors.shared
    return {
        "version": vectors.version,
        "master": vectors.master.tobytes(),
        "outer": {n: v.tobytes() for n, v in driven.outer.leaves(vectors.outer).items()},
        "shared": shared.codes.tobytes() if shared is not None else None,
        "uncovered": vectors.uncovered,
    }


def stream(driven: DrivenSyncer, kind: ShardStream) -> MemoryStream:
    return driven.bus.broker.streams[Subjects(RUN).shard(0).stream(kind)]


ROUNDS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "ab", "abc"]), st.sampled_from("-ac")),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: outer.preset)
@settings(max_examples=12, deadline=None)
@given(rounds=ROUNDS, scheme=st.sampled_from(["int8", "none"]))
def test_snapshot_and_replay_give_what_the_syncer_before_had_bit_for_bit(
    outer: OuterConfig, rounds: list[tuple[int, str, str]], scheme: str
) -> None:
    async def run() -> None:
        alone = outer.preset == "adamw"
        driven = await DrivenSyncer.begin(
            outer=outer, fragments=1 if alone else 2, delta_scheme=scheme, **EVERY
        )
        for index, senders, poisoned in rounds:
            await driven.round(0 if alone else index, senders, poisoned=poisoned)
        before = {index: held(driven, index) for index in driven.committer.vectors}
        await driven.take_over()
        assert {index: held(driven, index) for index in driven.committer.vectors} == before

    asyncio.run(run())


async def test_snapshots_lie_apart_and_come_with_their_keyframe() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, keyframe_every=2, snapshot_every=4)
    found: list[tuple[int, int]] = []
    for _ in range(8):
        manifest = await driven.round(0)
        assert manifest is not None
        keyframe = newest(manifest, KEYFRAME)
        assert keyframe is not None
        found.append((snapshot_version(manifest), keyframe.version))
        assert manifest.commit.master_digest == vector_digest(driven.committer.vectors[0].master)
    assert found == [(1, 2), (1, 2), (4, 4), (4, 4), (4, 6), (4, 6), (8, 8), (8, 8)]


async def test_the_last_commit_of_a_run_stores_all_of_it() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, keyframe_every=2, snapshot_every=4)
    manifest = await driven.round(0, final=True)
    assert manifest is not None
    assert snapshot_version(manifest) == manifest.commit.version == 2


async def test_a_snapshot_comes_before_the_window_drops_what_it_lacks() -> None:
    driven = await DrivenSyncer.begin(
        outer=NESTEROV, window_bytes=16 * 1024, keyframe_every=4, snapshot_every=64
    )
    found, first = list[int](), 0
    for _ in range(24):
        manifest = await driven.round(0)
        assert manifest is not None
        if snapshot_version(manifest) == manifest.commit.version:
            found.append(manifest.commit.version)
        first = next(i.first_seq for i in await driven.bus.streams() if "CONTRIB" in i.name)
        oldest = driven.committer.vectors[0].uncovered
        assert oldest is None or oldest.sequence >= first
    assert first > 10
    assert 2 <= len(found) <= 12


async def test_purged_contribution_makes_a_run_go_on_from_what_learners_hold() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    for _ in range(5):
        await driven.round(0)
    state = driven.committer.vectors[0]
    lost = driven.manifests[0].commit.consumed[-1]
    at_5 = driven.manifests[0].commit.version - 1
    stream(driven, "CONTRIB").drop(lost.sequence_last)
    with capture_logs() as logs:
        loaded = await driven.take_over()
    (warning,) = [entry for entry in logs if entry["event"] == "master_lost"]
    assert (warning["fragment"], warning["version"], warning["replayed"]) == (0, 6, at_5)
    assert f"of learner {lost.learner}" in warning["cause"]
    assert "version 6 of fragment 0" in warning["cause"]
    vectors: FragmentVectors = loaded.vectors[0]
    assert vector_digest(vectors.master) == driven.manifests[0].commit.params_digest
    assert vectors.master.tobytes() != state.master.tobytes()
    manifest = await driven.round(0)
    assert manifest is not None
    commit = manifest.commit
    assert (commit.master_origin, commit.outer_version) == (MasterOrigin.GLOBAL, at_5)
    assert snapshot_version(manifest) == commit.version == 7
    following = await driven.round(0)
    assert following is not None
    assert following.commit.master_origin is None


async def test_another_rounding_is_told_and_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    for _ in range(5):
        await driven.round(0)
    merged = driven.committer.vectors[0]
    stored = driven.bus.broker.streams[Subjects(RUN).stream("LEDGER")].records

    for sequence, record in stored.items():
        if record.subject == Subjects(RUN).commit(0):
            commit = decode(Commit, record.payload, run=RUN)
            if commit.version == 5:
                other = encode(replace(commit, master_digest=1))
                stored[sequence] = replace(record, payload=other)
    with capture_logs() as logs:
        loaded = await driven.take_over()
    (warning,) = [entry for entry in logs if entry["event"] == "replay_differs"]
    assert (warning["fragment"], warning["version"]) == (0, 5)
    np.testing.assert_array_equal(loaded.vectors[0].master, merged.master)
    manifest = await driven.round(0)
    assert manifest is not None
    assert manifest.commit.master_origin is MasterOrigin.REPLAYED
    assert snapshot_version(manifest) == manifest.commit.version


async def test_neither_contribution_nor_keyframe_is_a_loss() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    for _ in range(5):
        await driven.round(0)
    manifest = driven.manifests[0]
    for sequence in list(stream(driven, "CONTRIB").records):
        stream(driven, "CONTRIB").drop(sequence)
    for part in manifest.parts:
        if part.name in {KEYFRAME, DELTA}:
            for chunk in part.chunks:
                stream(driven, "STATE").drop(chunk.sequence)
    with pytest.raises(StateLost, match=r"fragment 0 at version 6: Contribution .* no keyframe"):
        await driven.take_over()


async def test_snapshot_that_is_gone_is_a_loss() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    for _ in range(5):
        await driven.round(0)
    master = newest(driven.manifests[0], MASTER)
    assert master is not None
    stream(driven, "STATE").drop(master.chunks[0].sequence)
    with pytest.raises(StateLost, match="fragment 0 at version 6: the chunk of its 'master'"):
        await driven.take_over()


async def test_stand_by_reads_and_merges_what_is_new_and_no_more() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    sizes = list[int]()
    restorer = Restorer.of(driven.bus, RUN, driven.plan, driven.config.sync, driven.outer)
    restorer.on_bytes = sizes.append
    commits = {}
    for _ in range(6):
        manifest = await driven.round(0)
        assert manifest is not None
        commits[manifest.commit.version] = manifest.commit
        sizes.clear()
        await restorer.restore(manifest, commits)
    assert len(sizes) == 3  # two contributions and a delta
    before = held(driven, 0)
    await driven.take_over(restorer)
    assert held(driven, 0) == before


async def test_syncer_that_serves_keeps_nothing_of_what_others_serve() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    restorer = Restorer.of(driven.bus, RUN, driven.plan, driven.config.sync, driven.outer)
    follower, idle = StandbyFollower(RUN, "other", restorer), asyncio.Event()
    idle.set()
    following = asyncio.create_task(follower.follow(idle.is_set))
    await until(lambda: len(restorer.held) == 2)
    idle.clear()
    for index in (0, 1):
        await driven.round(index)
    await until(lambda: not restorer.held and not restorer.reader.held)
    following.cancel()


async def test_standby_that_begins_to_serve_restores_nothing_more() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    restorer = Restorer.of(driven.bus, RUN, driven.plan, driven.config.sync, driven.outer)
    asked = list[bool]()

    def idle() -> bool:
        """Be idle when a manifest comes, and no more once the commits before it were read."""
        asked.append(len(asked) % 2 == 0)
        return asked[-1]

    following = asyncio.create_task(StandbyFollower(RUN, "other", restorer).follow(idle))
    await until(lambda: len(asked) == 4)  # a manifest of each fragment
    assert not restorer.held
    following.cancel()


async def test_a_round_in_which_nothing_counted_leaves_nothing_to_compare_the_next_with() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    await driven.round(0)
    assert driven.committer.vectors[0].moved is not None
    await driven.round(0, poisoned="ab")
    assert driven.committer.vectors[0].moved is None


async def test_audit_replays_up_to_where_another_master_was_gone_on_from() -> None:
    driven = await DrivenSyncer.begin(outer=NESTEROV, **EVERY)
    for index in (0, 0, 0, 0, 1):
        await driven.round(index)
    lost = driven.manifests[0].commit.consumed[-1]
    kept = stream(driven, "CONTRIB").records[lost.sequence_last]
    stream(driven, "CONTRIB").drop(lost.sequence_last)
    await driven.take_over()
    await driven.round(0)
    stream(driven, "CONTRIB").records[lost.sequence_last] = kept
    report = await replay(RunLog.of(driven.bus, await ledger.read_run(driven.bus, RUN)))
    assert not report.wrong
    assert "Fragment 0 can be replayed from version 6 on" in report.fragments[0].stopped
    assert report.fragments[1].whole


async def test_a_checkpoint_can_be_restored_whatever_learners_sent_as_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = learners.walk

    def filled(fragment: Fragment, *key: object) -> learners.Vector:
        return walk(fragment, *key) + np.float32(1e-3)

    monkeypatch.setattr(learners, "walk", filled)
    driven = await DrivenSyncer.begin(outer=NESTEROV)
    await driven.round(0)
    store, record = LocalStore(tmp_path / RUN), await ledger.read_run(driven.bus, RUN)
    written = await Checkpointer.of(driven.bus, record, store).save()
    assert written is not None
    assert verify(store, written.name).versions == (2, 1)
