"""kill -9 of the syncer in every phase of a commit: nothing is lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from tests.support.audited import until_version
from tests.support.builders import background, run_record
from tests.support.history import History, read_history
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault]

PLAN = plan([LeafSpec("embed", (300, 256), embedding=True), LeafSpec("w", (200, 256))], 2)
CONFIG = RunConfig(
    sync=SyncConfig(fragments=2, h_steps=8, quorum=1, merge="rda", chunk_bytes=16384),
    outer=OuterConfig(preset="nesterov"),
)
FAILING = Path(__file__).parent / "failing_service.py"
VERSIONS = 8

KEPT = "manifest, no ledger record"
"""The phase that every run of the tests kills in; a drill kills in the others."""

PHASES = {
    "first chunk not written": (r"state\.0\.1\.\w+\.\d+\.0$", 3, "before"),
    "some chunks written": (r"state\.0\.\d\.\w+\.\d+\.2$", 5, "after"),
    "all chunks, no manifest": (r"\.manifest$", 6, "before"),
    "manifest, no ledger record": (r"\.manifest$", 6, "after"),
    "ledger record written": (r"ledger\.commit", 6, "after"),
    "genesis half written": (r"\.manifest$", 1, "after"),
    "round opened": (r"round\.", 4, "after"),
}


async def crash_then_heal(server: NatsServer, run: str, phase: str) -> History:
    pattern, count, when = PHASES[phase]
    async with NatsBus(server.url, name="test") as bus:
        await bus.declare(specs(run))
        await ledger.create_run(bus, run_record(run, PLAN, CONFIG.model_dump_json()))
        crashing = await asyncio.create_subprocess_exec(
            *(sys.executable, FAILING, server.url, run, "crashing", "syncer", "-", "SIGKILL"),
            *(pattern, str(count), when),
        )
        learners = [FakeLearner(bus, run, PLAN, name, scheme="int4").train() for name in "ab"]
        async with background(*learners):
            try:
                async with asyncio.timeout(60):
                    await crashing.wait()
            finally:
                if crashing.returncode is None:
                    crashing.kill()
                    pytest.fail("the fault did not fire")
            healed = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "skerry_syncer", "--nats", server.url, "--run", run
            )
            try:
                await until_version(bus, run, VERSIONS)
            finally:
                healed.kill()
                await healed.wait()
        return await read_history(bus, run)


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
