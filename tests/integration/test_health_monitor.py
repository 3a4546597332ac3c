"""The health monitor as a process, against a real nats-server and a learner that dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry.settings.models import RunConfig
from tests.support.builders import background
from tests.support.learners import FakeLearner
from tests.support.monitor import DEADLINE_S, monitor
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import STARTS, ScriptedRun

pytestmark = pytest.mark.nats

FAST = RunConfig.model_validate({"liveness": {"pulse_s": 0.1}})


@asynccontextmanager
async def fake_learner(bus: Bus, scripted: ScriptedRun) -> AsyncGenerator[None]:
    """A learner that pulses until the block ends, then is silent at once."""
    learner = FakeLearner(bus, scripted.record.run, scripted.plan, "a")
    async with background(learner.train()):
        yield


def alive(answer: dict[str, Any]) -> bool:
    return bool(answer["run"]["alive"])


def heard(answer: dict[str, Any]) -> bool:
    return alive(answer) and bool(answer["learners"][0]["heard"])


def started(answer: dict[str, Any]) -> int:
    return int(answer["learners"][0]["incarnation"])


async def test_it_reports_a_learner_that_falls_silent_and_comes_back(
    shared_nats: NatsServer, run_id: str
) -> None:
    """On a busy machine a learner may be gone and back again before it falls silent for good."""
    async with NatsBus(shared_nats.url) as bus, monitor(shared_nats.url, run_id) as running:
        scripted = await ScriptedRun.begin(bus, run_id, config=FAST)
        await scripted.commit_all()
        async with fake_learner(bus, scripted):
            await running.until("/api/run", heard)
        await running.line("learner_gone", incarnation=STARTS + 1)
        await running.until("/api/run", lambda run: not alive(run))
        async with fake_learner(bus, scripted):
            await running.line("learner_back", incarnation=STARTS + 2)
            await running.until("/api/run", lambda run: heard(run) and started(run) == STARTS + 2)
        await running.line("learner_gone", incarnation=STARTS + 2)
        await running.until("/api/run", lambda run: not alive(run))


async def test_the_broker_reports_a_dead_process_before_its_silence_does(tmp_path: Path) -> None:
    broker = NatsServer(tmp_path / "broker", monitored=True)
    broker.start()
    asking = f'metrics.broker="{broker.monitor_url}"'
    try:
        async with NatsBus(broker.url) as bus, monitor(broker.url, "r", asking) as running:
            scripted = await ScriptedRun.begin(bus, "r", config=RunConfig())
            await scripted.commit_all()
            async with NatsBus(broker.url, name="a") as own, fake_learner(own, scripted):
                await running.until("/api/run", heard)
            gone = await running.line("learner_gone")
            while gone["reason"] != "disconnected":  # before its first pulse it was missed too
                gone = await running.line("learner_gone")
    finally:
        broker.stop()
    assert gone["learner"] == "a"


async def test_it_waits_for_a_run_and_stops_at_a_signal(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with monitor(shared_nats.url, run_id) as running:
        answer = await running.until("/healthz", lambda told: told["ok"])
        assert answer["status"] == "waiting"
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), DEADLINE_S) == 0


async def test_it_ends_with_the_run_where_asked(shared_nats: NatsServer, run_id: str) -> None:
    async with (
        NatsBus(shared_nats.url) as bus,
        monitor(shared_nats.url, run_id, options=("--until-finished",)) as running,
    ):
        scripted = await ScriptedRun.begin(bus, run_id, config=FAST)
        await scripted.finish()
        assert await asyncio.wait_for(running.process.wait(), DEADLINE_S) == 0
