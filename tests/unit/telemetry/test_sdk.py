"""The SDK behind the tracer and the instruments, with a real receiver at the other end."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

from skerry.telemetry import ids as tracing
from skerry.telemetry import instruments, metrics, sdk, spans, tracer
from skerry.telemetry.sdk import Identity, Target
from skerry.telemetry.spans import Event, Kind, Link, Span
from tests.support.otlp import Receiver

WHO = Identity("syncer", "run", "s", "1.0")
TRACE = tracing.trace_id("run", 0, 2)


@pytest.fixture(autouse=True)
def nobody_goes_on_sending() -> Iterator[None]:
    """See that what an unanswered sending left behind has ended: it draws from ``random``."""
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
def begun(url: str, **options: object) -> Generator[sdk.Telemetry]:
    """Send everything to ``url``."""
    target = Target(f"{url}/v1/traces", f"{url}/v1/metrics", **options)  # type: ignore[arg-type]
    telemetry = sdk.start(WHO, target, lambda _: None)
    try:
        yield telemetry
    finally:
        telemetry.stop(0.0)


def span(name: str, **more: object) -> Span:
    place, root = tracer.context(TRACE, name), tracer.context(TRACE)
    return Span(name, Kind.CLIENT, place, root, 1_000, 2_000, **more)  # type: ignore[arg-type]


def test_a_span_arrives_under_the_ids_it_was_told_with(receiver: Receiver) -> None:
    with begun(receiver.url) as telemetry:
        told = span("a", attributes={spans.FRAGMENT: 3}, events=(Event("e", 1_500),))
        tracer.tell(told)
        assert telemetry.stop()
    (got,) = receiver.spans
    assert (got.trace_id, got.span_id) == (TRACE, told.context.span_id)
    assert got.parent == tracing.span_id(TRACE)
    assert (got.service, got.instance, got.kind) == ("skerry-syncer", "run/s", "CLIENT")
    assert (got.start_ns, got.end_ns, got.events) == (1_000, 2_000, ("e",))
    assert got.attributes == {spans.FRAGMENT: 3}


def test_a_root_arrives_without_a_parent(receiver: Receiver) -> None:
    with begun(receiver.url) as telemetry:
        root = tracer.context(TRACE)
        tracer.tell(Span("round", Kind.INTERNAL, root, None, 1, 2))
        telemetry.stop()
    (got,) = receiver.spans
    assert (got.trace_id, got.span_id, got.parent) == (TRACE, tracing.span_id(TRACE), "")


def test_two_threads_tell_spans_at_once_without_mixing_their_ids(receiver: Receiver) -> None:
    names = [f"{thread}-{number}" for thread in range(4) for number in range(100)]

    def tell(thread: int) -> None:
        for number in range(100):
            tracer.tell(span(f"{thread}-{number}"))

    with begun(receiver.url) as telemetry:
        threads = [threading.Thread(target=tell, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        telemetry.stop()
    assert {s.name: s.span_id for s in receiver.spans} == {
        name: tracing.span_id(TRACE, name) for name in names
    }


def test_a_span_keeps_the_links_of_a_large_fleet(receiver: Receiver) -> None:
    links = tuple(
        Link(tracer.context(TRACE, "publish", n), {spans.STALENESS: n}) for n in range(300)
    )
    with begun(receiver.url) as telemetry:
        tracer.tell(span("process", links=links))
        telemetry.stop()
    (got,) = receiver.spans
    assert [link.attributes[spans.STALENESS] for link in got.links] == list(range(300))
    assert got.links[7].span_id == tracing.span_id(TRACE, "publish", 7)


def test_the_broker_is_told_of_as_a_service_of_its_own(receiver: Receiver) -> None:
    with begun(receiver.url) as telemetry:
        for server in ("n1", "n2"):
            attributes = spans.messaging(spans.DELIVER, "skerry.run.contrib.0.a", "")
            told = span("deliver", service="nats-server", instance=server, attributes=attributes)
            tracer.tell(told)
        telemetry.stop()
    assert [(s.service, s.instance) for s in receiver.spans] == [
        ("nats-server", "n1"),
        ("nats-server", "n2"),
    ]
    for got in receiver.spans:  # the address that we connect to may be another server's
        assert spans.SERVER_ADDRESS not in got.attributes
        assert spans.MESSAGING_OPERATION_TYPE not in got.attributes


def test_invented_servers_fill_no_memory(receiver: Receiver) -> None:
    with begun(receiver.url) as telemetry:
        for number in range(200):
            tracer.tell(span(f"d{number}", service="nats-server", instance=f"n{number}"))
        telemetry.stop()
    assert len(receiver.spans) == 200
    assert len({got.instance for got in receiver.spans}) < 50


def test_only_messaging_spans_name_the_broker(receiver: Receiver) -> None:
    sent = spans.messaging(spans.PUBLISH, "skerry.run.contrib.0.a", spans.CONTRIBUTION)
    with begun(receiver.url, broker=("nats", 4222)) as telemetry:
        tracer.tell(span("publish", attributes=sent))
        tracer.tell(span("merge"))
        telemetry.stop()
    address = {s.name: s.attributes.get(spans.SERVER_ADDRESS) for s in receiver.spans}
    assert address == {"publish": "nats", "merge": None}


def test_metrics_arrive_with_their_units(receiver: Receiver) -> None:
    of = {metrics.RUN: "run"}
    with begun(receiver.url) as telemetry:
        instruments.record(metrics.MERGE_DURATION, 0.2, of)
        instruments.record(metrics.MERGE_DURATION, 0.3, of)
        instruments.record(metrics.CONTRIBUTIONS, 2, {**of, "outcome": "accepted", "cause": ""})
        instruments.record(metrics.FRAGMENT_VERSION, 7, {**of, "fragment": "0"})
        instruments.observe(metrics.TOKENS, lambda: [(512, {**of, "learner": "a"})])
        telemetry.stop()
    got = {name: series for (_, _, name), series in receiver.series.items()}
    assert got["skerry.merge.duration"].points == [(of, 2.0)]
    assert got["skerry.merge.duration"].unit == "s"
    assert got["skerry.contributions"].points[0][1] == 2.0
    assert got["skerry.fragment.version"].points == [({**of, "fragment": "0"}, 7.0)]
    assert got["skerry.tokens"].points == [({**of, "learner": "a"}, 512.0)]
    assert got["skerry.tokens"].unit == "{token}"


def test_a_value_of_a_kept_round_leads_to_its_trace(receiver: Receiver) -> None:
    with begun(receiver.url) as telemetry:
        with tracer.within(tracer.context(TRACE)):
            instruments.record(metrics.MERGE_DURATION, 0.2, {metrics.RUN: "run"})
        instruments.record(metrics.COMMIT_DURATION, 0.2, {metrics.RUN: "run"})
        telemetry.stop()
    got = {name: series.traces for (_, _, name), series in receiver.series.items()}
    assert got == {"skerry.merge.duration": {TRACE}, "skerry.commit.duration": frozenset()}


def test_a_collector_that_answers_nothing_holds_nobody_up(receiver: Receiver) -> None:
    """The end is bounded, and telling goes on meanwhile without end and without a queue."""
    receiver.held = threading.Event()
    with begun(receiver.url) as telemetry:
        for number in range(5000):
            tracer.tell(span(str(number)))
        assert not telemetry.stop(0.05)
    assert sdk.STOP_S <= 2.0


def test_a_dead_collector_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    heard = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = Target(metrics=f"http://127.0.0.1:{port}/v1/metrics", metrics_interval_s=0.02)
    telemetry = sdk.start(WHO, target, lambda _: heard.set())
    instruments.record(metrics.MERGE_DURATION, 0.1, {metrics.RUN: "run"})
    assert heard.wait(60)
    telemetry.stop(0.0)


def test_complaints_are_not_repeated_at_once() -> None:
    complaints: list[str] = []
    sdk.start(WHO, Target(), complaints.append)
    for trouble in ("dead", "still dead"):
        logging.getLogger("opentelemetry.sdk").warning(trouble)
    assert complaints == ["dead"]
