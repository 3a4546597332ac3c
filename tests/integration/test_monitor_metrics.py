"""The health monitor as a process: what a scraper gets, and the file that is always written."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skerry.log.nats.bus import NatsBus
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Metric, MetricKind, of, prometheus_name
from tests.support.builders import background
from tests.support.learners import FakeLearner
from tests.support.monitor import DEADLINE_S, monitor
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import STARTS, ScriptedRun

pytestmark = pytest.mark.nats

FAST = RunConfig.model_validate({"liveness": {"pulse_s": 0.05}})
NOT_YET = {
    metrics.HELD_OUT_LOSS,
    metrics.HELD_OUT_BEST,
    metrics.HELD_OUT_RECENT,
    metrics.CHECKPOINT_SIZE,
    metrics.ACCOUNT_STORAGE_LIMIT,
    metrics.WIRE_CACHED,
}
"""Nobody evaluates here, nor writes checkpoints, this account has no limit, and no region."""


def sample(metric: Metric) -> str:
    return prometheus_name(metric) + ("_count" if metric.kind is MetricKind.HISTOGRAM else "")


def values(text: str) -> dict[str, list[float]]:
    """Return the values of a scrape by name."""
    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append(one.value)
    return found


async def test_a_live_run_is_scraped_and_written_down(tmp_path: Path) -> None:
    broker = NatsServer(tmp_path / "broker", monitored=True)
    broker.start()
    rows = tmp_path / "rows.jsonl"
    sets = (
        *(f'metrics.broker="{broker.monitor_url}"', "metrics.every_s=0.05"),
        f'telemetry.jsonl="{rows}"',
    )
    wanted = {sample(metric) for metric in of("health-monitor") if metric not in NOT_YET}
    try:
        async with monitor(broker.url, "r", *sets) as running, NatsBus(broker.url) as bus:
            scripted = await ScriptedRun.begin(bus, "r", config=FAST)
            await scripted.commit_all()
            await scripted.commit_all()
            await bus.publish(Subjects("r").pulse("bad"), b"no pulse")
            async with background(FakeLearner(bus, "r", scripted.plan, "a").train()):
                text = await running.until("/metrics", lambda text: wanted <= values(text).keys())
            running.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DEADLINE_S):
                assert await running.process.wait() == 0
    finally:
        broker.stop()
    assert sum(values(text)["skerry_monitor_malformed_total"]) == 1
    assert values(text)["skerry_broker_up"] == [1]
    last = json.loads(rows.read_text().splitlines()[-1])
    assert last["run"] == "r"
    assert last["skerry.monitor.malformed{message=pulse}"] == 1
    assert last["skerry.learner.incarnation{learner=a}"] == STARTS + 1
