"""Stand-by syncers as real processes on a real broker: take-over after a kill, a hang, and shards.

How long each take-over took is printed (``pytest -s``); nothing here depends on it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import fences, ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from tests.support.builders import background, run_record
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.history import read_history
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault]

PLAN = plan([LeafSpec("embed", (300, 256), embedding=True), LeafSpec("w", (200, 256))], 4)
WINDOW_BYTES = 256 * 1024**2


def config(shards: int) -> RunConfig:
    sync = SyncConfig(fragments=4, h_steps=8, merge="rda", chunk_bytes=65536, shards=shards)
    return RunConfig(sync=sync, outer=OuterConfig(preset="nesterov"))


@dataclass(frozen=True)
class Running:
    """A run under way, with its syncers by name and the test's own connection."""

    bus: NatsBus
    run: str
    shards: int
    syncers: dict[str, Service]

    async def owner(self, shard: int = 0) -> str:
        held = await fences.newest(self.bus, self.run, shard)
        assert held is not None
        return held.holder

    async def commit_of(self, shard: int, owner: str, after: int = 0) -> Commit:
        """Return the first commit to a shard by a syncer, of a version behind ``after``."""

        def wanted(commit: Commit) -> bool:
            mine = commit.fragment % self.shards == shard
            return mine and commit.syncer == owner and commit.version > after

        return (await until_commit(self.bus, self.run, wanted))[-1]

    async def taken_from(self, shard: int, dead: str) -> Commit:
        """Return the first commit to a shard by anybody else."""
        before = await ledger.last_commits(self.bus, self.run)

        def wanted(commit: Commit) -> bool:
            known = before[commit.fragment].version if commit.fragment in before else 0
            new = commit.fragment % self.shards == shard and commit.version > known
            return new and commit.syncer != dead

        return (await until_commit(self.bus, self.run, wanted))[-1]


@asynccontextmanager
async def running(
    server: NatsServer, run: str, folder: Path, *, shards: int = 1, names: str = "abc"
) -> AsyncGenerator[Running]:
    """Start syncers one after the other, the first of which owns everything, and two learners.

    Afterwards everything is dead and the history must be whole.
    """
    settings = config(shards)
    toml = folder / "none.toml"
    toml.write_text("")
    async with NatsBus(server.url, name="test") as bus:
        cut = replace(PLAN, shards=shards)
        await bus.declare(specs(run, shards=shards, window_bytes=WINDOW_BYTES))
        given = settings.model_copy(
            update={"log": settings.log.model_copy(update={"window_bytes": WINDOW_BYTES})}
        )
        await ledger.create_run(bus, run_record(run, cut, given.model_dump_json()))
        learners = (FakeLearner(bus, run, cut, name, scheme="int4") for name in ("l1", "l2"))
        async with (
            background(*(learner.train() for learner in learners)),
            Cluster(server.url, run, folder, toml, folder / "cache") as cluster,
        ):
            syncers = {names[0]: await cluster.start("syncer", names[0])}
            under_way = Running(bus, run, shards, syncers)
            for shard in range(shards):
                await under_way.commit_of(shard, names[0])
            for name in names[1:]:
                syncers[name] = await cluster.start("syncer", name)
                await said(syncers[name], '"succession"')
            yield under_way
        history = await read_history(bus, run)
    assert history.violations == ()


async def said(service: Service, words: str, timeout_s: float = 60.0) -> None:
    """Return once a service has logged something."""
    async with asyncio.timeout(timeout_s):
        while words not in service.said:
            assert service.process.returncode is None, service.said
            await asyncio.sleep(0.05)


def events(service: Service, name: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in service.said.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


async def settled(under_way: Running) -> None:
    """Return once the stand-bys have listened for a lease, as they have in any real run."""
    await asyncio.sleep(2 * SyncConfig().lease_s)
    assert all(s.process.returncode is None for s in under_way.syncers.values())


@pytest.mark.drill
async def test_stand_by_takes_over_from_a_killed_syncer(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    async with running(shared_nats, run_id, tmp_path, names="ab") as under_way:
        await settled(under_way)
        owner = await under_way.owner()
        killed_s = time.monotonic()
        under_way.syncers.pop(owner).kill9()
        commit = await under_way.taken_from(0, owner)
        print(f"take-over after kill -9: first commit {time.monotonic() - killed_s:.2f} s later")
        await under_way.commit_of(0, commit.syncer, after=commit.version + 2)
        assert not any(events(s, "stepped_down") for s in under_way.syncers.values())


@pytest.mark.drill
async def test_hung_syncer_is_succeeded_and_stands_by_when_it_wakes(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    async with running(shared_nats, run_id, tmp_path) as under_way:
        await settled(under_way)
        owner = await under_way.owner()
        hung_s = time.monotonic()
        under_way.syncers[owner].pause()
        commit = await under_way.taken_from(0, owner)
        print(f"take-over after SIGSTOP: first commit {time.monotonic() - hung_s:.2f} s later")
        under_way.syncers[owner].resume()
        await said(under_way.syncers[owner], "steps down and stands by; nothing is lost")
        await under_way.commit_of(0, commit.syncer, after=commit.version + 3)
        assert under_way.syncers[owner].process.returncode is None
        assert len(events(under_way.syncers[owner], "stepped_down")) == 1
        others = [name for name in under_way.syncers if name != owner]
        for name in others:
            under_way.syncers.pop(name).kill9()
        await under_way.taken_from(0, commit.syncer)  # by the one that had been late


@pytest.mark.drill
async def test_shards_of_a_killed_syncer_move_to_the_other(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    async with running(shared_nats, run_id, tmp_path, shards=2, names="ab") as under_way:
        await under_way.commit_of(1, "b")
        assert [await under_way.owner(shard) for shard in (0, 1)] == ["a", "b"]
        await settled(under_way)
        killed_s = time.monotonic()
        under_way.syncers.pop("a").kill9()
        await under_way.taken_from(0, "a")
        print(f"shard of a killed syncer: first commit {time.monotonic() - killed_s:.2f} s later")
        assert [await under_way.owner(shard) for shard in (0, 1)] == ["b", "b"]


@pytest.mark.drill
async def test_a_stopped_syncer_hands_its_shards_over_at_once(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    async with running(shared_nats, run_id, tmp_path, names="ab") as under_way:
        await settled(under_way)
        stopped = under_way.syncers.pop("a")
        stopped.terminate()
        assert await stopped.ended() == 0
        ended_s = time.monotonic()
        await under_way.taken_from(0, "a")
        print(f"take-over after SIGTERM: first commit {time.monotonic() - ended_s:.2f} s later")
