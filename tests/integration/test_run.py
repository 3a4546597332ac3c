"""Whole runs of real processes on a real broker."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from skerry.bus import ledger, state
from skerry.bus.nats_bus import NatsBus
from skerry.core.fragments import plan
from skerry.testing.cluster import Cluster, until_commit
from skerry.testing.nats_server import NatsServer
from skerry.wire.messages import Commit, RunState

pytestmark = pytest.mark.nats


def losses(commits: list[Commit]) -> list[float]:
    told = [c.loss for commit in commits if commit.version > 1 for c in commit.consumed]
    return [loss for loss in told if math.isfinite(loss)]


async def test_two_learners_train_one_model_to_its_end(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, short_config: Path, jax_cache: Path
) -> None:
    async with (
        Cluster(shared_nats.url, run_id, tmp_path, short_config, jax_cache) as cluster,
        NatsBus(shared_nats.url, name="test") as bus,
    ):
        services = [
            await cluster.start("syncer", "s"),
            await cluster.start("learner", "a"),
            await cluster.start("learner", "b"),
        ]
        commits = await until_commit(bus, run_id, lambda c: c.final and c.fragment == 1)
        codes = [await service.ended() for service in services]
        record = await ledger.read_run(bus, run_id)
    assert codes == [0, 0, 0], [s.said[-2000:] for s in services]
    assert record.state is RunState.FINISHED
    seen = losses(commits)
    assert sum(seen[-4:]) / 4 < 0.7 * sum(seen[:4]) / 4
    assert {c.learner for commit in commits for c in commit.consumed} == {"a", "b"}


async def test_killed_learner_comes_back_with_the_latest_state(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    async with (
        Cluster(shared_nats.url, run_id, tmp_path, tiny_config, jax_cache) as cluster,
        NatsBus(shared_nats.url, name="test") as bus,
    ):
        await cluster.start("syncer", "s")
        victim = await cluster.start("learner", "a")
        await cluster.start("learner", "b")
        await until_commit(bus, run_id, lambda c: "a" in _merged(c) and c.version > 2)
        victim.kill9()
        await victim.ended()
        before = await ledger.last_commits(bus, run_id)
        dead = {f: c.version for f, c in before.items()}
        await until_commit(bus, run_id, lambda c: c.version > dead[c.fragment] + 3)
        await cluster.start("learner", "a")
        commits = await until_commit(
            bus, run_id, lambda c: any(r.learner == "a" and r.incarnation == 2 for r in c.consumed)
        )
    (first,) = [c for c in commits[-1].consumed if c.learner == "a"]
    assert first.base_version > dead[commits[-1].fragment], "it did not catch up"
    old = [
        c.cursor_to for k in commits for c in k.consumed if (c.learner, c.incarnation) == ("a", 1)
    ]
    assert first.cursor_from <= max(old), "it left a gap in its data"
    assert first.step > 0


async def test_newer_incarnation_makes_the_older_stop(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    async with (
        Cluster(shared_nats.url, run_id, tmp_path, tiny_config, jax_cache) as cluster,
        NatsBus(shared_nats.url, name="test") as bus,
    ):
        await cluster.start("syncer", "s")
        older = await cluster.start("learner", "a")
        await until_commit(bus, run_id, lambda c: c.version == 2)
        newer = await cluster.start("learner", "a")
        assert await older.ended() == 3
        await until_commit(
            bus, run_id, lambda c: any(r.learner == "a" and r.incarnation == 2 for r in c.consumed)
        )
        assert newer.process.returncode is None
    (sentence,) = [line for line in older.said.splitlines() if line.startswith("error:")]
    assert "'a'" in sentence


async def test_broker_restart_is_survived_by_all(
    nats_server: NatsServer, run_id: str, tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    async with (
        Cluster(nats_server.url, run_id, tmp_path, tiny_config, jax_cache) as cluster,
        NatsBus(nats_server.url, name="test") as bus,
    ):
        services = [
            await cluster.start("syncer", "s"),
            await cluster.start("learner", "a"),
            await cluster.start("learner", "b"),
        ]
        await until_commit(bus, run_id, lambda c: c.version == 3)
        nats_server.kill9()
        nats_server.restart()
        before = max(c.version for c in (await ledger.last_commits(bus, run_id)).values())
        commits = await until_commit(bus, run_id, lambda c: c.version > before + 3)
        assert [s.process.returncode for s in services] == [None] * 3
    for fragment in (0, 1):
        versions = [c.version for c in commits if c.fragment == fragment]
        assert versions == list(range(1, len(versions) + 1))
    assert {c.learner for c in commits[-1].consumed} <= {"a", "b"}


async def test_resume_from_a_checkpoint_into_an_empty_broker(
    shared_nats: NatsServer,
    nats_server: NatsServer,
    run_id: str,
    tmp_path: Path,
    short_config: Path,
    jax_cache: Path,
) -> None:
    folder = tmp_path / "checkpoints" / run_id
    async with Cluster(shared_nats.url, run_id, tmp_path, short_config, jax_cache) as cluster:
        services = [
            await cluster.start(kind, name)
            for kind, name in (("syncer", "s"), ("checkpointer", "c"), ("learner", "a"))
        ]
        for service in services:
            assert await service.ended() == 0, service.said[-2000:]
    newest = max(p for p in folder.iterdir() if p.is_dir())
    async with (
        Cluster(nats_server.url, "again", tmp_path, short_config, jax_cache) as cluster,
        NatsBus(nats_server.url, name="test") as bus,
    ):
        restoring = await cluster.restore(newest, "train.steps=600")
        assert await restoring.ended() == 0, restoring.said[-2000:]
        record = await ledger.read_run(bus, "again")
        manifests = await state.read_manifests(bus, "again", plan(record.leaves, record.fragments))
        await cluster.start("syncer", "s")
        learner = await cluster.start("learner", "a")
        commits = await until_commit(bus, "again", lambda c: c.version > 3 and bool(c.consumed))
        assert learner.process.returncode is None, learner.said[-2000:]
    assert record.state is RunState.OPEN
    started = {f: m.commit for f, m in manifests.items()}
    assert all(c.step > 0 for c in started.values())
    after = [c for c in commits if c.version > started[c.fragment].version]
    assert min(losses(after)) < 2.5, "it did not start from the trained parameters"


def _merged(commit: Commit) -> set[str]:
    return {c.learner for c in commit.consumed}
