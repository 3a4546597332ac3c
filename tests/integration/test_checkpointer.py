"""The checkpointer as a process, on a real nats-server and a real S3, killed where it hurts."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from skerry.errors import RunMismatch
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import CheckpointRecord
from skerry.settings.models import RunConfig
from skerry.store.base import Store
from skerry.store.checkpoint import verify
from skerry.store.kinds import s3
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from skerry_checkpointer.restore import restore
from tests.support.checkpoints import (
    DEADLINE_S,
    assert_log_holds,
    line_of,
    output_of,
    pulsing,
    python,
    save,
)
from tests.support.nats_server import NatsServer
from tests.support.s3_server import BUCKET, S3Server
from tests.support.scripted_run import ScriptedRun

pytestmark = pytest.mark.nats

RUN = "run"

PAUSING = """
import asyncio, sys, threading
from skerry.log.nats.bus import NatsBus
from skerry.settings.loading import load
from skerry.store.finding import store_of
from skerry_checkpointer.service import checkpointer

store = store_of(load(None, sys.argv[2:]).local.store, "run")
begin = type(store).draft
def draft(self, name):
    begun = begin(self, name)
    whole = begun.write
    def write(file, data):
        whole(file, data)
        print("half written", flush=True)
        threading.Event().wait()
    begun.write = write
    return begun

type(store).draft = draft
asyncio.run(checkpointer(NatsBus(sys.argv[1]), "run", store, 5.0))
"""


class Place(NamedTuple):
    """Where a run's checkpoints go: the store, and the settings by which a process finds it."""

    store: Store
    settings: list[str]

    @property
    def options(self) -> list[str]:
        return [word for setting in self.settings for word in ("--set", setting)]

    def service(self, nats: NatsServer) -> list[str]:
        return ["-m", "skerry_checkpointer", "--nats", nats.url, "--run", RUN, *self.options]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, run_id: str) -> Place:
    if request.param == "local":
        return Place(LocalStore(tmp_path / RUN), [f"store.path={tmp_path}"])
    server: S3Server = request.getfixturevalue("s3_server")
    url = f"s3://{BUCKET}/{run_id}"
    return Place(S3Store(f"{url}/{RUN}", server.access()), server.settings(url))


@asynccontextmanager
async def scripted(nats: NatsServer, **checkpoint: float) -> AsyncGenerator[ScriptedRun]:
    values = {"every_s": 0.05, "keep_newest": 100, **checkpoint}
    async with NatsBus(nats.url) as bus:
        config = RunConfig.model_validate({"checkpoint": values})
        yield await ScriptedRun.begin(bus, RUN, config=config)


async def checkpoint_at(bus: Bus, step: int) -> None:
    """Wait until the ledger has a checkpoint at this step or later."""
    records = run_records.follow(bus, RUN, CheckpointRecord)
    async with asyncio.timeout(DEADLINE_S), aclosing(records):
        async for record in records:
            if record.step >= step:
                return


async def test_it_writes_while_the_run_goes_on_and_ends_with_it(
    nats_server: NatsServer, place: Place
) -> None:
    async with scripted(nats_server) as run, python(*place.service(nats_server)) as running:
        await run.commit_all(step=1)
        await checkpoint_at(run.bus, 1)
        await run.commit(1, step=2)
        await run.finish()
        assert await asyncio.wait_for(running.wait(), DEADLINE_S) == 0
    assert place.store.names() == ["step-00000001", "step-00000002"]
    assert verify(place.store, "step-00000002").versions == (1, 2, 1)


@pytest.mark.drill
@pytest.mark.fault
async def test_killed_half_way_it_harms_nothing_and_what_it_left_is_cleaned_up(
    nats_server: NatsServer, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk by its successor at once; in a bucket, where its name stays taken, after a day."""
    store = place.store
    async with scripted(nats_server, every_s=3600) as run:
        await run.commit_all(step=1)
        async with python(*place.service(nats_server)):
            await checkpoint_at(run.bus, 1)
        await run.commit(0, step=2)
        async with python("-c", PAUSING, nats_server.url, *place.settings) as writer:
            assert await line_of(writer) == b"half written\n"
            writer.send_signal(signal.SIGKILL)
            await writer.wait()
        assert store.names() == ["step-00000001"]
        assert verify(store, "step-00000001").versions == (1, 1, 1)
        async with python(*place.service(nats_server)):
            await checkpoint_at(run.bus, 2)
        is_local = isinstance(store, LocalStore)
        second = "step-00000002" if is_local else "step-00000002-2"
        assert store.names() == ["step-00000001", second]
        assert verify(store, second).versions == (2, 1, 1)
        monkeypatch.setattr(s3, "DEAD_S", -10.0)
        assert store.sweep() == ([] if is_local else ["step-00000002"])
        assert len(store.names()) == 2


@pytest.mark.drill
@pytest.mark.fault
async def test_it_outlives_a_broker_restart(nats_server: NatsServer, tmp_path: Path) -> None:
    place = Place(LocalStore(tmp_path / RUN), [f"store.path={tmp_path}"])
    async with scripted(nats_server) as run, python(*place.service(nats_server)):
        await run.commit_all(step=1)
        await checkpoint_at(run.bus, 1)
        nats_server.restart()
        await run.commit(2, step=2)
        await checkpoint_at(run.bus, 2)


@pytest.mark.drill
@pytest.mark.fault
async def test_two_on_one_run_do_not_harm_each_other(nats_server: NatsServer, place: Place) -> None:
    """Both write and both thin out; what is left is whole, and the last state is part of it."""
    command = place.service(nats_server)
    async with scripted(nats_server, keep_newest=2, keep_every=0) as run:
        await run.commit_all(step=1)
        async with python(*command) as one, python(*command) as two:
            for step in range(1, 12):
                await run.commit(step % 3, step=step)
                await checkpoint_at(run.bus, step)
            await run.finish()
            for running in (one, two):
                assert await asyncio.wait_for(running.wait(), DEADLINE_S) == 0
        found = [verify(place.store, name) for name in place.store.names()]
        newest = await ledger.last_commits(run.bus, RUN)
        assert tuple(newest[f].version for f in range(3)) in {c.versions for c in found}
        assert 2 <= len(found) <= 4


@pytest.mark.parametrize(
    "place", ["local", pytest.param("s3", marks=pytest.mark.drill)], indirect=True
)
async def test_a_checkpoint_is_listed_verified_and_becomes_a_run_in_an_empty_broker(
    nats_server: NatsServer, place: Place, tmp_path: Path
) -> None:
    async with scripted(nats_server) as run:
        for name in ("a", "b"):
            await ledger.join(run.bus, RUN, name, "host", time.time_ns())
        await run.commit_all(step=7, tokens=70)
        where = place.store.where(await save(run, place.store))
    (found,) = json.loads(await output_of("list", "--json", *place.options))
    assert (found["path"], found["run"], found["step"]) == (where, RUN, 7)
    assert json.loads(await output_of("verify", "--json", where, *place.options))["ok"]
    empty = NatsServer(tmp_path / "empty")
    empty.start()
    try:
        words = ("restore", where, "--nats", empty.url, "--run", "again", *place.options)
        command = (*words, "--set", "train.steps=4321")
        assert await output_of(*command) == f"Run again is restored from {where}.\n"
        async with NatsBus(empty.url) as bus:
            record = await ledger.read_run(bus, "again")
            assert RunConfig.model_validate_json(record.config_json).train.steps == 4321
            await assert_log_holds(bus, "again", place.store, where.rpartition("/")[2])
            joined = await ledger.join(bus, "again", "b", "host", time.time_ns())
            new = await ledger.join(bus, "again", "c", "host", time.time_ns())
            assert (joined.shard, joined.incarnation, new.shard) == (1, 1, 2)
        error = await output_of(*command, code=2)
        assert "already has state" in error
        assert "Traceback" not in error
    finally:
        empty.kill()


async def test_restore_under_a_run_that_outlived_its_brokers_disk_is_refused(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / RUN)
    async with NatsBus(nats_server.url, name="run") as bus, NatsBus(nats_server.url) as empty:
        run = await ScriptedRun.begin(bus, RUN)
        await run.commit_all(step=3)
        where = store.where(await save(run, store))
        nats_server.kill9()
        shutil.rmtree(nats_server.store)
        nats_server.restart()
        async with pulsing(bus, RUN):
            with pytest.raises(RunMismatch, match="alive: syncer s just said so"):
                await restore(empty, where, RUN)
        await restore(empty, where, RUN)
        assert (await ledger.read_run(empty, RUN)).restored_from == where
