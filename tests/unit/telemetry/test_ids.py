"""Ids of traces and spans, and the rule by which all services keep the same traces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased  # noqa: TID251 - its rule

from skerry.telemetry import ids

rounds = st.tuples(st.text(), st.integers(0, 2**32), st.integers(0, 2**63), st.integers(0, 2**63))
traces = st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}")
words = st.lists(st.text(max_size=5), max_size=3)


def test_a_round_has_the_same_ids_wherever_they_are_computed() -> None:
    """Golden: two releases that differ here split every trace between them."""
    trace = ids.trace_id("main", 3, 17, 1_700_000_000_000_000_000)
    assert trace == "f24cbeee461143eef43ebd2914c1e9f1"
    assert ids.span_id(trace) == "b4230e6fb8bcc675"
    assert ids.span_id(trace, "publish", "learner-1", 1, 17) == "1ff38ea1929e3e12"


@given(rounds, rounds)
def test_two_rounds_share_no_trace(
    one: tuple[str, int, int, int], other: tuple[str, int, int, int]
) -> None:
    assert (ids.trace_id(*one) == ids.trace_id(*other)) == (one == other)


@given(traces, words, words)
def test_two_spans_of_a_trace_share_no_id(trace: str, one: list[str], other: list[str]) -> None:
    assert (ids.span_id(trace, *one) == ids.span_id(trace, *other)) == (one == other)


@given(traces, st.floats(0, 1))
def test_traces_are_kept_by_the_rule_of_the_sdk(trace: str, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, int(trace, 16), "round").decision
    assert ids.sampled(trace, ratio) == (theirs is Decision.RECORD_AND_SAMPLE)


def test_every_second_trace_is_kept_at_one_half() -> None:
    kept = sum(ids.sampled(ids.trace_id("run", 0, v), 0.5) for v in range(2000))
    assert 900 < kept < 1100
