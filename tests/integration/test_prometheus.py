"""The metrics as Prometheus and VictoriaMetrics store them.

``prometheus`` and ``victoria-metrics`` are Debian's packages of those names; each is used where it
is found on PATH.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit
from skerry.settings.models import RunConfig
from skerry.telemetry.metrics import (
    ACCOUNT_STORAGE_LIMIT,
    ALERT,
    MONITOR,
    WIRE_CACHED,
    MetricKind,
    of,
    prometheus_name,
)
from tests.support.backends import binary, serving
from tests.support.builders import background, checkpoint_record, consumed, evaluation
from tests.support.learners import FakeLearner
from tests.support.monitor import monitor
from tests.support.nats_server import NatsServer
from tests.support.ports import free_port
from tests.support.scripted_run import ScriptedRun

pytestmark = [pytest.mark.drill, pytest.mark.nats]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
FAST = RunConfig.model_validate({"liveness": {"pulse_s": 0.2}})
SCRAPE = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: skerry
    static_configs: [{{targets: ["{target}"]}}]
"""


class Traced(ScriptedRun):
    """A scripted run whose rounds close now, and are traced."""

    def _draft(self, index: int, version: int, step: int, tokens: int) -> Commit:
        now_ns = time.time_ns()
        draft = super()._draft(index, version, step, tokens)
        merged = consumed(identity=version, base_version=version - 1, staleness=1)
        times = {"opened_ns": now_ns - 10**9, "closed_ns": now_ns}
        return replace(draft, **times, consumed=(merged,), trace_id=TRACE)


@asynccontextmanager
async def watched_run(folder: Path) -> AsyncGenerator[str]:
    """Yield the address of a monitor that watches a run in which everything happens."""
    broker = NatsServer(folder / "broker", monitored=True)
    broker.start()
    sets = (f'metrics.broker="{broker.monitor_url}"', f'telemetry.jsonl="{folder}/rows.jsonl"')
    try:
        async with monitor(broker.url, "r", *sets) as running, NatsBus(broker.url) as bus:
            scripted = await Traced.begin(bus, "r", config=FAST)
            live = asyncio.create_task(live_on(scripted))
            assert running.process.stderr is not None
            reading = asyncio.create_task(running.process.stderr.read())
            try:
                yield running.url.removeprefix("http://")
            finally:
                for task in (live, reading):
                    task.cancel()
                await asyncio.gather(live, reading, return_exceptions=True)
    finally:
        broker.stop()


async def live_on(scripted: ScriptedRun) -> None:
    """Train, commit, checkpoint and evaluate until cancelled."""
    bus = scripted.bus
    said = evaluation(run="r", versions=(1, 1, 1), loss=3.25)
    async with background(FakeLearner(bus, "r", scripted.plan, "a").train()):
        for step in range(10**6):
            await scripted.commit_all(step=step)
            await ledger.record_checkpoint(
                bus, checkpoint_record(f"/{step}", run="r", step=step, written_ns=step)
            )
            await ledger.record_evaluation(bus, replace(said, versions=(step + 1,) * 3))
            await asyncio.sleep(0.5)


def command(name: str, folder: Path, target: str, port: int) -> list[str]:
    """Return how a backend is started that scrapes the target."""
    config = folder / "scrape.yml"
    rules = ROOT / "infra" / "prometheus" / "rules.yml"
    config.write_text(SCRAPE.format(target=target, rules=rules))
    if name == "prometheus":
        return [
            *(binary(name), f"--config.file={config}", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"),
        ]
    return [
        *(binary(name), f"-promscrape.config={config}", "-promscrape.config.strictParse=false"),
        *(f"-storageDataPath={folder}/data", f"-httpListenAddr=127.0.0.1:{port}"),
        "-search.latencyOffset=0s",
    ]


async def asked(client: httpx.AsyncClient, path: str, **query: str) -> Any:
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, (query, answer.text)
    return answer.json()["data"]


async def until_stored(client: httpx.AsyncClient, names: set[str]) -> None:
    """Wait until the backend has a sample of every name."""
    found: set[str] = set()
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not names <= found:
                found = {*(await asked(client, "/api/v1/label/__name__/values"))}
                await asyncio.sleep(0.5)
    except TimeoutError:
        msg = f"never stored: {sorted(names - found)}"
        raise AssertionError(msg) from None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["prometheus", "victoria-metrics"])
async def test_every_metric_is_stored_and_every_panel_has_an_answer(
    name: str, tmp_path: Path
) -> None:
    # Nothing is wrong with this run, its account has no limit, and its learner no region.
    mine = set(of(MONITOR)) - {ALERT, ACCOUNT_STORAGE_LIMIT, WIRE_CACHED}
    names = {
        prometheus_name(m) + ("_count" if m.kind is MetricKind.HISTOGRAM else "") for m in mine
    }
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        watched_run(tmp_path) as target,
        serving(*command(name, tmp_path, target, port), url=url, folder=tmp_path) as client,
    ):
        # No limit is set on the streams of this run but that of its window.
        await until_stored(client, names)
        await asyncio.sleep(10.0)
        silent = [
            q for q in panels() if not (await asked(client, "/api/v1/query", query=q))["result"]
        ]
        assert silent == []
        if name == "prometheus":
            await assert_rules_and_exemplars(client)


def panels() -> list[str]:
    """Return what the dashboard asks of the monitor, as Grafana would send it."""
    dashboard = json.loads((ROOT / "infra" / "grafana" / "skerry.json").read_text())
    texts = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    filled = [
        text.replace("$job", "skerry").replace("$run", "r").replace("$__rate_interval", "20s")
        for text in texts
        if "$job" in text
    ]
    # A run that is well has nothing to show of what goes wrong, nor this one of limits, regions
    # and f32 payloads.
    silent = ("uncompressed", "account_storage_limit", "wire_cached", "> 0", "> 1", "== 1")
    return [text for text in filled if not any(part in text for part in silent)]


async def assert_rules_and_exemplars(client: httpx.AsyncClient) -> None:
    """Every rule is evaluated without an error, none fires, and rounds lead to their traces."""
    groups = (await asked(client, "/api/v1/rules"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    assert {rule["health"] for rule in rules} == {"ok"}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    told = await asked(
        client,
        "/api/v1/query_exemplars",
        query="skerry_round_duration_seconds_bucket",
        start="0",
        end="9999999999",
    )
    traces = {e["labels"]["trace_id"] for series in told for e in series["exemplars"]}
    assert traces == {TRACE}
