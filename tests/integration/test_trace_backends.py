"""Traces and metrics of rounds in backends that others wrote: run by hand with ``-m soak``.

``mlflow`` (PyPI, in an environment of its own) and ``victoria-metrics`` (Debian 13's package; 12's
knows no OTLP) are used where they are on PATH.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.client import telemetry as learner_telemetry
from skerry.client.telemetry import LearnerIdentity
from skerry.protocol.contribution import id_of
from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    Pulse,
)
from skerry.settings.local import TelemetrySettings
from skerry.telemetry import export, instruments, metrics, tracing
from skerry.telemetry.export import Identity
from skerry.telemetry.metrics import MetricKind, prometheus_name
from skerry.telemetry.spans import Interval
from skerry_syncer import telemetry as syncer_telemetry
from tests.support.backends import binary, serving
from tests.support.builders import commit, consumed, header, pulse, round_, run_record
from tests.support.ports import free_port

pytestmark = pytest.mark.soak

RUN = "backends"
NOW_NS = time.time_ns()
LEARNERS = tuple(LearnerIdentity(RUN, name, 1, NOW_NS) for name in "ab")
RECORD = run_record(RUN, created_ns=NOW_NS)
READ_MLFLOW = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
client = mlflow.MlflowClient()
found, token = [], ""
while token is not None:
    page = client.search_traces(experiment_ids=["0"], max_results=100, page_token=token or None)
    found += page
    token = page.token or None
print(json.dumps({
    trace.info.trace_id.removeprefix("tr-"): [
        {"name": s.name, "id": s.span_id, "parent": s.parent_id, "links": len(s.links)}
        for s in trace.data.spans
    ]
    for trace in found
}))
"""


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
    traces = json.loads(out)
    for done in commits:
        by_id = {span["id"]: span for span in traces[done.trace_id]}
        root = by_id[tracing.span_id(done.trace_id)]
        assert (root["name"], root["parent"]) == ("round", None)
        assert all(span["parent"] in by_id for span in by_id.values() if span is not root)
        (process,) = [span for span in by_id.values() if span["name"].startswith("process ")]
        assert process["links"] == len(done.consumed)


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
    async with serving(*command, url=url, folder=tmp_path, env=clean()) as http:
        settings = TelemetrySettings(metrics_endpoint=f"{url}/opentelemetry/v1/metrics")
        await asyncio.to_thread(report, settings)
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
