"""Telling spans: nothing at all, and nothing imported, until ``skerry.telemetry.sdk`` takes them.

Spans are told when they are over, with ids that everybody can compute (``skerry.telemetry.ids``);
so a span costs nothing while it lasts, may begin in one thread and end in another, and a log line
can name it whether anybody collects traces or not.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Protocol

from skerry.telemetry import ids as tracing
from skerry.telemetry.ids import SpanContext
from skerry.telemetry.spans import TRACE_DEST, TRACE_PARENT, Span


class Sink(Protocol):
    """Who takes spans, from any thread, and never waits for anything."""

    def take(self, span: Span) -> None: ...


class _State:
    """What this process does with its spans."""

    sink: Sink | None = None
    ratio: float = 0.0
    broker_subject: str = ""


_state = _State()
_current: ContextVar[SpanContext | None] = ContextVar("skerry_span", default=None)


def install(sink: Sink | None, ratio: float = 1.0, broker_subject: str = "") -> None:
    """Have spans taken by ``sink``, those of the share ``ratio`` of all traces; None: of none.

    ``broker_subject`` is where the broker shall tell of sampled messages; empty: nowhere.
    """
    _state.sink, _state.ratio = sink, ratio if sink is not None else 0.0
    _state.broker_subject = broker_subject


def on() -> bool:
    """Tell whether anybody takes spans: where not, nobody need think of any."""
    return _state.sink is not None


def context(trace: str, *what: str | int) -> SpanContext:
    """Return the place of the span of a trace that is about ``what``; without it, of the root."""
    return _context(trace, what, _state.ratio)


@lru_cache(maxsize=4096)
def _context(trace: str, what: tuple[str | int, ...], ratio: float) -> SpanContext:
    """Return a place; several spans and lines ask for the same one."""
    kept = ratio > 0 and tracing.sampled(trace, ratio)
    return SpanContext(trace, tracing.span_id(trace, *what), kept)


def tell(span: Span) -> None:
    """Hand on a span that is over, unless its trace is not kept."""
    if _state.sink is not None and span.context.sampled:
        _state.sink.take(span)


def headers(place: SpanContext) -> dict[str, str]:
    """Return the headers that a message of this span carries: none where its trace is not kept."""
    if not (on() and place.sampled):
        return {}
    told = {TRACE_PARENT: place.trace_parent}
    if _state.broker_subject:
        told[TRACE_DEST] = _state.broker_subject
    return told


def headers_for(trace: str, *what: str | int) -> dict[str, str]:
    """Return the headers for a message of the span of a trace that is about ``what``.

    None either where there is no trace, such as for what an older release has written.
    """
    return headers(context(trace, *what)) if trace and on() else {}


def current() -> SpanContext | None:
    """Return the span that this task or thread works for, if any."""
    return _current.get()


@contextmanager
def within(place: SpanContext) -> Generator[None]:
    """Have log lines, and whatever else asks, know which span this code works for."""
    token = _current.set(place)
    try:
        yield
    finally:
        _current.reset(token)
