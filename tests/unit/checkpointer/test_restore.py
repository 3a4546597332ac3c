"""Starting a run from a checkpoint, and putting one back in its own log."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry.errors import (
    BrokerUnavailable,
    CheckpointCorrupt,
    ConfigError,
    Fenced,
    RunMismatch,
    StoreError,
)
from skerry.log import ledger, state
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import StateWriter
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import (
    Commit,
    LearnerProgress,
    Manifest,
    MasterOrigin,
    RunState,
    Unnamed,
    why,
)
from skerry.protocol.records import plan_of
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.store.checkpoint import PARAMS_FILE, dump, read_manifest
from skerry.store.local import LocalStore
from skerry_checkpointer.restore import Replaced, restore
from skerry_tools.audit.verify import verify as audit
from tests.support.checkpoints import (
    assert_log_holds,
    begun,
    dying_at_the_second,
    flip_bit,
    pulsing,
    save,
)
from tests.support.log import newest_parts
from tests.support.scripted_run import ScriptedRun

Scene = tuple[ScriptedRun, MemoryBus, Path]

put_back = partial(restore, put_back=True)
both_ways = pytest.mark.parametrize("way", [restore, put_back])


def memory(scripted: ScriptedRun) -> MemoryBus:
    assert isinstance(scripted.bus, MemoryBus)
    return scripted.bus


def rolled_back(scripted: ScriptedRun) -> MemoryBus:
    """What the broker's store holds now, on a broker of its own."""
    return MemoryBus(copy.deepcopy(memory(scripted).broker))


def lose(bus: MemoryBus, subject: str) -> None:
    """Delete what the log keeps of the state on every subject that begins like this."""
    subject = f"skerry.run.{subject}"
    for stream in [s for name, s in bus.broker.streams.items() if "_STATE_" in name]:
        for at in [s for name, s in stream.newest.items() if name.startswith(subject)]:
            stream.drop(at)


async def assert_holds(bus: MemoryBus, run: str, saved: Path) -> None:
    await assert_log_holds(bus, run, LocalStore(saved.parent), saved.name)


@pytest.fixture
def empty() -> MemoryBus:
    return MemoryBroker().connect()


@pytest.fixture
async def again(empty: MemoryBus, saved: Path) -> MemoryBus:
    """A log into which the checkpoint was restored as run ``again``."""
    await restore(empty, saved, "again")
    return empty


class TestANewRun:
    async def test_every_vector_version_and_digest_is_in_the_new_log(
        self, again: MemoryBus, saved: Path
    ) -> None:
        await assert_holds(again, "again", saved)
        after = await ledger.last_commits(again, "again")
        for kept in read_manifest(LocalStore(saved.parent), saved.name).state:
            commit = after[kept.commit.fragment]
            assert commit.version == kept.commit.version
            assert commit.params_digest == kept.commit.params_digest
            assert commit.master_digest == kept.commit.master_digest
        assert (await audit(again, "again")).violations == ()

    async def test_the_run_is_open_and_says_where_it_comes_from(
        self, again: MemoryBus, saved: Path
    ) -> None:
        record = await ledger.read_run(again, "again")
        assert (record.state, record.restored_from) == (RunState.OPEN, str(saved))
        commits = await ledger.last_commits(again, "again")
        assert {why(commit) for commit in commits.values()} == {f"restored from {saved}"}

    async def test_data_cursors_stay_and_contributions_are_numbered_from_1_again(
        self, again: MemoryBus
    ) -> None:
        commit = (await ledger.last_commits(again, "again"))[0]
        assert commit.progress == (LearnerProgress("a", 0, 0, 70, 21),)
        assert (commit.contrib_floor, commit.step, commit.consumed) == (0, 7, ())

    async def test_what_became_of_contributions_stays_in_the_log_where_they_lie(
        self, store: LocalStore, empty: MemoryBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        draft = ScriptedRun._draft

        def troubled(self: ScriptedRun, *about: int) -> Commit:
            origin, unnamed = MasterOrigin.GLOBAL, (Unnamed("a", 3),)
            made = draft(self, *about)
            return replace(made, unnamed=unnamed, master_origin=origin, outer_version=1, merge_s=2)

        monkeypatch.setattr(ScriptedRun, "_draft", troubled)
        scripted = await begun()
        await scripted.commit_all()
        await restore(empty, store.root / await save(scripted, store), "again")
        for commit in (await ledger.last_commits(empty, "again")).values():
            assert (commit.unnamed, commit.consumed, commit.merge_s) == ((), (), 0.0)
            assert (commit.master_origin, commit.outer_version) == (None, 0)

    async def test_the_next_commit_goes_on_from_the_restored_version(
        self, again: MemoryBus
    ) -> None:
        record = await ledger.read_run(again, "again")
        cut = plan_of(record)
        writer = await StateWriter.acquire(again, "again", cut, holder="syncer", now_ns=2)
        scripted = ScriptedRun(again, record, cut, [writer], manifests=await writer.recover())
        assert (await scripted.commit(1, step=8)).commit.version == 2

    async def test_a_learner_keeps_its_data_shard(
        self, store: LocalStore, empty: MemoryBus
    ) -> None:
        scripted = await begun()
        for name in ("a", "b"):
            await ledger.join(scripted.bus, "run", name, "host", time.time_ns())
        await scripted.commit_all()
        await restore(empty, store.root / await save(scripted, store), "again")
        joined = await ledger.join(empty, "again", "b", "host", time.time_ns())
        assert (joined.shard, joined.incarnation) == (1, 1)

    async def test_every_shard_is_written_under_its_own_fence(
        self, store: LocalStore, empty: MemoryBus
    ) -> None:
        scripted = await begun(sync={"lease_s": 0.05, "shards": 2, "fragments": 3})
        await scripted.commit_all()
        await restore(empty, store.root / await save(scripted, store), "again")
        commits = await ledger.last_commits(empty, "again")
        fences = [await empty.last(Subjects("again").shard(shard).fence()) for shard in range(2)]
        tokens = [fence.sequence for fence in fences if fence is not None]
        assert [commits[f].fence for f in range(3)] == [tokens[0], tokens[1], tokens[0]]

    async def test_a_damaged_checkpoint_writes_nothing(self, saved: Path, empty: MemoryBus) -> None:
        flip_bit(saved / PARAMS_FILE, -1)
        with pytest.raises(CheckpointCorrupt, match=PARAMS_FILE):
            await restore(empty, saved, "again")
        assert await empty.streams() == []

    async def test_an_interrupted_restore_is_started_again(
        self, saved: Path, empty: MemoryBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(StateWriter, "commit", dying_at_the_second())
            with pytest.raises(BrokerUnavailable):
                await restore(empty, saved, "again")
        assert len(await ledger.last_commits(empty, "again")) == 1
        assert len(await restore(empty, saved, "again")) == 2
        await assert_holds(empty, "again", saved)

    async def test_what_another_restore_wrote_meanwhile_is_not_written_over(
        self, saved: Path, empty: MemoryBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other one commits fragment 0 when we have looked and not taken the fence yet."""
        acquire = StateWriter.acquire
        others: list[Manifest] = []

        async def after_the_other(*given: Any, **named: Any) -> StateWriter:
            with monkeypatch.context() as patch:
                patch.setattr(StateWriter, "acquire", acquire)
                patch.setattr(StateWriter, "commit", dying_at_the_second(others))
                if not others:
                    with pytest.raises(BrokerUnavailable):
                        await restore(empty, saved, "again")
            return await acquire(*given, **named)

        monkeypatch.setattr(StateWriter, "acquire", after_the_other)
        await restore(empty, saved, "again")
        cut = plan_of(await ledger.read_run(empty, "again"))
        assert (await state.read_manifests(empty, "again", cut))[0] == others[0]
        assert len(await ledger.last_commits(empty, "again")) == 3
        assert (await audit(empty, "again")).violations == ()

    async def test_state_of_another_checkpoint_is_not_overwritten(
        self, saved: Path, empty: MemoryBus
    ) -> None:
        scripted = await ScriptedRun.begin(empty, "again")
        await scripted.commit_all()
        await scripted.commit(1)
        empty.broker.streams["SKERRY_again_LEDGER"].newest.clear()
        with pytest.raises(RunMismatch, match="already has state"):
            await restore(empty, saved, "again")

    async def test_how_long_it_goes_on_can_be_set(self, saved: Path, empty: MemoryBus) -> None:
        await restore(empty, saved, "again", sets=["train.steps=5000", "log.replicas=3"])
        record = await ledger.read_run(empty, "again")
        config = RunConfig.model_validate_json(record.config_json)
        assert (config.train.steps, config.log.replicas) == (5000, 3)

    async def test_a_config_without_a_table_has_its_defaults(
        self, saved: Path, empty: MemoryBus
    ) -> None:
        store = LocalStore(saved.parent)
        bare = replace(read_manifest(store, saved.name), config={"sync": {"lease_s": 0.05}})
        (saved / "manifest.json").write_bytes(dump(bare)[0])
        await restore(empty, saved, "again", sets=["train.steps=9"])
        record = await ledger.read_run(empty, "again")
        assert RunConfig.model_validate_json(record.config_json).train.steps == 9

    @pytest.mark.parametrize("assignment", ["train.lr=1", "model.layers=3", "sync.fragments=2"])
    async def test_what_a_checkpoint_fixes_cannot_be_set(
        self, saved: Path, empty: MemoryBus, assignment: str
    ) -> None:
        with pytest.raises(
            ConfigError, match=r"only train\.steps, train\.duration_s, train\.tokens, log\.replicas"
        ):
            await restore(empty, saved, "again", sets=[assignment])

    async def test_another_id_beside_the_run_itself_is_fine(self, store: LocalStore) -> None:
        scripted = await begun()
        await scripted.commit_all(step=5)
        saved = store.root / await save(scripted, store)
        await restore(scripted.bus, saved, "beside")
        await scripted.commit(0)
        assert (await ledger.last_commits(scripted.bus, "run"))[0].version == 2


class TestARolledBackStore:
    """The broker holds version 1 of every fragment, the checkpoint version 2 or 3."""

    @pytest.fixture
    async def scene(self, store: LocalStore) -> Scene:
        scripted = await begun()
        for name in ("a", "b"):
            await ledger.join(scripted.bus, "run", name, "host", 1)
        await scripted.commit_all(step=1, tokens=10)
        older = rolled_back(scripted)
        await ledger.join(scripted.bus, "run", "a", "host", 2)
        await ledger.join(scripted.bus, "run", "c", "host", 2)
        await scripted.commit_all(step=2, tokens=20)
        await scripted.commit(1, step=3, tokens=30)
        return scripted, older, store.root / await save(scripted, store)

    async def test_a_run_that_exists_is_refused_with_the_versions_of_both_and_the_fix(
        self, scene: Scene
    ) -> None:
        _, older, saved = scene
        sentence = r"version 1, the checkpoint 2-3.* under another --run.*--replace"
        with pytest.raises(RunMismatch, match=sentence):
            await restore(older, saved, "run")

    async def test_put_back_it_holds_what_the_checkpoint_holds_at_once(self, scene: Scene) -> None:
        _, older, saved = scene
        changes = await put_back(older, saved, "run")
        assert changes == [Replaced(0, 1, 2, 2), Replaced(1, 1, 2, 3), Replaced(2, 1, 2, 2)]
        await assert_holds(older, "run", saved)
        assert await put_back(older, saved, "run") == []

    async def test_versions_stay_contiguous_and_the_record_is_honest(self, scene: Scene) -> None:
        _, older, saved = scene
        await put_back(older, saved, "run")
        commit = (await ledger.last_commits(older, "run"))[1]
        assert (commit.version, why(commit)) == (2, f"restored from {saved} at version 3")
        assert commit.step == 3
        found = (await audit(older, "run")).violations  # the script invents what lies before
        assert [violation for violation in found if violation.version > 1] == []

    async def test_no_cursor_moves_back_and_no_start_is_numbered_twice(self, scene: Scene) -> None:
        _, older, saved = scene
        await put_back(older, saved, "run")
        (row,) = (await ledger.last_commits(older, "run"))[1].progress
        assert (row.learner, row.tokens, row.cursor) == ("a", 30, 9)
        again = await ledger.join(older, "run", "a", "host", 3)
        assert again.incarnation > row.incarnation
        assert (await ledger.join(older, "run", "c", "host", 3)).shard == 2

    async def test_a_frozen_syncer_is_fenced_off(self, scene: Scene) -> None:
        scripted, older, saved = scene
        writer = replace(scripted.writer, bus=older)
        frozen = ScriptedRun(older, scripted.record, scripted.plan, [writer])
        await put_back(older, saved, "run")
        with pytest.raises(Fenced):
            await frozen.commit(0)

    async def test_a_syncer_that_starts_meanwhile_is_named(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scripted, older, saved = scene
        whole = StateWriter.commit

        async def overtaken(self: StateWriter, *given: object) -> object:
            await StateWriter.acquire(older, "run", scripted.plan, holder="s", now_ns=9)
            return await whole(self, *given)  # type: ignore[arg-type]  # as it was called

        monkeypatch.setattr(StateWriter, "commit", overtaken)
        with pytest.raises(RunMismatch, match=r"'run'.* has started meanwhile .* the same command"):
            await put_back(older, saved, "run")
        monkeypatch.undo()
        assert await put_back(older, saved, "run")

    async def test_an_interrupted_one_goes_on_when_started_again(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, older, saved = scene
        with monkeypatch.context() as patch:
            patch.setattr(StateWriter, "commit", dying_at_the_second())
            with pytest.raises(BrokerUnavailable):
                await put_back(older, saved, "run")
        changes = await put_back(older, saved, "run")
        assert [change.fragment for change in changes] == [1, 2]
        await assert_holds(older, "run", saved)

    async def test_a_log_that_is_newer_than_the_checkpoint_is_refused(self, scene: Scene) -> None:
        scripted, _, saved = scene
        await scripted.commit(2)
        with pytest.raises(RunMismatch, match="fragment 2 at version 3"):
            await put_back(scripted.bus, saved, "run")
        assert scripted.manifests == await state.read_manifests(scripted.bus, "run", scripted.plan)

    async def test_another_runs_checkpoint_is_refused(self, scene: Scene, tmp_path: Path) -> None:
        other = await begun()
        await other.commit_all()
        foreign = tmp_path / await save(other, LocalStore(tmp_path))
        with pytest.raises(RunMismatch, match="not a checkpoint of run 'run'"):
            await put_back(scene[1], foreign, "run")

    async def test_a_data_shard_that_got_another_owner_is_refused(self, scene: Scene) -> None:
        _, older, saved = scene
        await ledger.join(older, "run", "newcomer", "host", 3)
        with pytest.raises(RunMismatch, match="Data shard 2 belongs to 'newcomer'"):
            await put_back(older, saved, "run")


class TestALogThatLostAPart:
    """The ledger stands at version 3 of fragment 1; the checkpoint is older."""

    @pytest.fixture
    async def scene(self, store: LocalStore) -> Scene:
        scripted = await begun(sync={"lease_s": 0.05, "shards": 2, "fragments": 3})
        await ledger.join(scripted.bus, "run", "a", "host", 1)
        await scripted.commit_all(step=1, tokens=10)
        saved = store.root / await save(scripted, store)
        await scripted.commit(1, step=2, tokens=20)
        await scripted.commit(1, step=3, tokens=30)
        return scripted, memory(scripted), saved

    @pytest.mark.parametrize("gone", ["state.1.1.manifest", "state.1.1.keyframe.", "state.1.1."])
    async def test_what_is_lost_is_written_as_the_next_version_with_its_progress(
        self, scene: Scene, gone: str
    ) -> None:
        _, bus, saved = scene
        lose(bus, gone)
        assert await put_back(bus, saved, "run") == [Replaced(1, 3, 4, 1)]
        await assert_holds(bus, "run", saved)
        commit = (await ledger.last_commits(bus, "run"))[1]
        (row,) = commit.progress
        assert (row.tokens, row.cursor, commit.step, commit.contrib_floor) == (30, 9, 3, 17)
        for shard in range(2):  # the fence of every shard is taken
            record = await bus.last(Subjects("run").shard(shard).fence())
            assert record is not None
            assert b"restore" in record.payload

    async def test_newer_fragments_that_are_whole_stay(self, scene: Scene) -> None:
        scripted, bus, saved = scene
        await scripted.commit(2)
        lose(bus, "state.0.0.")
        changes = await put_back(bus, saved, "run")
        assert [change.fragment for change in changes] == [0]
        found = await state.read_manifests(bus, "run", scripted.plan)
        assert [found[f] for f in (1, 2)] == [scripted.manifests[f] for f in (1, 2)]

    async def test_an_older_version_that_is_newer_than_the_checkpoint_asks_for_a_newer_one(
        self, scene: Scene
    ) -> None:
        """STATE alone was rolled back: version 2 can be read, 3 is in the ledger."""
        scripted, bus, saved = scene
        older = rolled_back(scripted).broker.streams["SKERRY_run_STATE_1"]
        await scripted.commit(1)
        bus.broker.streams["SKERRY_run_STATE_1"] = older
        with pytest.raises(RunMismatch, match="use a newer checkpoint"):
            await put_back(bus, saved, "run")


class TestOlderSnapshots:
    """The checkpoint has version 3 of fragment 1 as learners read it, and its snapshot of 1."""

    @pytest.fixture
    async def scene(self, store: LocalStore) -> Scene:
        scripted = await begun()
        await scripted.commit_all(step=1, tokens=10)
        older = rolled_back(scripted)
        for number in (2, 3):
            await scripted.commit(1, step=number, tokens=10 * number, whole=False)
        return scripted, older, store.root / await save(scripted, store)

    async def vectors(self, bus: MemoryBus, run: str, index: int) -> dict[str, Any]:
        cut = plan_of(await ledger.read_run(bus, run))
        names = ["keyframe", "master", "outer.momentum"]
        return dict((await newest_parts(bus, run, cut, index, names))[1])

    async def test_a_run_goes_on_from_what_learners_had_last(
        self, scene: Scene, empty: MemoryBus
    ) -> None:
        scripted, _, saved = scene
        await restore(empty, saved, "again")
        commits = await ledger.last_commits(empty, "again")
        assert [commits[f].version for f in range(3)] == [1, 3, 1]
        assert (commits[1].progress[0].tokens, commits[1].step) == (30, 3)
        held = await self.vectors(empty, "again", 1)
        read, _ = await newest_parts(memory(scripted), "run", scripted.plan, 1, [])
        assert vector_digest(held["master"]) == read.commit.params_digest
        assert vector_digest(held["keyframe"]) == read.commit.params_digest
        momentum = scripted.vectors[1]["outer.momentum"]
        np.testing.assert_array_equal(held["outer.momentum"], momentum)
        assert (await audit(empty, "again")).violations == ()

    async def test_it_goes_back_to_the_snapshot_exactly(
        self, scene: Scene, empty: MemoryBus
    ) -> None:
        scripted, _, saved = scene
        await restore(empty, saved, "again", exact=True)
        commits = await ledger.last_commits(empty, "again")
        assert [commits[f].version for f in range(3)] == [1, 1, 1]
        assert (commits[1].progress[0].tokens, commits[1].step) == (10, 1)
        held = await self.vectors(empty, "again", 1)
        np.testing.assert_array_equal(held["master"], scripted.vectors[1]["master"])
        assert (await audit(empty, "again")).violations == ()

    @pytest.mark.parametrize("exact", [False, True])
    async def test_an_interrupted_restore_goes_on(
        self, scene: Scene, empty: MemoryBus, exact: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = scene[2]
        with monkeypatch.context() as patch:
            patch.setattr(StateWriter, "commit", dying_at_the_second())
            with pytest.raises(BrokerUnavailable):
                await restore(empty, saved, "again", exact=exact)
        changes = await restore(empty, saved, "again", exact=exact)
        assert [change.fragment for change in changes] == [1, 2]

    async def test_what_was_rolled_back_is_put_back_once(self, scene: Scene) -> None:
        _, older, saved = scene
        assert await put_back(older, saved, "run") == [Replaced(1, 1, 2, 3)]
        assert await put_back(older, saved, "run") == []
        assert (await ledger.last_commits(older, "run"))[1].source_version == 3

    async def test_a_log_that_holds_the_checkpoint_is_left_alone(self, scene: Scene) -> None:
        scripted, _, saved = scene
        assert await put_back(scripted.bus, saved, "run") == []
        assert scripted.manifests == await state.read_manifests(scripted.bus, "run", scripted.plan)

    async def test_a_fragment_whose_snapshot_is_gone_is_lost(self, scene: Scene) -> None:
        scripted, _, saved = scene
        lose(memory(scripted), "state.0.1.snapshot.")
        assert await put_back(scripted.bus, saved, "run") == [Replaced(1, 3, 4, 3)]

    async def test_no_run_goes_on_from_what_has_no_snapshots(
        self, scene: Scene, empty: MemoryBus
    ) -> None:
        saved = scene[2]
        store = LocalStore(saved.parent)
        held = read_manifest(store, saved.name)
        bare = replace(held, state=tuple(replace(s, snapshot=None) for s in held.state))
        (saved / "manifest.json").write_bytes(dump(bare)[0])
        with pytest.raises(StoreError, match="holds a moving average, from which no run goes on"):
            await restore(empty, saved, "again")
        assert await empty.streams() == []


class TestALiveRun:
    @both_ways
    async def test_what_is_alive_is_named(self, store: LocalStore, way: partial[Any]) -> None:
        scripted = await begun(sync={"lease_s": 0.5})
        await scripted.commit_all()
        saved = store.root / await save(scripted, store)
        async with pulsing(scripted.bus, "run"):
            with pytest.raises(RunMismatch, match=r"alive: syncer s .*another --run"):
                await way(scripted.bus, saved, "run")

    @both_ways
    async def test_what_works_on_a_run_whose_log_is_gone_is_named(
        self, saved: Path, empty: MemoryBus, way: partial[Any]
    ) -> None:
        """The broker lost its disk and all else goes on: in the empty one it pulses at once."""
        pulses = Subjects("again").stream("PULSE")
        await empty.declare([spec for spec in specs("again") if spec.name == pulses])
        async with pulsing(empty, "again"):
            with pytest.raises(RunMismatch, match=r"'again' is alive: syncer s .*Stop all of it"):
                await way(empty, saved, "again")
        assert [info.name for info in await empty.streams()] == [pulses]
        assert len(await way(empty, saved, "again")) == 3
        assert (await ledger.read_run(empty, "again")).restored_from == str(saved)

    async def test_what_has_fallen_silent_is_no_obstacle(self, store: LocalStore) -> None:
        scripted = await begun()
        await scripted.commit_all()
        saved = store.root / await save(scripted, store)
        async with pulsing(scripted.bus, "run"):
            await asyncio.sleep(0.02)
        assert await put_back(scripted.bus, saved, "run") == []
