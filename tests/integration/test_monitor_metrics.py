"""The health monitor as a process: what a scraper gets, and the file that is always written."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skerry.log.nats.bus import NatsBus
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Metric, MetricKind, of, prometheus_name
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import STARTS, ScriptedRun

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nats

DEADLINE_S = 60.0
FAST = RunConfig.model_validate({"liveness": {"pulse_s": 0.05}})
NOT_YET = {
    metrics.HELD_OUT_LOSS,
    metrics.HELD_OUT_BEST,
    metrics.HELD_OUT_RECENT,
    metrics.CHECKPOINT_SIZE,
    metrics.ACCOUNT_STORAGE_LIMIT,
}
"""Nobody evaluates here, nor writes checkpoints, and this account has no limit."""


def sample(metric: Metric) -> str:
    return prometheus_name(metric) + ("_count" if metric.kind is MetricKind.HISTOGRAM else "")


async def listening(process: asyncio.subprocess.Process) -> str:
    """Return the address that the monitor says it listens on."""
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while data := await process.stderr.readline():
            told = json.loads(data)
            if told["event"] == "health_listening":
                return f"http://127.0.0.1:{told['port']}"
    msg = "the monitor ended without listening"
    raise AssertionError(msg)


async def scraped(url: str, wanted: set[str]) -> dict[str, list[float]]:
    """Scrape until there is a sample of every wanted name; return the values by name."""
    found: dict[str, list[float]] = {}
    try:
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(base_url=url) as client:
            while not wanted <= found.keys():
                found = {}
                for family in text_string_to_metric_families((await client.get("/metrics")).text):
                    for sample in family.samples:
                        found.setdefault(sample.name, []).append(sample.value)
                await asyncio.sleep(0)
    except TimeoutError:
        msg = f"never told: {sorted(wanted - found.keys())}"
        raise AssertionError(msg) from None
    return found


async def test_a_live_run_is_scraped_and_written_down(tmp_path: Path) -> None:
    broker = NatsServer(tmp_path / "broker", monitored=True)
    broker.start()
    rows = tmp_path / "rows.jsonl"
    sets = [
        *("health.port=0", f'metrics.broker="{broker.monitor_url}"', "metrics.every_s=0.05"),
        f'telemetry.jsonl="{rows}"',
    ]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "skerry_health_monitor", "--nats", broker.url, "--run", "r"),
        *(word for text in sets for word in ("--set", text)),
        stderr=PIPE,
    )
    try:
        url = await listening(process)
        async with NatsBus(broker.url) as bus:
            scripted = await ScriptedRun.begin(bus, "r", config=FAST)
            await scripted.commit_all()
            await scripted.commit_all()
            await bus.publish(Subjects("r").pulse("bad"), b"no pulse")
            training = asyncio.create_task(FakeLearner(bus, "r", scripted.plan, "a").train())
            told = await scraped(url, {sample(m) for m in of("health-monitor") if m not in NOT_YET})
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            _, rest = await process.communicate()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        broker.stop()
    assert process.returncode == 0, rest
    assert sum(told["skerry_monitor_malformed_total"]) == 1
    assert told["skerry_broker_up"] == [1]
    last = json.loads(rows.read_text().splitlines()[-1])
    assert last["run"] == "r"
    assert last["skerry.monitor.malformed{message=pulse}"] == 1
    assert last["skerry.learner.incarnation{learner=a}"] == STARTS + 1
