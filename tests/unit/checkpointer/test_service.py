"""When the checkpointer writes, what it records, and what it does when the disk refuses."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import (
    BrokerUnavailable,
    ConfigError,
    RunMismatch,
    StateLost,
    StoreError,
    first_cause,
)
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBus
from skerry.protocol.messages import CheckpointRecord
from skerry.protocol.subjects import Subjects
from skerry.settings.models import CheckpointConfig
from skerry.store.checkpoint import read_manifest
from skerry.store.local import LocalStore
from skerry.store.retention import MONTH_S, after_a_month, keep
from skerry.tasks import TaskGroup
from skerry_checkpointer.service import Checkpointer, checkpointer
from tests.support import checkpoints
from tests.support.checkpoints import save
from tests.support.log import begin_anew
from tests.support.scripted_run import ScriptedRun

DEADLINE_S = 20.0
SHUTDOWN_S = 5.0


class RefusingStore(LocalStore):
    """A store one of whose methods refuses so many times, as a disk does that is full or away."""

    def __init__(self, root: Path, method: str, times: float) -> None:
        super().__init__(root)
        self.left = times

        def refusing(*given: Any) -> Any:
            if self.left > 0:
                self.left -= 1
                msg = "The store refuses: free some space."
                raise StoreError(msg)
            return whole(*given)

        whole = getattr(self, method)
        setattr(self, method, refusing)


async def begun(*, step: int | None = 0, **checkpoint: float) -> ScriptedRun:
    """Begin a run whose fragments are all at version 1, or at none where ``step`` is None."""
    scripted = await checkpoints.begun(checkpoint={"every_s": 3600.0, **checkpoint})
    if step is not None:
        await scripted.commit_all(step=step, tokens=10 * step)
    return scripted


def of(scripted: ScriptedRun, store: LocalStore) -> Checkpointer:
    return Checkpointer.of(scripted.bus, scripted.record, store)


@asynccontextmanager
async def running(scripted: ScriptedRun, store: LocalStore) -> AsyncGenerator[None]:
    """Run a session that ends with the block."""
    async with TaskGroup() as group:
        session = group.create_task(of(scripted, store).run())
        yield
        session.cancel()


async def recorded(scripted: ScriptedRun, count: int) -> list[CheckpointRecord]:
    """The run's first ``count`` checkpoints, waited for."""
    found: list[CheckpointRecord] = []
    records = run_records.follow(scripted.bus, scripted.record.run, CheckpointRecord)
    async with asyncio.timeout(DEADLINE_S), aclosing(records):
        async for record in records:
            found.append(record)
            if len(found) == count:
                break
    return found


async def test_the_first_is_written_as_soon_as_every_fragment_has_a_version(
    store: LocalStore,
) -> None:
    scripted = await begun(step=None)
    async with running(scripted, store):
        await scripted.commit(0)
        assert await of(scripted, store).save() is None
        await scripted.commit_all(step=3)
        (record,) = await recorded(scripted, 1)
    assert (record.path, record.versions) == (store.where("step-00000003"), (2, 1, 1))


async def test_the_ledger_has_what_was_written(store: LocalStore) -> None:
    scripted = await begun(step=3)
    name = await save(scripted, store)
    record = await ledger.last_checkpoint(scripted.bus, scripted.record.run)
    assert record is not None
    assert (record.step, record.tokens) == (3, 30)
    assert record.ledger_sequence == read_manifest(store, name).ledger_sequence > 0
    files = list((store.root / name).iterdir())
    assert record.size_bytes == sum(file.stat().st_size for file in files)
    assert f'"digest": "{record.digest}"' in (store.root / name / "manifest.json").read_text()


async def test_the_last_state_is_written_at_the_end_and_only_once(store: LocalStore) -> None:
    scripted = await begun(step=1)
    serving = asyncio.create_task(checkpointer(scripted.bus, "run", store, SHUTDOWN_S))
    await recorded(scripted, 1)
    await scripted.commit(0, step=9)
    await scripted.finish()
    await asyncio.wait_for(serving, DEADLINE_S)
    await asyncio.wait_for(checkpointer(scripted.bus, "run", store, SHUTDOWN_S), DEADLINE_S)
    assert store.names() == ["step-00000001", "step-00000009"]


async def test_another_run_of_the_same_name_ends_the_checkpointer_of_the_one_before(
    store: LocalStore,
) -> None:
    """What it would go on to save would name the run that is lost."""
    scripted = await begun(step=1, every_s=0.01)
    serving = asyncio.create_task(checkpointer(scripted.bus, "run", store, SHUTDOWN_S))
    await recorded(scripted, 1)
    other = replace(scripted.record, created_ns=scripted.record.created_ns + 1)
    assert isinstance(scripted.bus, MemoryBus)
    begin_anew(scripted.bus.broker, [Subjects("run").stream("LEDGER")])
    await ledger.create_run(scripted.bus, other)
    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.wait_for(serving, DEADLINE_S)
    assert isinstance(first_cause(raised.value), StateLost)


async def test_old_ones_are_thinned_out_also_after_a_restart(store: LocalStore) -> None:
    scripted = await begun(keep_newest=1, keep_every=3)
    service = of(scripted, store)
    for step in range(1, 6):
        await scripted.commit(0, step=step)
        await (service.save() if step < 3 else save(scripted, store))
    assert store.names() == ["step-00000001", "step-00000004", "step-00000005"]
    assert [read_manifest(store, name).index for name in store.names()] == [0, 3, 4]


async def test_a_checkpoint_that_cannot_be_deleted_does_not_keep_the_others(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = await begun(keep_newest=1, keep_every=0)
    service = of(scripted, store)
    delete = store.delete

    def protecting(name: str) -> bool:
        if name == "step-00000001":
            msg = "Cannot write it (Device or resource busy)."
            raise StoreError(msg)
        return delete(name)

    monkeypatch.setattr(store, "delete", protecting)
    for step in range(1, 5):
        await scripted.commit(0, step=step)
        assert await service.save() is not None
    assert store.names() == ["step-00000001", "step-00000004"]


indices = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 200), max_size=40)
newest, every = st.integers(1, 10), st.integers(0, 12)


def named(count: int) -> dict[str, int]:
    return {f"step-{index:04d}": index for index in range(count)}


@pytest.mark.parametrize(
    ("count", "newest", "every", "stay"),
    [
        (25, 2, 10, {0, 10, 20, 23, 24}),
        (10, 1, 7, {0, 7, 9}),
        (5, 1, 0, {4}),
        (41, 1, 1, {0, 8, 12, 16, 20, 24, 26, 28, 30, *range(32, 41)}),
    ],
)
def test_the_newest_and_ever_fewer_mths_stay(
    count: int, newest: int, every: int, stay: set[int]
) -> None:
    assert keep(named(count), newest, every) == {f"step-{index:04d}" for index in stay}


@pytest.mark.parametrize(
    ("sets", "left"),
    [
        ({}, 52),
        ({"every_s": 1.0, "keep_every": 1}, 84),
        ({"keep_every": 0}, 3),
        ({"thin": False}, 8643),
        ({"every_s": 1e9}, 3),
        ({"every_s": 1e-320, "keep_every": 1}, 199),
    ],
)
def test_a_month_leaves_a_few_dozen_unless_all_are_wanted(sets: dict[str, Any], left: int) -> None:
    assert after_a_month(CheckpointConfig(**sets)) == left


@given(st.integers(1, 400), every, st.booleans())
def test_what_a_month_leaves_is_what_is_kept(written: int, every: int, thin: bool) -> None:
    config = CheckpointConfig(every_s=MONTH_S / (written + 0.5), keep_every=every, thin=thin)
    kept = keep(named(written), 0, every, thin=thin)
    assert after_a_month(config) == config.keep_newest + len(kept)


@given(indices, newest, every)
def test_at_least_the_newest_n_stay(indices: dict[str, int], newest: int, every: int) -> None:
    kept = keep(indices, newest, every)
    gone = [indices[name] for name in indices.keys() - kept]
    assert len(kept) >= min(newest, len(indices))
    assert all(sum(indices[name] >= index for name in kept) >= newest for index in gone)


@given(st.integers(1, 120), newest, every)
def test_thinning_out_after_each_leaves_what_thinning_out_once_leaves(
    count: int, newest: int, every: int
) -> None:
    left: dict[str, int] = {}
    for name, index in named(count).items():
        left[name] = index
        left = {kept: left[kept] for kept in keep(left, newest, every)}
    assert set(left) == keep(named(count), newest, every)


async def test_checkpoints_of_an_earlier_run_of_that_name_stay(store: LocalStore) -> None:
    earlier, later = [await begun(step=5, keep_newest=1, keep_every=0) for _ in range(2)]
    await save(earlier, store)
    await save(later, store)
    await later.commit(0, step=6)
    await save(later, store)
    assert store.names() == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("method", ["draft", "sweep"])
async def test_a_store_that_refuses_is_tried_again_at_the_next_turn(
    store: LocalStore, method: str
) -> None:
    """Also by one that has just been started, once the run has a checkpoint."""
    scripted = await begun(every_s=0.01)
    await save(scripted, store)
    await scripted.commit(0, step=9)
    refusing = RefusingStore(store.root, method, 2)
    async with running(scripted, refusing):
        await recorded(scripted, 2)
    assert (refusing.left, len(store.names())) == (0, 2)


@pytest.mark.parametrize("method", ["draft", "sweep"])
async def test_a_store_that_still_refuses_at_the_end_of_the_run_is_an_error_with_the_fix(
    store: LocalStore, method: str
) -> None:
    scripted = await begun()
    await scripted.finish()
    refusing = RefusingStore(store.root, method, float("inf"))
    with pytest.raises((ExceptionGroup, StoreError)) as caught:
        await checkpointer(scripted.bus, "run", refusing, SHUTDOWN_S)
    cause = first_cause(caught.value)
    assert isinstance(cause, StoreError)
    assert "free some space" in str(cause)


async def test_a_store_that_never_held_a_checkpoint_of_the_run_is_an_error_at_once(
    store: LocalStore,
) -> None:
    scripted = await begun(every_s=0.01)
    with pytest.raises(StoreError, match="free some space"):
        await asyncio.wait_for(
            of(scripted, RefusingStore(store.root, "sweep", 1)).run(), DEADLINE_S
        )


async def test_an_unrecorded_checkpoint_is_recorded_once_a_store_that_was_away_is_back(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = await begun(every_s=0.01)
    await save(scripted, store)
    await scripted.commit(0, step=9)

    async def lose_broker(*_: object) -> None:
        msg = "The broker went away."
        raise BrokerUnavailable(msg)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "record_checkpoint", lose_broker)
        with pytest.raises(BrokerUnavailable):
            await save(scripted, store)
    async with running(scripted, RefusingStore(store.root, "sweep", 1)):
        found = await recorded(scripted, 2)
    assert [record.path for record in found] == [store.where(name) for name in store.names()]


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"plan_digest": 1}, RunMismatch, "another release"),
        (
            {"config_json": '{"checkpoint": {"telepathy": true}}'},
            ConfigError,
            r"checkpoint\.telepathy .* use that release",
        ),
    ],
)
async def test_a_run_of_another_release_is_refused(
    store: LocalStore, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    scripted = await begun()
    with pytest.raises(error, match=sentence):
        Checkpointer.of(scripted.bus, replace(scripted.record, **changes), store)


async def test_a_signal_leaves_a_checkpoint_of_the_newest_state(tmp_path: Path) -> None:
    scripted, store = await begun(), LocalStore(tmp_path)
    serving = asyncio.create_task(checkpointer(scripted.bus, "run", store, SHUTDOWN_S))
    await recorded(scripted, 1)
    await scripted.commit_all(step=7, tokens=70)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, DEADLINE_S)
    assert [record.step for record in await recorded(scripted, 2)] == [0, 7]
