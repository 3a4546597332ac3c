"""Ids of traces and spans, and the rule by which all services keep the same traces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from skerry.telemetry import ids as tracing
from skerry.telemetry.ids import SpanContext

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
rounds = st.tuples(st.text(), st.integers(0, 2**32), st.integers(0, 2**63), st.integers(0, 2**63))
ids = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")


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


@given(ids, st.lists(st.text(max_size=5), max_size=3), st.lists(st.text(max_size=5), max_size=3))
def test_two_spans_of_a_trace_share_no_id(trace: str, one: list[str], other: list[str]) -> None:
    assert (tracing.span_id(trace, *one) == tracing.span_id(trace, *other)) == (one == other)


@given(ids, st.floats(0, 1))
def test_traces_are_kept_by_the_rule_of_the_sdk(trace: str, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, int(trace, 16), "round").decision
    assert tracing.sampled(trace, ratio) == (theirs is Decision.RECORD_AND_SAMPLE)


def test_every_second_trace_is_kept_at_one_half() -> None:
    kept = sum(tracing.sampled(tracing.trace_id("run", 0, v), 0.5) for v in range(2000))
    assert 900 < kept < 1100


@given(ids, st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}"), st.booleans())
def test_a_trace_parent_reads_back(trace: str, span: str, sampled: bool) -> None:
    place = SpanContext(trace, span, sampled)
    assert tracing.parse(place.trace_parent) == place


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert tracing.parse(f"cc-{TRACE}-{SPAN}-03-what-comes") == SpanContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_what_is_no_trace_parent_is_not_believed(text: str) -> None:
    assert tracing.parse(text) is None
