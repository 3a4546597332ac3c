"""A whole run of real processes, as a trace backend and a metrics backend get to see it."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.messages import Commit, RunState
from skerry.telemetry import metrics, spans, tracing
from skerry.telemetry.metrics import MetricKind
from tests.support.cluster import Cluster, Service
from tests.support.nats_server import NatsServer
from tests.support.otlp import Received, Receiver

pytestmark = pytest.mark.nats

TEAM = (
    ("syncer", "s"),
    ("learner", "a"),
    ("learner", "b"),
    ("checkpointer", "c"),
    ("evaluator", "e"),
)
LEARNER, SYNCER = "skerry-learner", "skerry-syncer"
ROUND = {
    (SYNCER, "round", "INTERNAL"),
    (LEARNER, "capture", "INTERNAL"),
    (LEARNER, "quantise", "INTERNAL"),
    (LEARNER, f"publish {spans.CONTRIBUTION}", "PRODUCER"),
    (SYNCER, f"receive {spans.CONTRIBUTION}", "CLIENT"),
    (SYNCER, f"process {spans.CONTRIBUTION}", "CONSUMER"),
    (SYNCER, "merge", "INTERNAL"),
    (SYNCER, f"commit {spans.GLOBAL_FRAGMENT}", "PRODUCER"),
    (LEARNER, f"receive {spans.GLOBAL_FRAGMENT}", "CLIENT"),
    (LEARNER, f"adopt {spans.GLOBAL_FRAGMENT}", "CONSUMER"),
}
"""What a round consists of: service, name and kind of its spans."""
SHAPES = {
    "sum": {MetricKind.COUNTER},
    "gauge": {MetricKind.GAUGE},
    "histogram": {MetricKind.HISTOGRAM},
}


@pytest.mark.drill
async def test_two_learners_train_to_the_end_and_every_round_is_one_trace_with_metrics_and_lines(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    jax_cache: Path,
    short_config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        monkeypatch.setenv("SKERRY_TELEMETRY__ENDPOINT", receiver.url)
        async with (
            Cluster(shared_nats.url, run_id, tmp_path, short_config, jax_cache) as cluster,
            NatsBus(shared_nats.url, name="test") as bus,
        ):
            services = [
                await cluster.start(kind, name, "--set", "train.steps=200") for kind, name in TEAM
            ]
            codes = [await service.ended(120) for service in services]
            commits = await history(bus, run_id)
            record = await ledger.read_run(bus, run_id)
    assert codes == [0] * len(TEAM), [s.said[-2000:] for s in services]
    assert record.state is RunState.FINISHED
    consumed = [contribution for commit in commits for contribution in commit.consumed]
    assert {contribution.learner for contribution in consumed} == {"a", "b"}
    losses = [one.loss for one in consumed if math.isfinite(one.loss)]
    assert losses[-1] < 0.6 * math.log(256), "no better than knowing nothing"
    for commit in commits:
        check_round(receiver.of(commit.trace_id), commit)
    full = [commit for commit in commits if is_full(receiver.of(commit.trace_id))]
    assert full, Counter((span.service, span.name) for span in receiver.spans)
    check_readers(receiver.spans, {commit.trace_id for commit in commits})
    check_metrics(receiver, run_id)
    check_lines(services, full[-1].trace_id)


async def history(bus: NatsBus, run: str) -> list[Commit]:
    """Return all commits of a run that is over, but the first of each fragment."""
    newest = await ledger.last_commits(bus, run)
    missing = {(fragment, commit.version) for fragment, commit in newest.items()}
    found: list[Commit] = []
    async with aclosing(ledger.follow_commits(bus, run)) as commits:
        async for _, commit in commits:
            found.append(commit)
            missing.discard((commit.fragment, commit.version))
            if not missing:
                break
    return [commit for commit in found if commit.version > 1]


def shapes(found: list[Received]) -> set[tuple[str, str, str]]:
    return {(span.service, span.name, span.kind) for span in found}


def is_full(found: list[Received]) -> bool:
    """Return True if a round has everything: a learner that is slow may pass one over."""
    adopted = [span for span in found if span.name == f"adopt {spans.GLOBAL_FRAGMENT}"]
    return shapes(found) >= ROUND and len(adopted) == [kind for kind, _ in TEAM].count("learner")


def check_round(found: list[Received], commit: Commit) -> None:
    """Check what holds for every trace of a round, late contributions or not."""
    by_id = {span.span_id: span for span in found}
    assert len(by_id) == len(found), "a span was emitted twice"
    (root,) = [span for span in found if not span.parent]
    assert (root.name, root.span_id) == ("round", tracing.span_id(commit.trace_id))
    assert root.attributes[spans.REASON] == commit.reason
    assert [span for span in found if span.parent and span.parent not in by_id] == []
    (process,) = [span for span in found if span.name.startswith("process ")]
    merged = {(c.learner, c.incarnation, c.identity): c for c in commit.consumed}
    assert len(process.links) == len(merged)
    for link in process.links:
        about = link.attributes
        learner, incarnation, _, identity = about[spans.MESSAGING_MESSAGE_ID].split("/")
        mark = (learner, int(incarnation), int(identity))
        assert about[spans.STALENESS] == merged[mark].staleness
        assert (link.trace_id == commit.trace_id) == (merged[mark].staleness == 0)
        assert link.span_id == tracing.span_id(link.trace_id, "publish", *mark)
    for span in found:
        if span.name.endswith(spans.GLOBAL_FRAGMENT) and span.service == LEARNER:
            assert [link.span_id for link in span.links] == [
                tracing.span_id(commit.trace_id, "commit")
            ]


def check_readers(found: list[Received], rounds: set[str]) -> None:
    """Check that checkpoints and evaluations link to the rounds whose state they read."""
    for service, name in (("skerry-checkpointer", "checkpoint"), ("skerry-evaluator", "evaluate")):
        whole = [span for span in found if (span.service, span.name) == (service, name)]
        assert whole, service
        reads = [s for s in found if s.service == service and s.name.startswith("receive ")]
        assert {read.parent for read in reads} == {span.span_id for span in whole}
        assert {link.trace_id for read in reads for link in read.links} & rounds


def check_metrics(receiver: Receiver, run: str) -> None:
    """Check that what is emitted is what the table says, no less and no more."""
    table = {metric.name: metric for metric in metrics.ALL}
    emitted: dict[str, set[str]] = {}
    for series in receiver.series.values():
        metric = table[series.name]
        assert series.unit == metric.unit
        assert metric.kind in SHAPES[series.kind], series
        for attributes, _ in series.points:
            assert attributes.keys() == set(metric.attributes), series
            assert attributes[metrics.RUN] == run
        emitted.setdefault(series.service.removeprefix("skerry-"), set()).add(series.name)
    for service, names in emitted.items():
        # This model has no experts, and this run no moving average.
        unused = {metrics.EXPERT_SHARE, metrics.HELD_OUT_AVERAGE, metrics.WIRE_CACHED}
        wanted = {*metrics.of(service)} - unused
        assert names == {m.name for m in wanted}, service
    assert emitted.keys() == {kind for kind, _ in TEAM}


def check_lines(services: list[Service], trace_id: str) -> None:
    """Check that a round has one line in each service that took part, and all name its trace."""
    for service, event in zip(
        services, ["round_committed", "round_adopted", "round_adopted"], strict=False
    ):
        lines = [json.loads(line) for line in service.said.splitlines() if line.startswith("{")]
        about: list[dict[str, Any]] = [line for line in lines if line.get("trace_id") == trace_id]
        assert [line["event"] for line in about].count(event) == 1, service.log
        assert all(len(line["span_id"]) == 16 for line in about)


@pytest.mark.drill
async def test_a_collector_that_hangs_stops_neither_training_nor_its_end(
    shared_nats: NatsServer,
    run_id: str,
    tmp_path: Path,
    jax_cache: Path,
    short_config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        receiver.held = threading.Event()
        monkeypatch.setenv("SKERRY_TELEMETRY__ENDPOINT", receiver.url)
        monkeypatch.setenv("SKERRY_TELEMETRY__METRICS_INTERVAL_S", "0.5")
        async with Cluster(shared_nats.url, run_id, tmp_path, short_config, jax_cache) as cluster:
            services = [
                await cluster.start("syncer", "s"),
                await cluster.start("learner", "a", "--set", "train.steps=40"),
            ]
            codes = [await service.ended(120) for service in services]
        assert codes == [0, 0], [s.said[-2000:] for s in services]
        assert receiver.requests > 0
        assert all('"telemetry_unsent"' in service.said for service in services)
