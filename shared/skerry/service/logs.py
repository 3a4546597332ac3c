"""Structured logs: JSON where a machine reads, coloured lines where a person does.

A line about a round carries its ``trace_id`` and ``span_id``, whether traces are collected or not:
the ids are computed, so a line leads to its trace and to the other services' lines in any case.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TextIO, cast

import structlog
from opentelemetry.trace import format_span_id, format_trace_id

from skerry.telemetry import tracing


class ForgivingStream:
    """A stream that drops what cannot be written: a full disk under a log must not end a service.

    ``lost`` counts the writes that failed.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost = 0

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            self.lost += 1
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            self.lost += 1


def configure(level: str, *, service: str) -> None:
    """Send every structlog event of this process to stderr, at ``level`` and above."""
    person = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if person else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_span,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", ForgivingStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def add_span(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Add the span that the code works for, unless the line names one itself."""
    place = tracing.current()
    if place is not None:
        event.setdefault("trace_id", format_trace_id(place.trace_id))
        event.setdefault("span_id", format_span_id(place.span_id))
    return event


def broker_event(event: str, fields: Mapping[str, str]) -> None:
    """Log that the broker was lost or is back; the run itself goes on meanwhile.

    Each failed attempt to reach it again is an ``error`` event, four a second: logged as debug.
    """
    log = structlog.get_logger()
    (log.debug if event == "error" else log.warning)(f"broker_{event}", **fields)
