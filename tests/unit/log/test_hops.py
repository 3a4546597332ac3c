"""What a NATS server reports of a message becomes a span, and what anybody else sends does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.log.hops import MOST_BYTES, hop
from skerry.telemetry import spans
from skerry.telemetry.ids import SpanContext
from skerry.telemetry.spans import Kind

ORIGIN = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", sampled=True)


def report(**changes: Any) -> dict[str, Any]:
    """Return what nats-server 2.15.1 sent for a chunk of a contribution, shortened."""
    told: dict[str, Any] = {
        "server": {
            "name": "n1",
            "host": "127.0.0.1",
            "ver": "2.15.1",
            "seq": 18,
            "time": "2026-11-22T02:01:26.079722931Z",
        },
        "request": {"header": {"traceparent": [ORIGIN.trace_parent]}, "msgsize": 1132},
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
    return told | changes


def test_a_report_becomes_a_span_below_the_one_that_sent_the_message() -> None:
    found = hop(json.dumps(report()).encode())
    assert found is not None
    assert (found.name, found.kind) == (f"deliver {spans.CONTRIBUTION}", Kind.SERVER)
    assert (found.parent, found.context.trace_id) == (ORIGIN, ORIGIN.trace_id)
    assert (found.service, found.instance) == ("nats-server", report()["server"]["name"])
    assert found.end_ns - found.start_ns == 226_734
    assert [event.name for event in found.events] == ["ingress", "stored"]
    assert found.attributes[spans.STREAM] == "SKERRY_r_CONTRIB"
    assert found.error == ""


def test_two_servers_of_a_cluster_tell_two_spans() -> None:
    one = hop(json.dumps(report()).encode())
    other = hop(json.dumps(report(server=report()["server"] | {"name": "n2"})).encode())
    assert one is not None
    assert other is not None
    assert one.context.span_id != other.context.span_id


@pytest.mark.parametrize(("said", "error"), [("msgid is duplicate", ""), ("no space", "no space")])
def test_a_refusal_is_an_error_and_a_duplicate_is_none(said: str, error: str) -> None:
    told = report()
    told["events"][1]["error"] = said
    found = hop(json.dumps(told).encode())
    assert found is not None
    assert found.error == error


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
def test_what_says_too_little_is_left_out(changes: dict[str, Any]) -> None:
    assert hop(json.dumps(report(**changes)).encode()) is None


@given(st.binary() | st.text().map(str.encode) | st.sampled_from([b"[" * 9000, b"1e999", b"null"]))
def test_bytes_of_anybody_are_survived(payload: bytes) -> None:
    assert hop(payload) is None


def test_texts_and_reports_are_bounded() -> None:
    told = report(server=report()["server"] | {"name": "n" * 5000})
    found = hop(json.dumps(told).encode())
    assert found is not None
    assert len(str(found.attributes[spans.SERVER_NAME])) == 256
    assert hop(b" " * MOST_BYTES + json.dumps(report()).encode()) is None
