"""Each mode to its end, with real processes on a real broker; the ledger says which it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit, RunRecord, RunState
from skerry.settings.loading import run_config_from_json
from skerry.settings.models import RunConfig
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.replay import replay
from tests.support.cluster import Cluster, Site, until_commit
from tests.support.nats_server import NatsServer
from tests.support.tiny import BATCH, SEQUENCE, tiny

pytestmark = [pytest.mark.nats, pytest.mark.drill]


@pytest.fixture
def site(tmp_path: Path, jax_cache: Path) -> Site:
    return Site(tmp_path, jax_cache)


@pytest.fixture
def toml(tmp_path: Path, corpus: Path) -> Callable[..., Path]:
    """Write the settings of a run of a mode, of so many steps."""

    def write(mode: str, steps: int, *sync: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(tiny(corpus, steps, *sync, mode=mode))
        return path

    return write


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended: its record, its settings, and every commit but genesis."""

    record: RunRecord
    config: RunConfig
    commits: list[Commit]

    def learns(self) -> bool:
        """Return True if the newest loss is far below that of a model that knows nothing.

        How many rounds a run has depends on how busy the machine is, so no round is compared with
        an earlier one.
        """
        reported = [c.loss for commit in self.commits for c in commit.consumed]
        return [loss for loss in reported if math.isfinite(loss)][-1] < 0.6 * math.log(256)


async def to_the_end(cluster: Cluster, bus: NatsBus, *learners: str) -> Ended:
    """Start a syncer and these learners, and return what the log holds once all have ended."""
    services = [await cluster.start("syncer", "s")]
    services += [await cluster.start("learner", name) for name in learners]
    for service in services:
        assert await service.ended(240) == 0, service.said[-2000:]
    return await ended(cluster, bus)


async def ended(cluster: Cluster, bus: NatsBus) -> Ended:
    record = await ledger.read_run(bus, cluster.run)
    assert record.state is RunState.FINISHED
    finals: set[int] = set()

    def last(commit: Commit) -> bool:
        finals.update({commit.fragment} if commit.final else ())
        return len(finals) == record.fragments

    commits = await until_commit(bus, cluster.run, last)
    replayed = await replay(RunLog.of(bus, record))
    assert not replayed.wrong
    assert replayed.whole
    later = [commit for commit in commits if commit.version > 1]
    return Ended(record, run_config_from_json(record.config_json), later)


def of(commit: Commit) -> set[str]:
    return {c.learner for c in commit.consumed}


async def test_streaming_meets_in_fragments_and_always_all(
    shared_nats: NatsServer, run_id: str, site: Site, toml: Callable[..., Path]
) -> None:
    settings = ("fragments = 4", "h_steps = 16")
    async with site.run(shared_nats, run_id, toml("streaming", 160, *settings)) as (cluster, bus):
        run = await to_the_end(cluster, bus, "a", "b")
    sync = run.config.sync
    assert (sync.quorum, sync.overlap_steps, run.record.fragments) == (2, 2, 4)
    assert [commit for commit in run.commits if of(commit) != {"a", "b"}] == []
    assert {commit.fragment for commit in run.commits} == {0, 1, 2, 3}
    assert run.learns()


async def test_diloco_meets_whole_every_h_steps(
    shared_nats: NatsServer, run_id: str, site: Site, toml: Callable[..., Path]
) -> None:
    async with site.run(shared_nats, run_id, toml("diloco", 128, "h_steps = 16")) as (cluster, bus):
        run = await to_the_end(cluster, bus, "a", "b")
    assert run.record.fragments == 1
    assert [c.step for c in run.commits] == list(range(16, 129, 16))
    assert all(of(commit) == {"a", "b"} for commit in run.commits)
    assert all(c.staleness == 0 for commit in run.commits for c in commit.consumed)
    # Whoever joined last may have met the others in the first round before its own H steps.
    assert all(c.steps == 16 for commit in run.commits[2:] for c in commit.consumed)
    assert run.learns()


async def test_data_parallel_commits_every_step_once(
    shared_nats: NatsServer, run_id: str, site: Site, toml: Callable[..., Path]
) -> None:
    async with site.run(shared_nats, run_id, toml("data-parallel", 60)) as (cluster, bus):
        run = await to_the_end(cluster, bus, "a", "b")
    assert [commit.step for commit in run.commits] == list(range(1, 61))
    assert [commit.version for commit in run.commits] == list(range(2, 62))
    for commit in run.commits:
        assert [(c.learner, c.steps, c.weight) for c in commit.consumed] == [
            ("a", 1, 0.5),
            ("b", 1, 0.5),
        ]
    assert run.learns()


async def test_data_parallel_outlives_its_syncer(
    shared_nats: NatsServer, run_id: str, site: Site, toml: Callable[..., Path]
) -> None:
    async with site.run(shared_nats, run_id, toml("data-parallel", 60)) as (cluster, bus):
        syncer = await cluster.start("syncer", "s1")
        learners = [await cluster.start("learner", name) for name in ("a", "b")]
        await until_commit(bus, run_id, lambda c: c.version == 20)
        syncer.kill9()
        services = [await cluster.start("syncer", "s2"), *learners]
        for service in services:
            assert await service.ended(240) == 0, service.said[-2000:]
        run = await ended(cluster, bus)
    assert [commit.step for commit in run.commits] == list(range(1, 61))
    assert all(of(commit) == {"a", "b"} for commit in run.commits)
    assert {commit.syncer for commit in run.commits} == {"s1", "s2"}


async def test_a_single_learner_counts_each_of_its_tokens_once(
    shared_nats: NatsServer, run_id: str, site: Site, toml: Callable[..., Path]
) -> None:
    settings = ("fragments = 2", "h_steps = 16")
    async with site.run(shared_nats, run_id, toml("single", 160, *settings)) as (cluster, bus):
        run = await to_the_end(cluster, bus, "a")
    assert all(of(commit) == {"a"} for commit in run.commits)
    newest = {commit.fragment: commit for commit in run.commits}
    for commit in newest.values():
        (row,) = commit.progress
        assert row.tokens == 160 * BATCH * SEQUENCE
    assert run.learns()
