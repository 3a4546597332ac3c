"""Whole runs of real processes on a real broker."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from skerry.algorithm.fragments import plan
from skerry.log import ledger, state
from skerry.protocol.messages import Commit, RunState
from skerry.settings.local import LearnerSettings
from tests.support.cluster import Site, until_commit
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats


@pytest.fixture
def site(tmp_path: Path, jax_cache: Path) -> Site:
    return Site(tmp_path, jax_cache)


def losses(commits: list[Commit]) -> list[float]:
    reported = [c.loss for commit in commits if commit.version > 1 for c in commit.consumed]
    return [loss for loss in reported if math.isfinite(loss)]


@pytest.mark.drill
async def test_killed_learner_comes_back_with_the_latest_state(
    shared_nats: NatsServer, run_id: str, site: Site, tiny_config: Path
) -> None:
    async with site.run(shared_nats, run_id, tiny_config) as (cluster, bus):
        await cluster.start("syncer", "s")
        victim = await cluster.start("learner", "a")
        await cluster.start("learner", "b")
        await until_commit(bus, run_id, lambda c: "a" in _merged(c) and c.version > 2)
        victim.kill9()
        await victim.ended()
        before = await ledger.last_commits(bus, run_id)
        dead = {f: c.version for f, c in before.items()}
        behind = set(dead)

        def moved_on(commit: Commit) -> bool:
            if commit.version > dead[commit.fragment] + 3:
                behind.discard(commit.fragment)
            return not behind

        await until_commit(bus, run_id, moved_on)
        await cluster.start("learner", "a")
        commits = await until_commit(
            bus, run_id, lambda c: any(r.learner == "a" and r.incarnation == 2 for r in c.consumed)
        )
    merged = [c for c in commits[-1].consumed if (c.learner, c.incarnation) == ("a", 2)]
    assert merged[0].base_version > dead[commits[-1].fragment], "it did not catch up"
    assert merged[0].step > 0
    # A first contribution that took longer than `max_staleness` rounds is refused, as its record
    # in the ledger says: then another one follows on its data, and is the first that is merged.
    sent = [(k.fragment, c) for k in commits for c in (*k.consumed, *k.refused) if c.learner == "a"]
    fragment = commits[-1].fragment
    back = [c for f, c in sent if f == fragment and c.incarnation == 2]
    first = min(back, key=lambda c: c.identity)
    assert first.identity == 1
    old = [c.cursor_to for _, c in sent if c.incarnation == 1]
    assert first.cursor_from <= max(old), "it left a gap in its data"


@pytest.mark.drill
async def test_a_learner_yields_the_cpu_to_other_services(
    shared_nats: NatsServer, run_id: str, site: Site, tiny_config: Path
) -> None:
    async with site.run(shared_nats, run_id, tiny_config) as (cluster, bus):
        syncer = await cluster.start("syncer", "s")
        learner = await cluster.start("learner", "a")
        await until_commit(bus, run_id, lambda c: c.version > 1)
        trains, merges = (
            os.getpriority(os.PRIO_PROCESS, service.process.pid) for service in (learner, syncer)
        )
    assert trains == min(19, merges + LearnerSettings().nice)


@pytest.mark.drill
async def test_newer_incarnation_makes_the_older_stop(
    shared_nats: NatsServer, run_id: str, site: Site, tiny_config: Path
) -> None:
    async with site.run(shared_nats, run_id, tiny_config) as (cluster, bus):
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


@pytest.mark.drill
async def test_resume_from_a_checkpoint_into_an_empty_broker(
    shared_nats: NatsServer,
    nats_server: NatsServer,
    run_id: str,
    site: Site,
    short_config: Path,
) -> None:
    folder = site.folder / "checkpoints" / run_id
    async with site.run(shared_nats, run_id, short_config) as (cluster, _):
        services = [
            await cluster.start(kind, name)
            for kind, name in (("syncer", "s"), ("checkpointer", "c"), ("learner", "a"))
        ]
        for service in services:
            assert await service.ended() == 0, service.said[-2000:]
    newest = max(p for p in folder.iterdir() if p.is_dir())
    async with site.run(nats_server, "again", short_config) as (cluster, bus):
        restoring = await cluster.restore(newest, "train.steps=900")
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
