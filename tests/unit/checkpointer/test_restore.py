"""Starting a run from a checkpoint in a log that does not hold it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import BrokerUnavailable, CheckpointCorrupt, ConfigError, RunMismatch
from skerry.log import ledger, state
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import LearnerProgress, Manifest, RunState, why
from skerry.protocol.records import plan_of
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.store.checkpoint import read_manifest
from skerry.store.local import LocalStore
from skerry.store.manifest import PARAMS_FILE
from skerry_checkpointer.put_back import put_back
from skerry_checkpointer.restore import restore
from skerry_tools.audit.verify import verify as audit
from tests.support.checkpoints import (
    QUICK,
    assert_log_holds,
    begun,
    dying_at_the_second,
    flip_bit,
    pulsing,
    save,
)
from tests.support.scripted_run import ScriptedRun


def of(saved: Path) -> LocalStore:
    return LocalStore(saved.parent)


async def test_every_vector_and_version_is_in_the_new_log(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    await assert_log_holds(bus, "again", of(saved), saved.name)
    after = await ledger.last_commits(bus, "again")
    for kept in read_manifest(of(saved), saved.name).state:
        assert after[kept.commit.fragment].version == kept.commit.version


async def test_a_run_of_0_1_goes_on_from_its_checkpoint() -> None:
    saved = Path(__file__).parents[2] / "golden" / "checkpoint-0.1" / "step-00000024"
    bus = MemoryBroker().connect()
    record = await restore(bus, saved, "again", sets=["train.steps=96"])
    commits = await ledger.last_commits(bus, "again")
    assert {why(commit) for commit in commits.values()} == {f"restored from {saved}"}
    assert [commits[f].version for f in range(record.fragments)] == [2, 2, 2]
    assert (await audit(bus, "again")).violations == ()


@pytest.mark.parametrize("way", [restore, put_back])
async def test_what_still_works_on_a_run_whose_log_is_gone_is_named(
    saved: Path, way: Callable[[MemoryBus, Path, str], Awaitable[object]]
) -> None:
    """The broker lost its disk and all else goes on: in the empty one it pulses at once."""
    bus = MemoryBroker().connect()
    pulses = Subjects("again").stream("PULSE")
    await bus.declare([spec for spec in specs("again") if spec.name == pulses])
    async with pulsing(bus, "again"):
        with pytest.raises(RunMismatch, match=r"'again' is alive: syncer s .*Stop all of it first"):
            await way(bus, saved, "again")
    assert [info.name for info in await bus.streams()] == [pulses]
    assert await way(bus, saved, "again") is not None


async def test_learners_read_what_they_would_have_read_before(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    after = await ledger.last_commits(bus, "again")
    for kept in read_manifest(of(saved), saved.name).state:
        commit = after[kept.commit.fragment]
        assert commit.params_digest == kept.commit.params_digest
        assert commit.master_digest == kept.commit.master_digest


async def test_the_run_is_open_and_says_where_it_comes_from(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    record = await ledger.read_run(bus, "again")
    assert (record.state, record.restored_from) == (RunState.OPEN, str(saved))


async def test_data_cursors_stay_and_contributions_are_numbered_from_1_again(saved: Path) -> None:
    bus = MemoryBroker().connect()
    await restore(bus, saved, "again")
    commit = (await ledger.last_commits(bus, "again"))[0]
    assert commit.progress == (LearnerProgress("a", 0, 0, 70, 21),)
    assert (commit.contrib_floor, commit.step, commit.consumed) == (0, 7, ())


async def test_a_learner_keeps_its_data_shard(store: LocalStore) -> None:
    scripted = await begun()
    for name in ("a", "b"):
        await ledger.join(scripted.bus, "run", name, "host", time.time_ns())
    await scripted.commit_all()
    bus = MemoryBroker().connect()
    await restore(bus, store.root / await save(scripted, store), "again")
    joined = await ledger.join(bus, "again", "b", "host", time.time_ns())
    assert (joined.shard, joined.incarnation) == (1, 1)


async def test_the_next_commit_goes_on_from_the_restored_version(saved: Path) -> None:
    bus = MemoryBroker().connect()
    record = await restore(bus, saved, "again")
    cut = plan_of(record)
    writer = await StateWriter.acquire(bus, "again", cut, holder="syncer", now_ns=2)
    scripted = ScriptedRun(bus, record, cut, writer, manifests=await writer.recover())
    assert (await scripted.commit(1, step=8)).commit.version == 2


async def test_a_run_that_exists_is_refused_with_the_fix(saved: Path) -> None:
    bus = MemoryBroker().connect()
    scripted = await ScriptedRun.begin(bus, config=RunConfig.model_validate(QUICK))
    with pytest.raises(RunMismatch, match="restore under another --run"):
        await restore(bus, saved, "run")
    assert await state.read_manifests(bus, "run", scripted.plan) == {}


async def test_a_damaged_checkpoint_writes_nothing(saved: Path) -> None:
    flip_bit(saved / PARAMS_FILE, -1)
    bus = MemoryBroker().connect()
    with pytest.raises(CheckpointCorrupt, match=PARAMS_FILE):
        await restore(bus, saved, "again")
    assert await bus.streams() == []


async def test_an_interrupted_restore_is_started_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBroker().connect()
    with monkeypatch.context() as patch:
        patch.setattr(StateWriter, "commit", dying_at_the_second())
        with pytest.raises(BrokerUnavailable):
            await restore(bus, saved, "again")
    assert len(await ledger.last_commits(bus, "again")) == 1
    await restore(bus, saved, "again")
    assert len(await ledger.last_commits(bus, "again")) == 3


async def test_what_another_restore_wrote_meanwhile_is_not_written_over(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one commits fragment 0 when we have looked and not taken the fence yet."""
    bus = MemoryBroker().connect()
    acquire = StateWriter.acquire
    others: list[Manifest] = []

    async def after_the_other(*given: Any, **named: Any) -> StateWriter:
        with monkeypatch.context() as patch:
            patch.setattr(StateWriter, "acquire", acquire)
            patch.setattr(StateWriter, "commit", dying_at_the_second(others))
            if not others:
                with pytest.raises(BrokerUnavailable):
                    await restore(bus, saved, "again")
        return await acquire(*given, **named)

    monkeypatch.setattr(StateWriter, "acquire", after_the_other)
    record = await restore(bus, saved, "again")
    cut = plan_of(record)
    assert (await state.read_manifests(bus, "again", cut))[0] == others[0]
    assert len(await ledger.last_commits(bus, "again")) == 3
    assert (await audit(bus, "again")).violations == ()


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
