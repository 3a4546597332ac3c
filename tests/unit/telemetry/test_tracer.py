"""Spans are told only to who wants them, and their names follow the conventions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.semconv._incubating.attributes import (  # pyright: ignore[reportMissingTypeStubs]
    messaging_attributes,
    server_attributes,
)
from opentelemetry.semconv.attributes import error_attributes

from skerry.telemetry import ids as tracing
from skerry.telemetry import spans, tracer
from skerry.telemetry.spans import Kind, Span

TRACE = tracing.trace_id("run", 0, 2)


class Taken:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def take(self, span: Span) -> None:
        self.spans.append(span)


@pytest.fixture
def taken() -> Iterator[Taken]:
    sink = Taken()
    tracer.install(sink)
    yield sink
    tracer.install(None)


def told() -> Span:
    return Span("x", Kind.INTERNAL, tracer.context(TRACE, "x"), None, 1, 2)


def test_nothing_is_told_while_nobody_listens() -> None:
    assert not tracer.on()
    assert tracer.headers_for(TRACE) == {}
    tracer.tell(told())


def test_ids_are_the_same_whether_anybody_listens_or_not(taken: Taken) -> None:
    listened = tracer.context(TRACE, "x")
    tracer.install(None)
    deaf = tracer.context(TRACE, "x")
    assert (listened.trace_id, listened.span_id) == (deaf.trace_id, deaf.span_id)
    assert (listened.sampled, deaf.sampled) == (True, False)


def test_a_trace_that_is_not_kept_costs_neither_span_nor_header(taken: Taken) -> None:
    tracer.install(taken, ratio=0.0)
    tracer.tell(told())
    assert taken.spans == []
    assert tracer.headers_for(TRACE) == {}


def test_a_message_of_a_kept_trace_carries_the_w3c_header(taken: Taken) -> None:
    place = tracer.context(TRACE, "x")
    assert tracer.headers(place) == {"traceparent": place.trace_parent}
    tracer.install(taken, broker_subject="skerry.run.hops")
    assert tracer.headers(place)["Nats-Trace-Dest"] == "skerry.run.hops"


def test_headers_are_read_in_any_case_and_not_believed_blindly() -> None:
    place = tracing.SpanContext(TRACE, tracing.span_id(TRACE), sampled=True)
    assert spans.extract({"Nats-Msg-Id": "1", "TraceParent": place.trace_parent}) == place
    assert spans.extract({"traceparent": "; drop table"}) is None
    assert spans.extract({}) is None


def test_log_lines_know_the_span_only_within_it() -> None:
    place = tracer.context(TRACE)
    with tracer.within(place):
        assert tracer.current() == place
    assert tracer.current() is None


def test_keys_are_those_of_the_semantic_conventions() -> None:
    theirs = {
        getattr(module, name)
        for module in (messaging_attributes, server_attributes, error_attributes)
        for name in vars(module)
        if name.isupper()
    }
    ours = {
        value
        for name, value in vars(spans).items()
        if name.isupper() and isinstance(value, str) and value.startswith(("messaging.", "server."))
    }
    assert len(ours) == 10
    assert ours <= theirs
    assert spans.ERROR_TYPE in theirs


def test_operations_have_the_types_of_the_conventions() -> None:
    theirs = {kind.value for kind in messaging_attributes.MessagingOperationTypeValues}
    assert set(spans.TYPES.values()) <= theirs


NO_ENDPOINT = """
import sys
from skerry.settings import loading
from skerry.service.telemetry import telemetry
import skerry_syncer.service, skerry_learner.service, skerry_checkpointer.service
import skerry_evaluator.service
with telemetry(loading.load(None, [], {}).local, "syncer", "run", "s"):
    pass
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "requests"))
sys.exit(", ".join(loaded) or 0)
"""


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_ENDPOINT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
