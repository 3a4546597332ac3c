"""What a process reports of itself: log lines, and spans and metrics to a collector.

Logs are JSON where a machine reads, coloured lines where a person does. A line about a round
carries its ``trace_id`` and ``span_id``, whether traces are collected or not: the ids are computed,
so a line leads to its trace and to the other services' lines in any case.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, TextIO, cast
from urllib.parse import urlsplit

import structlog
from opentelemetry.trace import format_span_id, format_trace_id

from skerry import installing
from skerry.status.format import printable
from skerry.telemetry import lines, tracing

if TYPE_CHECKING:
    from skerry.settings.local import LocalSettings

log = structlog.get_logger()

STOP_S = 2.0
"""How long the end of a process waits for the collector at most."""


class ForgivingStream:
    """A stream that drops what cannot be written: a full disk must not end a service."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()


def configure(level: str, *, service: str) -> None:
    """Send every structlog event of this process to stderr, at ``level`` and above."""
    person = sys.stderr.isatty()
    shown = (harmless, structlog.dev.ConsoleRenderer())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_span,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lines.copy,
            *(shown if person else (structlog.processors.JSONRenderer(),)),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", ForgivingStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def harmless(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Return a line without terminal controls: others chose some of its names and texts."""
    return {k: printable(v) if isinstance(v, str) else v for k, v in event.items()}


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
    (log.debug if event == "error" else log.warning)(f"broker_{event}", **fields)


@dataclass(slots=True)
class BrokerWatch:
    """How long the broker has been away; ``away_since_s`` is None while it answers.

    Passes every event on to ``report``.
    """

    away_since_s: float | None = None
    report: Callable[[str, Mapping[str, str]], None] = broker_event

    def on_event(self, event: str, fields: Mapping[str, str]) -> None:
        """Take an event of the bus."""
        if event == "disconnected" and self.away_since_s is None:
            self.away_since_s = time.time()
        elif event == "reconnected":
            self.away_since_s = None
        self.report(event, fields)

    def away_s(self, now_s: float) -> float | None:
        """Return for how long the broker has been away; None while it is not."""
        return None if self.away_since_s is None else max(0.0, now_s - self.away_since_s)


def _trouble(cause: str, endpoint: str) -> None:
    log.warning("telemetry_trouble", cause=cause, endpoint=endpoint)


@contextmanager
def telemetry(local: LocalSettings, service: str, run: str, name: str) -> Generator[None]:
    """Send this process's spans, metrics and lines until the block ends; without an address, none.

    The end of the block takes ``STOP_S`` at most, in whatever state the collector is.
    Raises ConfigError where there is an address and OpenTelemetry's SDK is not installed.
    """
    wanted = local.telemetry
    if not wanted.wanted:
        yield
        return
    try:
        from skerry.telemetry import export
    except ModuleNotFoundError as error:
        lacks = "telemetry.endpoint", "OpenTelemetry's SDK", "otel"
        raise installing.missing(*lacks) from error
    broker = urlsplit(local.nats.url.split(",")[0].strip())
    address = (broker.hostname, broker.port or 4222) if broker.hostname else None
    identity = export.Identity(service, run, name, version("skerry"), broker=address)
    exporters = export.Telemetry(identity, wanted, _trouble)
    log.info(
        "telemetry_begins",
        traces=bool(wanted.traces_url),
        metrics=bool(wanted.metrics_url),
        logs=bool(wanted.logs_url),
        sample_ratio=wanted.sample_ratio,
    )
    try:
        yield
    finally:
        if not exporters.stop(STOP_S):
            log.warning("telemetry_unsent", waited_s=STOP_S)
