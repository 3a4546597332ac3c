"""Traces and metrics of rounds in backends that others wrote: run by hand with ``-m soak``.

``mlflow`` and ``phoenix`` (PyPI: mlflow, arize-phoenix), each in an environment of its own, and
``victoria-metrics`` (Debian 13's package; 12's knows no OTLP) are used where they are on PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from skerry.protocol.contribution import id_of
from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    Pulse,
)
from skerry.settings.models import TelemetrySettings
from skerry.telemetry import export, instruments, metrics, tracing
from skerry.telemetry.export import Identity
from skerry.telemetry.metrics import MetricKind, prometheus_name
from skerry.telemetry.spans import Interval
from skerry_learner.sync import telemetry as learner_telemetry
from skerry_learner.sync.telemetry import LearnerIdentity
from skerry_syncer import telemetry as syncer_telemetry
from tests.support.builders import commit, consumed, header, pulse, round_, run_record

pytestmark = pytest.mark.soak

DEADLINE_S = 300.0
RUN = "backends"
NOW_NS = time.time_ns()
LEARNERS = tuple(LearnerIdentity(RUN, name, 1, NOW_NS) for name in "ab")
RECORD = run_record(RUN, created_ns=NOW_NS)
READ_MLFLOW = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
client = mlflow.MlflowClient()
found, token = [], None
while True:
    page = client.search_traces(experiment_ids=["0"], max_results=100, page_token=token)
    found += page
    token = page.token
    if not token:
        break
def said(link):
    return link if isinstance(link, dict) else vars(link)
traces = [
    {
        "trace": trace.info.trace_id.removeprefix("tr-"),
        "spans": [
            {
                "name": span.name,
                "id": span.span_id,
                "parent": span.parent_id,
                "links": [str(said(link)) for link in span.links],
            }
            for span in trace.data.spans
        ],
    }
    for trace in found
]
print(json.dumps(traces, default=str))
"""


def binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@asynccontextmanager
async def serving(
    *command: str, url: str, folder: Path, env: Mapping[str, str] | None = None
) -> AsyncGenerator[str]:
    """Run a backend until the block ends; yield its address once it answers."""
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, cwd=folder, env={**(env or {})}
        )
    try:
        async with httpx.AsyncClient() as http, asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(httpx.TransportError):
                    await http.get(url)
                    break
                assert started.returncode is None, log.name
                await asyncio.sleep(0.2)  # it sends no event when it is ready
        yield url
    finally:
        with suppress(ProcessLookupError):
            started.terminate()
        await started.wait()


def clean(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SKERRY_", "OTEL_"))} | more


def offered(learner: LearnerIdentity, version: int) -> ContributionHeader:
    place = learner.publishing(0, version, version)
    trace = {"trace_parent": tracing.trace_parent(place), "captured_ns": NOW_NS}
    return header(version, learner.name, base_version=version - 1, steps=24, tokens=512, **trace)


def committed(version: int, offers: list[ContributionHeader]) -> Commit:
    rows = [
        consumed(
            sent.learner,
            sent.identity,
            base_version=sent.base_version,
            staleness=version - sent.round_version,
            steps=24,
            tokens=512,
            weight=0.5,
        )
        for sent in offers
    ]
    times: dict[str, Any] = {
        "opened_ns": NOW_NS,
        "closed_ns": NOW_NS + 10**8,
        "quorum_s": 0.05,
        "grace_s": 0.05,
    }
    trace = LEARNERS[0].trace(0, version)
    return commit(version, run=RUN, consumed=tuple(rows), trace_id=trace, **times)


@contextmanager
def sending(service: str, name: str, settings: TelemetrySettings) -> Generator[None]:
    exporters = export.Telemetry(Identity(service, RUN, name, "1.0"), settings, print)
    try:
        yield
    finally:
        assert exporters.stop(30.0), "not everything was sent"


def report(settings: TelemetrySettings) -> list[Commit]:
    """Report three rounds as two learners and a syncer do; b is a round late each time."""
    a, b = LEARNERS
    took = Interval(NOW_NS, NOW_NS + 10**7)
    with sending("syncer", "s", settings):  # traces are kept only while exported
        rounds = {v: [offered(a, v), *([offered(b, v - 1)] if v > 2 else [])] for v in (2, 3, 4)}
    commits = [committed(version, merged) for version, merged in rounds.items()]
    for learner in LEARNERS:
        with sending("learner", learner.name, settings):
            telemetry = learner_telemetry.LearnerTelemetry(learner)
            learner_telemetry.observe(learner, lambda: beat(learner.name))  # noqa: B023 - read before it changes
            for done in commits:
                sent = offered(learner, done.version)
                telemetry.captured(sent, took)
                telemetry.quantised(sent, "int4", took)
                telemetry.published(sent, 1000, took.end_ns)
                telemetry.received(done, 1000, took)
                telemetry.adopted(done, done.version - 1, "rebase", took)
                of = {metrics.RUN: RUN, metrics.LEARNER_NAME: learner.name}
                instruments.record(metrics.STEP_DURATION, 0.1, of)
                of = {metrics.RUN: RUN, metrics.OPERATION: "encode"}
                instruments.record(metrics.CODEC_DURATION, 0.1, of)
    with sending("syncer", "s", settings):
        of = {metrics.RUN: RUN, metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, 0.1, of)
        for done in commits:
            origins = {id_of(sent): sent.trace_parent for sent in rounds[done.version]}
            opened = round_(done.version, run=RUN, opened_ns=NOW_NS)
            times = syncer_telemetry.CommitTimes(
                done.closed_ns, done.closed_ns + 10**7, done.closed_ns + 10**8
            )
            syncer_telemetry.RoundTelemetry(RECORD, "rda").committed(done, opened, origins, times)
    return commits


def beat(name: str) -> Pulse:
    amounts = {"busy_s": 6.0, "alive_s": 10.0, "bytes_up": 100, "bytes_down": 200}
    return pulse(name, 40, run=RUN, sent_ns=NOW_NS, steps=30, tokens=960, loss=2.5, **amounts)


async def test_mlflow_shows_each_round_as_one_trace_with_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = binary("mlflow")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = (mlflow, "server", "--backend-store-uri", f"sqlite:///{tmp_path}/m.db")
    env = clean(MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-mlflow-experiment-id=0")
    listening = serving(*command, "--port", str(port), url=url, folder=tmp_path, env=env)
    async with listening:
        commits = await asyncio.to_thread(
            report, TelemetrySettings(traces_endpoint=f"{url}/v1/traces")
        )
        reader = await asyncio.create_subprocess_exec(
            mlflow.replace("/bin/mlflow", "/bin/python"),
            *("-c", READ_MLFLOW, url),
            stdout=asyncio.subprocess.PIPE,
            stderr=DEVNULL,
            env=env,
        )
        out, _ = await reader.communicate()
    traces = {trace["trace"]: trace["spans"] for trace in json.loads(out)}
    for done in commits:
        by_id = {span["id"]: span for span in traces[done.trace_id]}
        root = by_id[tracing.span_id(done.trace_id)]
        assert (root["name"], root["parent"]) == ("round", None)
        assert all(span["parent"] in by_id for span in by_id.values() if span is not root)
        (process,) = [span for span in by_id.values() if span["name"].startswith("process ")]
        assert len(process["links"]) == len(done.consumed)


async def test_phoenix_shows_each_round_as_one_trace(tmp_path: Path) -> None:
    phoenix = binary("phoenix")
    url = f"http://127.0.0.1:{(port := free_port())}"
    env = clean(
        PHOENIX_PORT=str(port),
        PHOENIX_GRPC_PORT=str(free_port()),
        PHOENIX_HOST="127.0.0.1",
        PHOENIX_WORKING_DIR=str(tmp_path),
    )
    async with serving(phoenix, "serve", url=url, folder=tmp_path, env=env):
        commits = await asyncio.to_thread(
            report, TelemetrySettings(traces_endpoint=f"{url}/v1/traces")
        )
        wanted = {tracing.span_id(done.trace_id) for done in commits}
        async with asyncio.timeout(DEADLINE_S):
            # It takes spans in at its leisure.
            while not wanted <= (by_id := await phoenix_spans(url)).keys():  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    for done in commits:
        root = by_id[tracing.span_id(done.trace_id)]
        assert (root["name"], root["parent_id"]) == ("round", None)
        inside = [s for s in by_id.values() if s["context"]["trace_id"] == done.trace_id]
        names = {span["name"].split()[0] for span in inside}
        assert {"round", "process", "merge", "commit", "receive", "publish"} <= names


async def phoenix_spans(url: str) -> dict[str, dict[str, Any]]:
    """Return all spans that Phoenix has, by id."""
    found: dict[str, dict[str, Any]] = {}
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        cursor: str | None = ""
        while cursor is not None:
            query = {"limit": 1000} | ({"cursor": cursor} if cursor else {})
            page = (await http.get("/v1/projects/default/spans", params=query)).json()
            found |= {span["context"]["span_id"]: span for span in page.get("data", ())}
            cursor = page.get("next_cursor")
    return found


async def test_victoria_metrics_names_what_it_gets_by_otlp_as_the_table_does(
    tmp_path: Path,
) -> None:
    victoria = binary("victoria-metrics")
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = (
        victoria,
        f"-storageDataPath={tmp_path}/vm",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-opentelemetry.usePrometheusNaming",
        "-search.latencyOffset=0s",
    )
    async with serving(*command, url=url, folder=tmp_path, env=clean()):
        settings = TelemetrySettings(metrics_endpoint=f"{url}/opentelemetry/v1/metrics")
        await asyncio.to_thread(report, settings)
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            await http.get("/internal/force_flush")
            answer = await http.get("/api/v1/series", params={"match[]": f'{{run="{RUN}"}}'})
    series = [dict(row) for row in answer.json()["data"]]
    names = {row["__name__"] for row in series}
    for service in ("learner", "syncer"):
        for metric in metrics.of(service):
            spelt = prometheus_name(metric)
            wanted = f"{spelt}_bucket" if metric.kind is MetricKind.HISTOGRAM else spelt
            assert wanted in names, metric
    assert {row["learner"] for row in series if "learner" in row} == {"a", "b"}
