"""A cluster of three brokers of which one dies or hangs, or all die at once: nothing is lost.

The commit stalls are printed (``pytest -s``); docs/durability.md quotes them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, Pulse
from skerry.protocol.subjects import Subjects
from skerry.settings.models import LogConfig, OuterConfig, RunConfig, SyncConfig
from tests.support.builders import run_record
from tests.support.cluster import until_pulse
from tests.support.history import settle
from tests.support.learners import FakeLearner
from tests.support.nats_cluster import NatsCluster

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(240)]

PLAN = plan([LeafSpec("embed", (300, 256), embedding=True), LeafSpec("w", (200, 256))], 2)
CONFIG = RunConfig(
    sync=SyncConfig(fragments=2, h_steps=8, quorum=1, merge="rda", chunk_bytes=65536),
    outer=OuterConfig(preset="nesterov"),
    log=LogConfig(replicas=3, window_bytes=256 * 1024**2),
)
DEADLINE_S = 90.0


class Seen(NamedTuple):
    """A commit that the broker has acknowledged, as a follower saw it."""

    at_s: float
    sequence: int
    commit: Commit


def stepped(learner: str, step: int, pulse: Pulse) -> bool:
    return pulse.learner == learner and pulse.step > step


@dataclass(slots=True)
class Watched:
    """A run on a cluster, and all that was acknowledged of it so far."""

    cluster: NatsCluster
    bus: NatsBus
    run: str
    learners: list[FakeLearner]
    seen: list[Seen] = field(default_factory=list[Seen])
    grown: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def watch(self) -> None:
        """Follow the ledger: every commit once, in order."""
        commits = ledger.follow_commits(self.bus, self.run)
        async with aclosing(commits):
            async for sequence, commit in commits:
                self.seen.append(Seen(asyncio.get_running_loop().time(), sequence, commit))
                async with self.grown:
                    self.grown.notify_all()

    async def more(self, count: int) -> None:
        """Return once so many more commits have been seen."""
        goal = len(self.seen) + count
        async with asyncio.timeout(DEADLINE_S), self.grown:
            await self.grown.wait_for(lambda: len(self.seen) >= goal)

    async def survive(self, what: str, fault: Callable[[], None]) -> None:
        """Strike between two commits, and see commits and pulses go on."""
        await self.more(1)
        steps = {learner.name: learner.step for learner in self.learners}
        before = len(self.seen)
        fault()
        await self.more(6)
        times = [seen.at_s for seen in self.seen[before - 1 :]]
        stall_s = max(b - a for a, b in pairwise(times))
        print(f"{what}: longest stall between commits {stall_s:.1f} s")
        for name, then in steps.items():
            await until_pulse(self.bus, self.run, partial(stepped, name, then))

    async def state_leader(self) -> int:
        return await self.cluster.leader(Subjects(self.run).shard(0).stream("STATE"))

    async def whole(self) -> None:
        """Return once every node runs and holds everything."""
        self.cluster.start()
        for spec in specs(self.run):
            await self.cluster.until_current(spec.name)


@asynccontextmanager
async def running(folder: Path, run: str) -> AsyncGenerator[Watched]:
    """Train learners under a real syncer; afterwards the history must be whole.

    Whole means: nothing violated, and every commit that was seen is still there, where it was.
    """
    with NatsCluster(folder / "cluster") as cluster:
        await cluster.ready()
        async with NatsBus(cluster.url, name="test", options=NatsOptions(patience_s=60.0)) as bus:
            await bus.declare(specs(run, replicas=3, window_bytes=CONFIG.log.window_bytes))
            await ledger.create_run(bus, run_record(run, PLAN, CONFIG.model_dump_json()))
            learners = [FakeLearner(bus, run, PLAN, name, scheme="int4") for name in ("a", "b")]
            watched = Watched(cluster, bus, run, learners)
            with (folder / "syncer.log").open("wb") as out:
                syncer = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "skerry_syncer", "--nats", cluster.url, "--run", run),
                    stdout=out,
                    stderr=out,
                )
            tasks = [asyncio.create_task(learner.train()) for learner in learners]
            tasks.append(asyncio.create_task(watched.watch()))
            try:
                await watched.more(6)
                yield watched
                assert not any(task.done() for task in tasks), "a learner gave up"
                assert syncer.returncode is None, (folder / "syncer.log").read_text()[-2000:]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if syncer.returncode is None:
                    syncer.kill()
                await syncer.wait()
            await assert_whole(watched)


async def assert_whole(watched: Watched) -> None:
    history = await settle(watched.bus, watched.run)
    assert history.violations == ()
    sequences = [seen.sequence for seen in watched.seen]
    assert sequences == sorted(set(sequences)), "the follower had a repeat"
    stored = history.commits[: len(watched.seen)]
    assert [seen.commit for seen in watched.seen] == list(stored), "an acknowledged commit is gone"


@pytest.mark.parametrize("others", [0, pytest.param(2, marks=pytest.mark.soak)])
async def test_any_one_node_may_be_killed_while_the_run_goes_on(
    tmp_path: Path, run_id: str, others: int
) -> None:
    """The leader of the state first, then, once that is back, the others in turn."""
    async with running(tmp_path, run_id) as run:
        leader = await run.state_leader()
        await run.survive("kill -9 of STATE's leader", run.cluster.nodes[leader].kill9)
        for node in ((leader + 1) % 3, (leader + 2) % 3)[:others]:
            await run.whole()
            await run.survive(f"kill -9 of n{node}", run.cluster.nodes[node].kill9)


@pytest.mark.soak
async def test_a_leader_that_hangs_is_replaced_and_wakes_up_harmless(
    tmp_path: Path, run_id: str
) -> None:
    async with running(tmp_path, run_id) as run:
        node = run.cluster.nodes[await run.state_leader()]
        await run.survive("SIGSTOP of STATE's leader", node.pause)
        assert await run.state_leader() != run.cluster.nodes.index(node)
        node.resume()
        await run.whole()
        await run.more(4)


@pytest.mark.soak
async def test_what_was_acknowledged_survives_the_death_of_all_nodes_at_once(
    tmp_path: Path, run_id: str
) -> None:
    async with running(tmp_path, run_id) as run:

        def strike() -> None:
            run.cluster.kill9()
            run.cluster.start()

        for _ in range(2):
            await run.survive("kill -9 of all three", strike)
            await run.whole()
