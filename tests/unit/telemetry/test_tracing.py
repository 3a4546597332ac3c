"""Trace context in messages and code, spans that go nowhere unless installed, and their names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased  # noqa: TID251 - its rule
from opentelemetry.semconv._incubating.attributes import (  # pyright: ignore[reportMissingTypeStubs]
    messaging_attributes,
    server_attributes,
)
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags

from skerry.telemetry import spans, tracing
from skerry.telemetry.spans import FinishedSpan, Interval
from tests.support.telemetry import Collected

TRACE = tracing.trace_id("run", 0, 2)
rounds = st.tuples(st.text(), st.integers(0, 2**32), st.integers(0, 2**63), st.integers(0, 2**63))
traces = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")
words = st.lists(st.text(max_size=5), max_size=3)
THEIRS, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def context(trace: str, span: str, *, sampled: bool) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), True, TraceFlags(int(sampled)))


def finished() -> FinishedSpan:
    return FinishedSpan("x", tracing.context(TRACE, "x"), None, Interval(1, 2))


def test_a_round_has_the_same_ids_wherever_they_are_computed() -> None:
    """Golden: two releases that differ here split every trace between them."""
    trace = tracing.trace_id("main", 3, 17, 1_700_000_000_000_000_000)
    assert trace == "f24cbeee461143eef43ebd2914c1e9f1"
    assert tracing.span_id(trace) == "b4230e6fb8bcc675"
    assert tracing.span_id(trace, "publish", "learner-1", 1, 17) == "1ff38ea1929e3e12"


@given(rounds, rounds)
def test_two_rounds_share_no_trace(
    one: tuple[str, int, int, int], other: tuple[str, int, int, int]
) -> None:
    assert (tracing.trace_id(*one) == tracing.trace_id(*other)) == (one == other)


@given(traces, words, words)
def test_two_spans_of_a_trace_share_no_id(trace: str, one: list[str], other: list[str]) -> None:
    assert (tracing.span_id(trace, *one) == tracing.span_id(trace, *other)) == (one == other)


@given(traces, st.floats(0, 1))
def test_traces_are_kept_by_the_rule_of_the_sdk(trace: str, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, int(trace, 16), "round").decision
    assert tracing.sampled(trace, ratio) == (theirs is Decision.RECORD_AND_SAMPLE)


def test_without_an_exporter_nothing_is_emitted() -> None:
    assert not tracing.on()
    assert tracing.headers_for(TRACE) == {}
    tracing.emit(finished())


def test_ids_are_the_same_with_and_without_an_exporter(collected: Collected) -> None:
    exported = tracing.context(TRACE, "x")
    tracing.install(None)
    dropped = tracing.context(TRACE, "x")
    assert exported[:2] == dropped[:2] == (int(TRACE, 16), int(tracing.span_id(TRACE, "x"), 16))
    assert (exported.trace_flags.sampled, dropped.trace_flags.sampled) == (True, False)


@pytest.mark.parametrize("trace", ["", "xyz", "0" * 32, "-" + TRACE[1:], TRACE + "0", "é" * 32])
def test_what_is_no_trace_id_has_no_valid_context(trace: str, collected: Collected) -> None:
    place = tracing.context(trace, "x")
    assert not place.is_valid
    assert tracing.headers_for(trace) == {}
    with tracing.within(place):
        assert tracing.current() is None


def test_a_trace_that_is_not_kept_costs_neither_span_nor_header(collected: Collected) -> None:
    tracing.install(collected.spans.append, ratio=0.0)
    tracing.emit(finished())
    assert collected.spans == []
    assert tracing.headers_for(TRACE) == {}


def test_a_message_of_a_kept_trace_carries_the_w3c_header(collected: Collected) -> None:
    place = tracing.context(TRACE, "x")
    assert tracing.headers(place) == {"traceparent": tracing.trace_parent(place)}


@given(traces, st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}"), st.booleans())
def test_a_trace_parent_reads_back(trace: str, span: str, sampled: bool) -> None:
    place = context(trace, span, sampled=sampled)
    assert tracing.parse(tracing.trace_parent(place)) == place


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    found = tracing.parse(f"cc-{THEIRS}-{SPAN}-03-what-comes")
    assert found is not None
    assert tracing.trace_parent(found) == f"00-{THEIRS}-{SPAN}-01"


@pytest.mark.parametrize(
    "text",
    [
        *("", "00", f"00-{THEIRS}-{SPAN}", f"00-{THEIRS.upper()}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{THEIRS}-{'0' * 16}-01", f"ff-{THEIRS}-{SPAN}-01"),
        *(f"00-{THEIRS}-{SPAN}-01\n", f" 00-{THEIRS}-{SPAN}-01", f"00-{THEIRS}-{SPAN}-01-more"),
        f"01-{THEIRS}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_what_is_no_trace_parent_is_refused(text: str) -> None:
    assert tracing.parse(text) is None


def test_log_lines_know_the_span_only_within_it() -> None:
    place = tracing.context(TRACE)
    with tracing.within(place):
        assert tracing.current() == place
    assert tracing.current() is None
    assert place != INVALID_SPAN_CONTEXT


def test_keys_and_types_are_those_of_the_semantic_conventions() -> None:
    theirs = {
        getattr(module, name)
        for module in (messaging_attributes, server_attributes)
        for name in vars(module)
        if name.isupper()
    }
    ours = {
        value
        for name, value in vars(spans).items()
        if name.isupper() and isinstance(value, str) and value.startswith(("messaging.", "server."))
    }
    assert len(ours) == 11
    assert ours <= theirs
    types = {kind.value for kind in messaging_attributes.MessagingOperationTypeValues}
    assert {kind for _, kind in spans.OPERATIONS.values() if kind} <= types


NO_ENDPOINT = """
import sys
from skerry.settings import loading
from skerry.service.reporting import telemetry
import skerry_syncer.service, skerry_learner.service, skerry_checkpointer.service
import skerry_evaluator.service
with telemetry(loading.load(None, [], {}).local, "syncer", "run", "s"):
    pass
heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "requests", "google.rpc")
loaded = sorted(name for name in sys.modules if name.startswith(heavy))
sys.exit(", ".join(loaded) or 0)
"""


def test_without_an_endpoint_nothing_of_the_sdk_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_ENDPOINT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
