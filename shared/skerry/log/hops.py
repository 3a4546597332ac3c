"""The broker's part in traced messages, as spans of each message's own trace.

Each server that a message with the header ``Nats-Trace-Dest`` passes reports, on that subject,
when it came in, which stream took it and what went out. The server needs no configuration for it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.jetstream import nanoseconds
from skerry.protocol.subjects import Subjects
from skerry.telemetry import spans, tracing
from skerry.telemetry.spans import FinishedSpan, Interval, Messages, SpanEvent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import SpanContext

    from skerry.log.base import Bus

QUEUE = "skerry-hops"
"""Every syncer listens in this queue group, so that each hop is reported once."""
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
DUPLICATE = "duplicate"
"""The server refuses a message that it already has: that is an answer and no failure."""
ERRORS = {
    "wrong last": "Conflict",
    "maximum": "StorageFull",
    "insufficient": "StorageFull",
    "no space": "StorageFull",
    "permission": "Denied",
    "authorization": "Denied",
}
"""Type of a server's error by a part of its sentence, which may hold paths and numbers."""
OTHER_ERROR = "_OTHER"
"""The conventions' word for an error of no known type."""


async def report_hops(bus: Bus, run: str) -> None:
    """Emit what servers report of this run's traced messages as spans, for ever."""
    if isinstance(bus, NatsBus):
        reports = bus.listen(Subjects(run).hops(), QUEUE)
        async with aclosing(reports):
            async for report in reports:
                span = hop(report)
                if span is not None:
                    tracing.emit(span)
    await asyncio.Event().wait()


def hop(payload: bytes) -> FinishedSpan | None:
    """Return the span of one server's part in a message; None for anything that is no such report.

    Any client may publish on the subject, so nothing is taken for granted, and no text is long.
    """
    if len(payload) > MOST_BYTES:
        return None
    try:
        return _hop(_mapping(json.loads(payload)))
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None


def _hop(report: Mapping[str, Any]) -> FinishedSpan | None:
    server, request = _mapping(report["server"]), _mapping(report["request"])
    origin = _origin(_mapping(request["header"]))
    steps = [_mapping(step) for step in cast("list[object]", report["events"])]
    if origin is None:
        return None
    subject = _text(next((step["subj"] for step in steps if step.get("type") == "in"), None))
    name = _text(server["name"])
    events = tuple(_event(step) for step in steps)
    times = [event.time_ns for event in events]
    error = _first(steps, "error")
    template = TEMPLATES.get((subject.split(".") + [""] * 3)[2], "")
    return FinishedSpan(
        operation=spans.DELIVER,
        context=tracing.child(origin, spans.DELIVER, name, _number(server["seq"])),
        parent=origin,
        interval=Interval(min(times), max(*times, _ns(server["time"]))),
        attributes={
            spans.MESSAGING_MESSAGE_BODY_SIZE: _number(request["msgsize"]),
            spans.STREAM: _first(steps, "stream"),
            spans.SERVER_NAME: name,
        },
        messages=Messages(template, subject),
        events=events,
        error=_error_type(error),
        detail=error,
        service=SERVICE,
        instance=name,
    )


def _error_type(error: str) -> str:
    if not error or DUPLICATE in error:
        return ""
    return next((name for part, name in ERRORS.items() if part in error), OTHER_ERROR)


def _origin(header: Mapping[str, Any]) -> SpanContext | None:
    for key, values in header.items():
        if key.lower() == spans.TRACE_PARENT:
            return tracing.parse(_text(values[0]))
    return None


def _event(step: Mapping[str, Any]) -> SpanEvent:
    kind = _text(step["type"])
    return SpanEvent(STEPS.get(kind, kind), _ns(step["ts"]))


def _first(steps: list[Mapping[str, Any]], key: str) -> str:
    return next((_text(step[key]) for step in steps if step.get(key)), "")


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
