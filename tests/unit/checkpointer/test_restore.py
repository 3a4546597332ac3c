"""Starting a run from a checkpoint in a log that does not hold it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from skerry.bus import ledger, state
from skerry.bus.memory import MemoryBroker
from skerry.bus.state_writer import NewPart, StateWriter
from skerry.errors import BrokerUnavailable, CheckpointCorrupt, ConfigError, RunMismatch
from skerry.settings import RunConfig
from skerry.store.checkpoint import fragments
from skerry.store.local import LocalStore
from skerry.store.manifest import PARAMS_FILE
from skerry.testing.scripted_run import ScriptedRun
from skerry.wire.messages import Commit, LearnerProgress, Manifest, RunState
from skerry_checkpointer.restore import restore
from skerry_checkpointer.service import Checkpointer


async def test_every_vector_and_version_is_in_the_new_log(saved: Path) -> None:
    bus = MemoryBroker().connect()
    record = await restore(bus, saved, "again")
    cut = Checkpointer.of(bus, record, LocalStore(saved)).plan
    for kept, vectors in fragments(LocalStore(saved.parent), saved.name):
        index = kept.commit.fragment
        latest = await state.read_latest(bus, "again", cut, cut.fragments[index])
        assert latest is not None
        manifest, found = latest
        assert manifest.commit.version == kept.commit.version
        for name, vector in vectors.items():
            np.testing.assert_array_equal(found[name], vector)


async def test_learners_read_what_they_would_have_read_before(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    before = {
        kept.commit.fragment: kept.commit
        for kept, _ in fragments(LocalStore(saved.parent), saved.name)
    }
    after = await ledger.last_commits(bus, "again")
    for index, commit in before.items():
        assert after[index].params_digest == commit.params_digest
        assert after[index].master_digest == commit.master_digest


async def test_the_run_is_open_and_says_where_it_comes_from(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    record = await ledger.read_run(bus, "again")
    assert (record.state, record.restored_from) == (RunState.OPEN, str(saved))


async def test_data_cursors_stay_and_contribution_numbers_start_anew(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    commit = (await ledger.last_commits(bus, "again"))[0]
    assert commit.progress == (LearnerProgress("a", 0, 0, 70, 21),)
    assert (commit.contrib_floor, commit.step, commit.consumed) == (0, 7, ())


async def test_a_learner_keeps_its_data_shard(tmp_path: Path) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for name in ("a", "b"):
        await ledger.join(scripted.bus, "run", name, "host", time.time_ns())
    await scripted.commit_all()
    store = LocalStore(tmp_path)
    written = await Checkpointer.of(scripted.bus, scripted.record, store).save()
    assert written is not None
    bus = MemoryBroker().connect()
    await restore(bus, tmp_path / written.name, "again")
    joined = await ledger.join(bus, "again", "b", "host", time.time_ns())
    assert (joined.shard, joined.incarnation) == (1, 1)


async def test_the_next_commit_goes_on_from_the_restored_version(saved: Path) -> None:
    bus = MemoryBroker().connect()
    record = await restore(bus, saved, "again")
    cut = Checkpointer.of(bus, record, LocalStore(saved)).plan
    writer = await StateWriter.acquire(bus, "again", cut, holder="syncer", now_ns=2)
    scripted = ScriptedRun(bus, record, cut, writer, manifests=await writer.recover())
    assert (await scripted.commit(1, step=8)).commit.version == 2


async def test_a_run_that_exists_is_refused_with_the_fix(saved: Path) -> None:
    bus = MemoryBroker().connect()
    scripted = await ScriptedRun.begin(bus)
    with pytest.raises(RunMismatch, match="restore under another --run"):
        await restore(bus, saved, "run")
    assert await state.read_manifests(bus, "run", scripted.plan) == {}


async def test_a_damaged_checkpoint_writes_nothing(saved: Path) -> None:
    data = bytearray((saved / PARAMS_FILE).read_bytes())
    data[-1] ^= 1
    (saved / PARAMS_FILE).write_bytes(data)
    bus = MemoryBroker().connect()
    with pytest.raises(CheckpointCorrupt, match=PARAMS_FILE):
        await restore(bus, saved, "again")
    assert await bus.streams() == []


async def test_an_interrupted_restore_is_started_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBroker().connect()
    whole = StateWriter.commit

    async def dies_at_the_second(
        self: StateWriter,
        commit: Commit,
        parts: list[NewPart],
        held: Manifest | None,
    ) -> Manifest:
        if commit.fragment == 1:
            msg = "The broker went away."
            raise BrokerUnavailable(msg)
        return await whole(self, commit, parts, held)

    with monkeypatch.context() as patch:
        patch.setattr(StateWriter, "commit", dies_at_the_second)
        with pytest.raises(BrokerUnavailable):
            await restore(bus, saved, "again")
    assert len(await ledger.last_commits(bus, "again")) == 1
    await restore(bus, saved, "again")
    assert len(await ledger.last_commits(bus, "again")) == 3


async def test_state_of_another_checkpoint_is_not_overwritten(saved: Path) -> None:
    bus = MemoryBroker().connect()
    scripted = await ScriptedRun.begin(bus, "again")
    await scripted.commit_all()
    await scripted.commit(1)
    bus.broker.streams["SKERRY_again_LEDGER"].newest.clear()
    with pytest.raises(RunMismatch, match="already has state"):
        await restore(bus, saved, "again")


async def test_how_long_a_restored_run_goes_on_can_be_set(saved: Path) -> None:
    bus = MemoryBroker().connect()
    record = await restore(bus, saved, "again", sets=["train.steps=5000"])
    assert RunConfig.model_validate_json(record.config_json).train.steps == 5000


@pytest.mark.parametrize("assignment", ["train.lr=1", "model.layers=3", "sync.fragments=2"])
async def test_what_a_checkpoint_fixes_cannot_be_set(saved: Path, assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"only train\.steps and train\.duration_s"):
        await restore(MemoryBroker().connect(), saved, "again", sets=[assignment])
