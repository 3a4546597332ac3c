"""Putting a run back in its own log: rolled back, or with a part of it gone."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable, Fenced, RunMismatch
from skerry.log import ledger, state
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import StateWriter
from skerry.protocol.messages import why
from skerry.protocol.subjects import Subjects
from skerry.store.local import LocalStore
from skerry_checkpointer.put_back import PutBack, put_back
from skerry_checkpointer.restore import restore
from skerry_tools.audit.verify import verify as audit
from tests.support.checkpoints import (
    assert_log_holds,
    begun,
    dying_at_the_second,
    pulsing,
    save,
)
from tests.support.scripted_run import ScriptedRun

Scene = tuple[ScriptedRun, MemoryBus, Path]


def rolled_back(scripted: ScriptedRun) -> MemoryBus:
    """What the broker's store holds now, on a broker of its own."""
    assert isinstance(scripted.bus, MemoryBus)
    return MemoryBus(copy.deepcopy(scripted.bus.broker))


def lose(bus: MemoryBus, kind: str, subject: str) -> None:
    """Delete what the log keeps on every subject that begins like this."""
    stream = bus.broker.streams[f"SKERRY_run_{kind}"]
    for at in [s for name, s in stream.newest.items() if name.startswith(subject)]:
        stream.drop(at)


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

    async def test_without_replace_it_is_refused_with_the_versions_of_both(
        self, scene: Scene
    ) -> None:
        _, older, saved = scene
        with pytest.raises(RunMismatch, match=r"version 1, the checkpoint 2-3.*--replace"):
            await restore(older, saved, "run")

    async def test_with_replace_it_holds_what_the_checkpoint_holds(self, scene: Scene) -> None:
        _, older, saved = scene
        changes = await put_back(older, saved, "run")
        assert changes == [PutBack(0, 1, 2, 2), PutBack(1, 1, 2, 3), PutBack(2, 1, 2, 2)]
        await assert_log_holds(older, "run", LocalStore(saved.parent), saved.name)

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
        frozen = ScriptedRun(
            older, scripted.record, scripted.plan, replace(scripted.writer, bus=older)
        )
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

    async def test_doing_it_twice_changes_nothing_more(self, scene: Scene) -> None:
        _, older, saved = scene
        await put_back(older, saved, "run")
        assert await put_back(older, saved, "run") == []

    async def test_an_interrupted_one_goes_on_when_started_again(
        self,
        scene: Scene,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        _, older, saved = scene
        with monkeypatch.context() as patch:
            patch.setattr(StateWriter, "commit", dying_at_the_second())
            with pytest.raises(BrokerUnavailable):
                await put_back(older, saved, "run")
        changes = await put_back(older, saved, "run")
        assert [change.fragment for change in changes] == [1, 2]
        await assert_log_holds(older, "run", LocalStore(saved.parent), saved.name)

    async def test_a_log_that_is_newer_than_the_checkpoint_is_refused(self, scene: Scene) -> None:
        scripted, _, saved = scene
        await scripted.commit(2)
        with pytest.raises(RunMismatch, match="fragment 2 at version 3"):
            await put_back(scripted.bus, saved, "run")
        assert scripted.manifests == await state.read_manifests(scripted.bus, "run", scripted.plan)

    async def test_another_runs_checkpoint_is_refused(self, scene: Scene, tmp_path: Path) -> None:
        _, older, _ = scene
        other = await begun()
        await other.commit_all()
        foreign = tmp_path / await save(other, LocalStore(tmp_path))
        with pytest.raises(RunMismatch, match="not a checkpoint of run 'run'"):
            await put_back(older, foreign, "run")

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
        assert isinstance(scripted.bus, MemoryBus)
        return scripted, scripted.bus, saved

    @pytest.mark.parametrize("gone", ["1.manifest", "1.0.", "1."])
    async def test_what_is_lost_is_written_as_the_next_version(
        self, scene: Scene, gone: str
    ) -> None:
        _, bus, saved = scene
        lose(bus, "STATE", f"skerry.run.state.{gone}")
        assert await put_back(bus, saved, "run") == [PutBack(1, 3, 4, 1)]
        await assert_log_holds(bus, "run", LocalStore(saved.parent), saved.name)

    async def test_its_progress_does_not_go_back(self, scene: Scene) -> None:
        _, bus, saved = scene
        lose(bus, "STATE", "skerry.run.state.1.")
        await put_back(bus, saved, "run")
        commit = (await ledger.last_commits(bus, "run"))[1]
        (row,) = commit.progress
        assert (row.tokens, row.cursor, commit.step, commit.contrib_floor) == (30, 9, 3, 17)

    async def test_newer_fragments_that_are_whole_stay(self, scene: Scene) -> None:
        scripted, bus, saved = scene
        await scripted.commit(2)
        lose(bus, "STATE", "skerry.run.state.0.")
        changes = await put_back(bus, saved, "run")
        assert [change.fragment for change in changes] == [0]
        found = await state.read_manifests(bus, "run", scripted.plan)
        assert found[1] == scripted.manifests[1]
        assert found[2] == scripted.manifests[2]

    async def test_the_fence_of_every_shard_is_taken(self, scene: Scene) -> None:
        _, bus, saved = scene
        lose(bus, "STATE", "skerry.run.state.1.")
        await put_back(bus, saved, "run")
        for shard in range(2):
            record = await bus.last(Subjects("run").fence(shard))
            assert record is not None
            assert b"restore" in record.payload

    async def test_an_older_version_that_is_newer_than_the_checkpoint_asks_for_a_newer_one(
        self, scene: Scene
    ) -> None:
        """STATE alone was rolled back: version 2 can be read, 3 is in the ledger."""
        scripted, bus, saved = scene
        older = rolled_back(scripted).broker.streams["SKERRY_run_STATE"]
        await scripted.commit(1)
        bus.broker.streams["SKERRY_run_STATE"] = older
        with pytest.raises(RunMismatch, match="use a newer checkpoint"):
            await put_back(bus, saved, "run")


class TestALiveRun:
    @pytest.mark.parametrize("way", [restore, put_back])
    async def test_what_is_alive_is_named(
        self, store: LocalStore, way: Callable[[MemoryBus, Path, str], Awaitable[object]]
    ) -> None:
        scripted = await begun(sync={"lease_s": 0.5})
        await scripted.commit_all()
        saved = store.root / await save(scripted, store)
        assert isinstance(scripted.bus, MemoryBus)
        async with pulsing(scripted.bus, "run"):
            with pytest.raises(RunMismatch, match=r"alive: syncer s .*another --run"):
                await way(scripted.bus, saved, "run")

    async def test_what_has_fallen_silent_is_no_obstacle(self, store: LocalStore) -> None:
        scripted = await begun()
        await scripted.commit_all()
        saved = store.root / await save(scripted, store)
        async with pulsing(scripted.bus, "run"):
            await asyncio.sleep(0.02)
        assert await put_back(scripted.bus, saved, "run") == []

    async def test_another_id_beside_it_is_fine(self, store: LocalStore) -> None:
        scripted = await begun()
        await scripted.commit_all(step=5)
        saved = store.root / await save(scripted, store)
        await restore(scripted.bus, saved, "beside")
        await scripted.commit(0)
        assert (await ledger.read_run(scripted.bus, "beside")).restored_from == str(saved)
        assert (await ledger.last_commits(scripted.bus, "run"))[0].version == 2


async def test_every_shard_of_a_new_run_is_written_under_its_own_fence(store: LocalStore) -> None:
    scripted = await begun(sync={"lease_s": 0.05, "shards": 2, "fragments": 3})
    await scripted.commit_all()
    saved = store.root / await save(scripted, store)
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    commits = await ledger.last_commits(bus, "again")
    fences = [await bus.last(Subjects("again").fence(shard)) for shard in range(2)]
    tokens = [fence.sequence for fence in fences if fence is not None]
    assert [commits[f].fence for f in range(3)] == [tokens[0], tokens[1], tokens[0]]


async def test_an_empty_log_is_restored_into(saved: Path) -> None:
    bus = MemoryBroker().connect()
    assert await put_back(bus, saved, "run") == []
    assert (await ledger.read_run(bus, "run")).restored_from == str(saved)
