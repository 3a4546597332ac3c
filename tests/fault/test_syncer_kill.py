"""kill -9 of the syncer in every phase of a commit: nothing is lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.outer import make_outer
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from tests.support.builders import run_record
from tests.support.history import History, read_history
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault]

PLAN = plan([LeafSpec("embed", (300, 256), embedding=True), LeafSpec("w", (200, 256))], 2)
CONFIG = RunConfig(
    sync=SyncConfig(fragments=2, h_steps=8, quorum=1, merge="rda", chunk_bytes=65536),
    outer=OuterConfig(preset="nesterov"),
)
CRASHING = Path(__file__).parent / "crashing_syncer.py"
VERSIONS = 8

KEPT = "manifest, no ledger record"
"""The phase that every run of the tests kills in; a drill kills in the others."""

PHASES = {
    "first chunk not written": (r"state\.1\.\d\.0$", 3, "before"),
    "some chunks written": (r"state\.\d\.\d\.2$", 5, "after"),
    "all chunks, no manifest": (r"\.manifest$", 6, "before"),
    "manifest, no ledger record": (r"\.manifest$", 6, "after"),
    "ledger record written": (r"ledger\.commit", 6, "after"),
    "genesis half written": (r"\.manifest$", 1, "after"),
    "round opened": (r"round\.", 4, "after"),
}


@asynccontextmanager
async def learners(bus: NatsBus, run: str) -> AsyncGenerator[None, None]:
    tasks = [
        asyncio.create_task(FakeLearner(bus, run, PLAN, name, scheme="int4").train())
        for name in ("a", "b")
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_versions(bus: NatsBus, run: str, wanted: int) -> None:
    newest: dict[int, int] = {}
    commits = ledger.follow_commits(bus, run)
    async with aclosing(commits):
        async for _, commit in commits:
            newest[commit.fragment] = commit.version
            if len(newest) == 2 and min(newest.values()) >= wanted:
                return


async def crash_then_heal(server: NatsServer, run: str, phase: str) -> History:
    pattern, count, when = PHASES[phase]
    async with NatsBus(server.url, name="test") as bus:
        await bus.declare(specs(run))
        await ledger.create_run(bus, run_record(run, PLAN, CONFIG.model_dump_json()))
        crashing = await asyncio.create_subprocess_exec(
            sys.executable, CRASHING, server.url, run, pattern, str(count), when
        )
        async with learners(bus, run):
            assert await crashing.wait() == -signal.SIGKILL, "the fault did not fire"
            healed = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "skerry_syncer", "--nats", server.url, "--run", run
            )
            try:
                await until_versions(bus, run, VERSIONS)
            finally:
                healed.kill()
                await healed.wait()
        outer = make_outer("nesterov", lr=None, momentum=None, h_steps=8)
        return await read_history(bus, run, PLAN, outer, "rda")


@pytest.mark.parametrize(
    "phase", [pytest.param(p, marks=() if p == KEPT else pytest.mark.drill) for p in PHASES]
)
async def test_history_is_whole_after_a_kill(
    shared_nats: NatsServer, run_id: str, phase: str
) -> None:
    history = await crash_then_heal(shared_nats, run_id, phase)
    assert history.violations == ()
    syncers = {commit.syncer for commit in history.commits}
    assert history.commits[-1].syncer != "crashing"
    assert syncers == {"crashing", history.commits[-1].syncer}
    assert {c.learner for commit in history.commits for c in commit.consumed} == {"a", "b"}
