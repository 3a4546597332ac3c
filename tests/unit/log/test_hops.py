"""What a NATS server reports of a message becomes a span; no other message does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanKind

from skerry.log.hops import MOST_BYTES, hop
from skerry.telemetry import spans, tracing
from skerry.telemetry.spans import FinishedSpan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def report(**changes: Any) -> dict[str, Any]:
    """Return what nats-server 2.15.1 sent for a chunk of a contribution, shortened."""
    message: dict[str, Any] = {
        "server": {
            "name": "n1",
            "host": "127.0.0.1",
            "ver": "2.15.1",
            "seq": 18,
            "time": "2026-11-22T02:01:26.079722931Z",
        },
        "request": {"header": {"traceparent": [PARENT]}, "msgsize": 1132},
        "events": [
            {
                "type": "in",
                "ts": "2026-11-22T02:01:26.079496197Z",
                "kind": 0,
                "cid": 6,
                "subj": "skerry.r.contrib.0.a",
            },
            {
                "type": "js",
                "ts": "2026-11-22T02:01:26.079580822Z",
                "stream": "SKERRY_r_CONTRIB",
                "subject": "skerry.r.contrib.0.a",
            },
        ],
    }
    return message | changes


def found(message: dict[str, Any]) -> FinishedSpan:
    span = hop(json.dumps(message).encode())
    assert span is not None
    return span


def test_a_report_becomes_a_span_below_the_one_that_sent_the_message() -> None:
    span = found(report())
    assert (span.name, span.kind) == (f"deliver {spans.CONTRIBUTION}", SpanKind.SERVER)
    origin = tracing.parse(PARENT)
    assert (span.parent, span.context.trace_flags.sampled) == (origin, True)
    assert origin is not None
    assert span.context.trace_id == origin.trace_id
    assert (span.service, span.instance) == ("nats-server", "n1")
    assert span.interval.end_ns - span.interval.start_ns == 226_734
    assert [event.name for event in span.events] == ["ingress", "stored"]
    assert span.attributes[spans.STREAM] == "SKERRY_r_CONTRIB"
    assert (span.error, span.detail) == ("", "")


def test_two_servers_of_a_cluster_make_two_spans() -> None:
    one, other = found(report()), found(report(server=report()["server"] | {"name": "n2"}))
    assert one.context.span_id != other.context.span_id


@pytest.mark.parametrize(
    ("sentence", "error"),
    [
        ("msgid is duplicate", ""),
        ("write /data/jetstream/4.blk: no space left on device", "StorageFull"),
        ("wrong last sequence: 7", "Conflict"),
        ("the moon is full", "_OTHER"),
    ],
)
def test_a_refusal_is_an_error_of_one_word_and_a_duplicate_is_none(
    sentence: str, error: str
) -> None:
    message = report()
    message["events"][1]["error"] = sentence
    span = found(message)
    assert (span.error, span.detail) == (error, sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {"events": []},
        {"events": [{"type": "js", "ts": "2026-11-22T02:01:26Z"}]},
        {"events": [{"type": "in", "ts": "yesterday", "subj": "a"}]},
        {"request": {"header": {}, "msgsize": 1}},
        {"request": {"header": {"traceparent": []}, "msgsize": 1}},
        {"request": {"header": {"traceparent": ["00-0-0-01"]}, "msgsize": 1}},
        {"request": report()["request"] | {"msgsize": 2**70}},
        {"server": report()["server"] | {"time": "9999-01-01T00:00:00Z"}},
        {"server": None},
    ],
)
def test_an_incomplete_report_is_left_out(changes: dict[str, Any]) -> None:
    assert hop(json.dumps(report(**changes)).encode()) is None


@given(st.binary() | st.text().map(str.encode) | st.sampled_from([b"[" * 9000, b"1e999", b"null"]))
def test_arbitrary_bytes_make_no_span(payload: bytes) -> None:
    assert hop(payload) is None


def test_texts_and_reports_are_bounded() -> None:
    message = report(server=report()["server"] | {"name": "n" * 5000})
    assert len(str(found(message).attributes[spans.SERVER_NAME])) == 256
    assert hop(b" " * MOST_BYTES + json.dumps(report()).encode()) is None
