"""What a NATS server says of a message's way through it, as a span of the message's own trace.

A message with the header ``Nats-Trace-Dest`` has each server that it passes tell, on that subject,
when it came in, which stream took it and what went out. The server needs no configuration for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from skerry.log.nats.jetstream import nanoseconds
from skerry.telemetry import spans
from skerry.telemetry.ids import parse, span_id
from skerry.telemetry.spans import Event, Kind, Span, messaging, messaging_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.telemetry.ids import SpanContext

QUEUE = "skerry-hops"
"""Whoever listens shares this queue group, so that each hop is told once."""
SERVICE = "nats-server"
MOST_BYTES = 64 * 1024
MOST_TEXT = 256
STEPS = {"in": "ingress", "js": "stored", "eg": "egress", "sm": "mapped", "se": "exported"}
TEMPLATES = {
    "contrib": spans.CONTRIBUTION,
    "state": spans.GLOBAL_FRAGMENT,
    "round": "skerry.{run}.round.{fragment}",
    "ledger": "skerry.{run}.ledger.commit.{fragment}",
}
"""Destination templates of the messages that carry trace context, by their subject's third part."""


def hop(payload: bytes) -> Span | None:
    """Return the span of one server's part in a message; None for what is no such report.

    Anybody may publish on the subject, so nothing is taken for granted, and no text is long.
    """
    if len(payload) > MOST_BYTES:
        return None
    try:
        told = json.loads(payload)
        return _hop(_mapping(told))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None


def _hop(told: Mapping[str, Any]) -> Span | None:
    server, request = _mapping(told["server"]), _mapping(told["request"])
    origin = _origin(_mapping(request["header"]))
    steps = [_mapping(step) for step in cast("list[object]", told["events"])]
    if origin is None:
        return None
    subject = _text(next((step["subj"] for step in steps if step.get("type") == "in"), None))
    name = _text(server["name"])
    events = tuple(_event(step) for step in steps)
    error = next((_text(step["error"]) for step in steps if step.get("error")), "")
    stream = next((_text(step["stream"]) for step in steps if step.get("stream")), "")
    template = TEMPLATES.get((subject.split(".") + [""] * 3)[2], "")
    return Span(
        name=messaging_name(spans.DELIVER, template).rstrip(),
        kind=Kind.SERVER,
        context=_place(origin, name, _number(server["seq"])),
        parent=origin,
        start_ns=min(event.time_ns for event in events),
        end_ns=max(*(event.time_ns for event in events), _ns(server["time"])),
        attributes={
            **messaging(spans.DELIVER, subject, template),
            spans.MESSAGING_MESSAGE_BODY_SIZE: _number(request["msgsize"]),
            spans.STREAM: stream,
            spans.SERVER_NAME: name,
        },
        events=events,
        # The server refuses a message that it has already: that is an answer, and no failure.
        error="" if "duplicate" in error else error,
        service=SERVICE,
        instance=name,
    )


def _place(origin: SpanContext, server: str, sequence: int) -> SpanContext:
    own = span_id(origin.trace_id, spans.DELIVER, server, sequence)
    return type(origin)(origin.trace_id, own, origin.sampled)


def _origin(header: Mapping[str, Any]) -> SpanContext | None:
    for key, values in header.items():
        if key.lower() == spans.TRACE_PARENT:
            return parse(_text(values[0]))
    return None


def _event(step: Mapping[str, Any]) -> Event:
    kind = _text(step["type"])
    return Event(STEPS.get(kind, kind), _ns(step["ts"]))


def _ns(stamp: object) -> int:
    return _number(nanoseconds(_text(stamp)))


def _number(value: object) -> int:
    """Return a count that fits where it goes: one that does not would cost a whole batch."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError
    return value


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return cast("dict[str, Any]", value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value[:MOST_TEXT]
