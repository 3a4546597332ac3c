"""The exporters of the SDK, with a real receiver at the other end."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.metrics import Observation
from opentelemetry.semconv.schemas import Schemas
from opentelemetry.trace import Link

from skerry.service.reporting import STOP_S
from skerry.settings.local import TelemetrySettings
from skerry.telemetry import export, instruments, lines, metrics, spans, tracing
from skerry.telemetry.export import Identity
from skerry.telemetry.spans import FinishedSpan, Interval, Messages, SpanEvent
from tests.support.otlp import Receiver

IDENTITY = Identity("syncer", "run", "s", "1.0", broker=("nats", 4222))
TRACE = tracing.trace_id("run", 0, 2)
OF = {metrics.RUN: "run"}


@pytest.fixture(autouse=True)
def senders_end() -> Iterator[None]:
    """See that what an unanswered sending left running has ended: it draws from ``random``."""
    before = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
        assert not thread.is_alive(), thread.name


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as listening:
        yield listening


@contextmanager
def sending(url: str) -> Generator[export.Telemetry]:
    """Send everything to ``url``; all of it has arrived once the block ends."""
    telemetry = export.Telemetry(IDENTITY, TelemetrySettings(endpoint=url), lambda *_: None)
    try:
        yield telemetry
    finally:
        telemetry.stop(STOP_S)


def span(operation: str, messages: Messages | None = None) -> FinishedSpan:
    place, root = tracing.context(TRACE, operation), tracing.context(TRACE)
    return FinishedSpan(operation, place, root, Interval(1_000, 2_000), messages=messages)


def test_a_span_arrives_under_the_ids_it_was_emitted_with(receiver: Receiver) -> None:
    with sending(receiver.url):
        place, root = tracing.context(TRACE, "a"), tracing.context(TRACE)
        took, events = Interval(1_000, 2_000), (SpanEvent("e", 1_500),)
        about = {spans.FRAGMENT: 3}
        messages = Messages("skerry.{run}", "skerry.r", "7")
        tracing.emit(FinishedSpan("receive", place, root, took, about, messages, events=events))
        tracing.emit(FinishedSpan("round", root, None, Interval(2_000, 1_000)))
    got, whole = receiver.spans
    assert (got.trace_id, got.span_id) == (TRACE, tracing.span_id(TRACE, "a"))
    assert (got.service, got.instance, got.kind) == ("skerry-syncer", "run/s", "CLIENT")
    assert (got.start_ns, got.end_ns, got.events) == (1_000, 2_000, ("e",))
    assert got.name == "receive skerry.{run}"
    assert got.attributes == {
        spans.FRAGMENT: 3,
        "messaging.system": "nats",
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.template": "skerry.{run}",
        "messaging.destination.name": "skerry.r",
        "messaging.message.id": "7",
        "messaging.client.id": "s",
        "server.address": "nats",
        "server.port": 4222,
    }
    assert whole.attributes == {}
    assert got.parent == whole.span_id == tracing.span_id(TRACE)
    assert (whole.parent, whole.kind, whole.start_ns, whole.end_ns) == ("", "INTERNAL", 2000, 2000)


def test_the_resource_names_schema_host_and_run(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=lab")
    with sending(receiver.url):
        tracing.emit(span("merge"))
        instruments.record(metrics.MERGE_DURATION, 0.2, OF)
    resource = receiver.spans[0].resource
    assert resource["host.name"] == socket.gethostname()
    assert (resource[spans.RUN], resource["deployment.environment"]) == ("run", "lab")
    assert receiver.schemas == {export.SCHEMA_URL}
    assert export.SCHEMA_URL in {schema.value for schema in Schemas}
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node-7")
    assert IDENTITY.resource().attributes["host.name"] == "node-7"


def test_threads_emit_spans_at_once_without_mixing_their_ids(receiver: Receiver) -> None:
    names = [f"{thread}-{number}" for thread in range(4) for number in range(100)]

    def emit(thread: int) -> None:
        for name in names[100 * thread : 100 * (thread + 1)]:
            tracing.emit(span(name))

    with sending(receiver.url):
        threads = [threading.Thread(target=emit, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {s.name: s.span_id for s in receiver.spans} == {
        name: tracing.span_id(TRACE, name) for name in names
    }


def test_a_span_keeps_the_links_of_a_large_fleet(receiver: Receiver) -> None:
    with sending(receiver.url):
        links = tuple(
            Link(tracing.context(TRACE, "publish", n), {spans.STALENESS: n}) for n in range(300)
        )
        place, took = tracing.context(TRACE, "process"), Interval(1, 2)
        tracing.emit(FinishedSpan("process", place, None, took, links=links))
    (got,) = receiver.spans
    assert [link.attributes[spans.STALENESS] for link in got.links] == list(range(300))
    assert got.links[7].span_id == tracing.span_id(TRACE, "publish", 7)


def test_metrics_arrive_with_their_units(receiver: Receiver) -> None:
    with sending(receiver.url):
        instruments.record(metrics.MERGE_DURATION, 0.2, OF)
        instruments.record(metrics.MERGE_DURATION, 0.3, OF)
        instruments.record(metrics.CONTRIBUTIONS, 2, {**OF, "outcome": "accepted", "cause": ""})
        instruments.record(metrics.FRAGMENT_VERSION, 7, {**OF, "fragment": "0"})
        instruments.observe(metrics.TOKENS, lambda _: [Observation(512, {**OF, "learner": "a"})])
    got = {name: series for (_, _, name), series in receiver.series.items()}
    assert got["skerry.merge.duration"].points == [(OF, 2.0)]
    assert got["skerry.merge.duration"].unit == "s"
    assert got["skerry.contributions"].points[0][1] == 2.0
    assert got["skerry.fragment.version"].points == [({**OF, "fragment": "0"}, 7.0)]
    assert got["skerry.tokens"].points == [({**OF, "learner": "a"}, 512.0)]
    assert got["skerry.tokens"].unit == "{token}"


def test_a_log_line_arrives_in_the_trace_that_it_names(receiver: Receiver) -> None:
    with sending(receiver.url):
        line = {"event": "round_adopted", "level": "warning", "fragment": 3, "why": None}
        ids = {"trace_id": TRACE, "span_id": tracing.span_id(TRACE)}
        lines.copy(None, "warning", {**line, **ids, "took": ("a", 1)})
        lines.copy(None, "info", {"event": "outside_of_any_trace", "level": "info"})
    lines.copy(None, "info", {"event": "after_the_end"})
    got, outside = receiver.lines
    assert (got.service, got.name, got.level) == ("skerry-syncer", "round_adopted", "warning")
    assert (got.trace_id, got.span_id) == (TRACE, tracing.span_id(TRACE))
    assert got.attributes == {"fragment": 3, "took": "('a', 1)"}
    assert (outside.name, outside.trace_id.strip("0")) == ("outside_of_any_trace", "")


def test_a_value_of_a_kept_round_leads_to_its_trace(receiver: Receiver) -> None:
    with sending(receiver.url):
        with tracing.within(tracing.context(TRACE)):
            instruments.record(metrics.MERGE_DURATION, 0.2, OF)
        instruments.record(metrics.COMMIT_DURATION, 0.2, OF)
    got = {name: series.traces for (_, _, name), series in receiver.series.items()}
    assert got == {"skerry.merge.duration": {TRACE}, "skerry.commit.duration": frozenset()}


def test_a_collector_that_answers_nothing_delays_neither_spans_nor_the_end(
    receiver: Receiver,
) -> None:
    receiver.held = threading.Event()
    with sending(receiver.url) as telemetry:
        for number in range(5000):
            tracing.emit(span(str(number)))
        assert not telemetry.stop(0.05)
    assert STOP_S <= 2.0


def test_a_dead_collector_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    heard = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/metrics"
    settings = TelemetrySettings(metrics_endpoint=url, metrics_interval_s=0.02)
    telemetry = export.Telemetry(IDENTITY, settings, lambda *_: heard.set())
    instruments.record(metrics.MERGE_DURATION, 0.1, OF)
    assert heard.wait(60)
    telemetry.stop(0.0)


def test_complaints_are_not_repeated_at_once() -> None:
    complaints: list[tuple[str, str]] = []
    settings = TelemetrySettings(endpoint="http://me:secret@c:4318")
    export.Telemetry(IDENTITY, settings, lambda *said: complaints.append(said)).stop(5.0)
    for trouble in ("dead", "still dead"):
        logging.getLogger("opentelemetry.sdk").warning(trouble)
    assert complaints == [("dead", "http://me:***@c:4318")]


@pytest.mark.parametrize("signal", ["traces", "metrics", "logs"])
def test_a_collector_that_refuses_is_named(signal: str, receiver: Receiver) -> None:
    receiver.status, url = 401, f"{receiver.url}/v1/{signal}"
    complaints: list[tuple[str, str]] = []
    settings = TelemetrySettings.model_validate({f"{signal}_endpoint": url})
    telemetry = export.Telemetry(IDENTITY, settings, lambda *said: complaints.append(said))
    tracing.emit(span("a"))
    instruments.record(metrics.MERGE_DURATION, 0.1, OF)
    lines.copy(None, "info", {"event": "a", "level": "info"})
    assert telemetry.stop(60.0)
    ((cause, endpoint),) = complaints
    assert "401" in cause
    assert endpoint == url
