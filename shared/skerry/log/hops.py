"""The broker's part in traced messages, as spans of each message's own trace.

Each server that a message with the header ``Nats-Trace-Dest`` passes reports, on that subject,
when it came in, which stream took it and what went out. The server needs no configuration for it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel, Field

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.jetstream import nanoseconds
from skerry.protocol.subjects import Subjects
from skerry.telemetry import spans, tracing
from skerry.telemetry.spans import FinishedSpan, Interval, Messages, SpanEvent

if TYPE_CHECKING:
    from skerry.log.base import Bus

QUEUE = "skerry-hops"
"""Every syncer listens in this queue group, so that each hop is reported once."""
SERVICE = "nats-server"
MOST_BYTES = 64 * 1024
MOST_TEXT = 256
MOST = 2**63
"""A number that does not fit where it goes would cost a whole batch of spans."""
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


Text = Annotated[str, AfterValidator(lambda text: text[:MOST_TEXT])]
Count = Annotated[int, Field(ge=0, lt=MOST)]


class _ReportServer(BaseModel):
    name: Text
    seq: Count
    time: Text


class _Request(BaseModel):
    header: dict[str, list[str]]
    msgsize: Count


class _Step(BaseModel):
    """Something that the server did; ``in`` is the first of them and names the subject."""

    type: Text
    ts: Text
    subj: Text = ""
    stream: Text = ""
    error: Text = ""


class _Report(BaseModel):
    server: _ReportServer
    request: _Request
    events: list[_Step]


def hop(payload: bytes) -> FinishedSpan | None:
    """Return the span of one server's part in a message; None for anything that is no such report.

    Any client may publish on the subject, so nothing is taken for granted, and no text is long.
    """
    if len(payload) > MOST_BYTES:
        return None
    try:
        return _hop(_Report.model_validate_json(payload, strict=True))
    except (ValueError, OverflowError):
        return None


def _hop(report: _Report) -> FinishedSpan | None:
    server, steps = report.server, report.events
    origin = tracing.extract({k: v[0] for k, v in report.request.header.items() if v})
    subject = next((step.subj for step in steps if step.type == "in"), "")
    if origin is None or not subject:
        return None
    events = tuple(SpanEvent(STEPS.get(s.type, s.type), nanoseconds(s.ts)) for s in steps)
    times = [*(event.time_ns for event in events), nanoseconds(server.time)]
    if min(times) < 0 or max(times) >= MOST:
        return None
    error = next((step.error for step in steps if step.error), "")
    return FinishedSpan(
        operation=spans.DELIVER,
        context=tracing.child(origin, spans.DELIVER, server.name, server.seq),
        parent=origin,
        interval=Interval(min(times[:-1]), max(times)),
        attributes={
            spans.MESSAGING_MESSAGE_BODY_SIZE: report.request.msgsize,
            spans.STREAM: next((step.stream for step in steps if step.stream), ""),
            spans.SERVER_NAME: server.name,
        },
        messages=Messages(TEMPLATES.get((subject.split(".") + [""] * 3)[2], ""), subject),
        events=events,
        error=_error_type(error),
        detail=error,
        service=SERVICE,
        instance=server.name,
    )


def _error_type(error: str) -> str:
    if not error or DUPLICATE in error:
        return ""
    return next((name for part, name in ERRORS.items() if part in error), OTHER_ERROR)
