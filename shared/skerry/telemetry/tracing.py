"""Trace context in code and in messages, and where finished spans go.

One sync round is one trace, and no id is handed out. A trace's id is a hash of (run, fragment,
version), so every service that takes part in a round knows its trace, whatever message was lost or
came first; a span's id is a hash of its trace and of what the span is about. Whether a trace is
kept is read off its id by OpenTelemetry's own ratio rule, so all services keep the same traces.

OpenTelemetry's API carries the context. A span is emitted once, when it is over: it costs nothing
while it lasts, may begin in one thread and end in another, and a log line names it whether traces
are collected or not. Spans go nowhere until ``skerry.telemetry.export`` installs its exporter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN_CONTEXT, NonRecordingSpan, SpanContext, TraceFlags

from skerry.telemetry.spans import TRACE_PARENT, FinishedSpan

TRACE_DIGITS = 32
KEPT, DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
W3C_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
LONGEST_PARENT = 256
"""Characters of a trace parent that are read: one of a later version may be longer than ours."""


@dataclass(slots=True)
class _Recording:
    """What this process does with its spans."""

    export: Callable[[FinishedSpan], None] | None = None
    ratio: float = 0.0
    steps: float = 0.0
    """The share of training steps whose traces are kept, at most ``ratio``."""


_recording = _Recording()


@lru_cache(maxsize=4096)
def trace_id(run: str, fragment: int, version: int, created_ns: int = 0) -> str:
    """Return the trace of the round that makes ``version`` of a fragment: 32 hexadecimal digits.

    ``created_ns`` is when the run was created: a second run of the same id has traces of its own.
    """
    return _hash(b"skerry.round", 16, run, str(created_ns), str(fragment), str(version))


def turn_id(run: str, created_ns: int, name: str, began_ns: int) -> str:
    """Return the trace of what a service does with the global state outside of any round."""
    return _hash(b"skerry.turn", 16, run, str(created_ns), name, str(began_ns))


def step_id(run: str, created_ns: int, learner: str, incarnation: int, step: int) -> str:
    """Return the trace of one training step of a learner."""
    return _hash(b"skerry.step", 16, run, str(created_ns), learner, str(incarnation), str(step))


def span_id(trace_id: str, *what: str | int) -> str:
    """Return the id of a span of a trace, by what it is about: 16 hexadecimal digits.

    Without ``what`` it is that of the trace's root.
    """
    return _hash(b"skerry.span", 8, trace_id, *map(str, what))


def sampled(trace_id: str, ratio: float) -> bool:
    """Return True if a trace is kept at this ratio: OpenTelemetry's ``TraceIdRatioBased``.

    A trace that is kept at one ratio is kept at every higher one.
    """
    return int(trace_id[16:], 16) < round(ratio * 2**64)


def _hash(person: bytes, size: int, *parts: str) -> str:
    """Return a hash of ``size`` bytes in hexadecimal, never all zero: that is no valid id."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    digest = blake2b(text.encode(), digest_size=size, person=person).hexdigest()
    return digest if digest.strip("0") else _hash(person, size, *parts, "again")


def install(
    export: Callable[[FinishedSpan], None] | None, ratio: float = 1.0, steps: float = 0.0
) -> None:
    """Hand finished spans to ``export``, for the share ``ratio`` of all traces; None: drop them.

    Of training steps, which are many, the share ``steps`` is kept, and no more than ``ratio``.
    ``export`` is called from any thread and must not block.
    """
    _recording.export, _recording.ratio = export, ratio if export is not None else 0.0
    _recording.steps = min(steps, _recording.ratio)


def on() -> bool:
    """Return True if spans are exported."""
    return _recording.export is not None


def context(trace_id: str, *what: str | int) -> SpanContext:
    """Return the context of the span of a trace that is about ``what``; without it, of the root.

    An id that is no trace id, such as that of a record from another release, has no valid context.
    """
    return _context(trace_id, what, _recording.ratio)


@lru_cache(maxsize=4096)
def _context(trace_id: str, what: tuple[str | int, ...], ratio: float) -> SpanContext:
    """Return a context; several spans and lines ask for the same one."""
    try:
        number = int(trace_id, 16) if len(trace_id) == TRACE_DIGITS else 0
        kept = ratio > 0 and sampled(trace_id, ratio)
    except ValueError:
        return INVALID_SPAN_CONTEXT
    if number <= 0:
        return INVALID_SPAN_CONTEXT
    own = int(span_id(trace_id, *what), 16)
    return SpanContext(number, own, is_remote=True, trace_flags=KEPT if kept else DROPPED)


def kept(trace_id: str) -> bool:
    """Return True if the spans of a trace are exported; where not, callers skip preparing them."""
    return on() and context(trace_id).trace_flags.sampled


def kept_step(trace_id: str) -> bool:
    """Return True if the spans of a training step's trace are exported."""
    return on() and sampled(trace_id, _recording.steps)


def child(parent: SpanContext, *what: str | int) -> SpanContext:
    """Return the context of the span about ``what`` in a trace, kept where ``parent`` is."""
    own = span_id(trace.format_trace_id(parent.trace_id), *what)
    return SpanContext(
        parent.trace_id, int(own, 16), is_remote=True, trace_flags=parent.trace_flags
    )


def emit(span: FinishedSpan) -> None:
    """Export a finished span, unless its trace is not kept."""
    if _recording.export is not None and span.context.trace_flags.sampled:
        _recording.export(span)


def trace_parent(place: SpanContext) -> str:
    """Return a context in its W3C text form."""
    trace_id, span_id, _, flags, *_ = place
    return f"00-{trace_id:032x}-{span_id:016x}-{flags & TraceFlags.SAMPLED:02x}"


def parse(text: str) -> SpanContext | None:
    """Return the context that a W3C trace parent names; None for any other text.

    The text may come from any sender: a wrong length, case or version is refused. The API's own
    propagator accepts more and takes three times as long.
    """
    found = W3C_PARENT.fullmatch(text) if len(text) <= LONGEST_PARENT else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    flags = KEPT if int(found[4], 16) & TraceFlags.SAMPLED else DROPPED
    return SpanContext(int(found[2], 16), int(found[3], 16), is_remote=True, trace_flags=flags)


def headers(place: SpanContext | None) -> dict[str, str]:
    """Return the headers that a message of this span carries: none where its trace is not kept."""
    if place is None or not (on() and place.trace_flags.sampled):
        return {}
    return {TRACE_PARENT: trace_parent(place)}


def headers_for(trace_id: str, *what: str | int) -> dict[str, str]:
    """Return the headers of a message of the span of a trace that is about ``what``."""
    return headers(context(trace_id, *what)) if on() else {}


def current() -> SpanContext | None:
    """Return the span that this task or thread works for, if any."""
    found = trace.get_current_span().get_span_context()
    return found if found.is_valid else None


def within(place: SpanContext) -> AbstractContextManager[object]:
    """Let log lines and exemplars of the block name the span that it works for."""
    return trace.use_span(NonRecordingSpan(place))
