"""Send spans, metrics and log lines by OTLP (http/protobuf), with OpenTelemetry's SDK.

No other module imports that. Everything is sent from threads of its own: a collector that is
dead, slow or refuses costs the caller nothing, what cannot be sent is dropped, and
``Telemetry.stop`` waits for a bounded time.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace as trace_api
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode

from skerry.settings.checks import masked_url
from skerry.settings.local import TelemetrySettings
from skerry.telemetry import instruments, lines, spans, tracing

COMPLAIN_EVERY_S = 60.0
SCOPE = "skerry"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.36.0"
"""The semantic conventions that attributes follow."""
UNSET = Status(StatusCode.UNSET)

Complain = Callable[[str, str], None]
"""Takes what is wrong, and the address of the collector, without its password."""


class KnownResource(Resource):
    """A resource that caches its hash: the encoder groups spans by it, and each hash writes JSON.

    That was an eighth of a span's cost.
    """

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url or SCHEMA_URL)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@dataclass(frozen=True, slots=True)
class Identity:
    """The source of spans, metrics and lines: ``service`` of ``run``, under a name of its own.

    ``broker`` is the host and port that messaging spans name.
    """

    service: str
    run: str
    name: str
    version: str
    broker: tuple[str, int] | None = None

    def resource(self) -> KnownResource:
        """Return the resource of this process; ``OTEL_RESOURCE_ATTRIBUTES`` may name the host."""
        own = Resource.create(
            {
                "service.namespace": "skerry",
                "service.name": f"skerry-{self.service}",
                "service.instance.id": f"{self.run}/{self.name}",
                "service.version": self.version,
                spans.RUN: self.run,
            }
        )
        return KnownResource(Resource({"host.name": socket.gethostname()}).merge(own))


class Telemetry:
    """Running exporters of spans, metrics and lines; ``stop`` them at the end of the process."""

    def __init__(self, identity: Identity, settings: TelemetrySettings, complain: Complain) -> None:
        """Send to the addresses that ``settings`` name, from now on.

        ``complain`` is called from another thread, once a minute at most, with what is wrong with
        a collector.
        """
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [_Warnings(complain, settings)], False
        self._providers: list[SpanProcessor | MeterProvider | LoggerProvider] = []
        if settings.traces_url:
            processor = BatchSpanProcessor(OTLPSpanExporter(settings.traces_url))
            ratios = settings.sample_ratio, settings.step_sample_ratio
            tracing.install(SpanExporter(identity, processor).export, *ratios)
            self._providers.append(processor)
        if settings.metrics_url:
            reader = PeriodicExportingMetricReader(
                OTLPMetricExporter(settings.metrics_url), settings.metrics_interval_s * 1e3
            )
            provider = MeterProvider([reader], identity.resource(), shutdown_on_exit=False)
            instruments.install(provider.get_meter(SCOPE, identity.version, SCHEMA_URL))
            self._providers.append(provider)

        if settings.logs_url:
            keeping = LoggerProvider(identity.resource(), shutdown_on_exit=False)
            keeping.add_log_record_processor(
                BatchLogRecordProcessor(OTLPLogExporter(settings.logs_url))
            )
            lines.install(LineExporter(identity, keeping).export)
            self._providers.append(keeping)

    def stop(self, within_s: float) -> bool:
        """Send what is left, for at most that long; return False if some may be lost."""
        tracing.install(None)
        lines.install(None)
        instruments.install(instruments.OFF)
        deadline = time.monotonic() + within_s
        # Daemon threads: the interpreter's exit waits for no collector either.
        threads = [
            threading.Thread(target=provider.shutdown, name="telemetry-stop", daemon=True)
            for provider in self._providers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class SpanExporter:
    """Turns finished spans into the SDK's and queues them for the thread that sends.

    The SDK's tracer is left out: ids and sampling are decided already, and it costs the caller
    18 us a span instead of 2.
    """

    def __init__(self, identity: Identity, processor: SpanProcessor) -> None:
        self._processor = processor
        self._scope = InstrumentationScope(SCOPE, identity.version, SCHEMA_URL)
        self._resource = identity.resource()
        self._client: dict[str, spans.Value] = {spans.MESSAGING_CLIENT_ID: identity.name}
        if identity.broker is not None:
            self._client[spans.SERVER_ADDRESS], self._client[spans.SERVER_PORT] = identity.broker

    def export(self, span: spans.FinishedSpan) -> None:
        """Queue a span; where the queue is full it is dropped."""
        attributes = span.all_attributes()
        if span.messages is not None:
            attributes.update(self._client)
        start_ns, end_ns = span.interval
        finished = ReadableSpan(
            name=span.name,
            context=span.context,
            parent=span.parent,
            resource=self._resource,
            attributes=attributes,
            events=[Event(e.name, e.attributes, e.time_ns) for e in span.events],
            links=span.links,
            kind=span.kind,
            status=UNSET,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(finished)


SEVERITIES = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "critical": SeverityNumber.FATAL,
}
NOT_ATTRIBUTES = frozenset({"event", "level", "timestamp", "service", "trace_id", "span_id"})
"""Keys of a line that have a field of their own, or belong to the resource."""


class LineExporter:
    """Turns structlog's lines into OpenTelemetry's records, in the trace that they name."""

    def __init__(self, identity: Identity, provider: LoggerProvider) -> None:
        self._logger = provider.get_logger(SCOPE, identity.version, SCHEMA_URL)

    def export(self, event: lines.Event) -> None:
        """Queue a line; where the queue is full it is dropped."""
        level = str(event.get("level", "info"))
        trace, span = (int(str(event.get(key) or "0"), 16) for key in ("trace_id", "span_id"))
        place = SpanContext(trace, span, is_remote=True)
        record = LogRecord(
            timestamp=time.time_ns(),
            context=trace_api.set_span_in_context(trace_api.NonRecordingSpan(place), Context()),
            severity_text=level,
            severity_number=SEVERITIES.get(level, SeverityNumber.INFO),
            body=str(event.get("event", "")),
            attributes={
                key: value if isinstance(value, str | bool | int | float) else str(value)
                for key, value in event.items()
                if key not in NOT_ATTRIBUTES and value is not None
            },
        )
        self._logger.emit(record)


class _Warnings(logging.Handler):
    """Passes on what the SDK logs, seldom: a dead collector is one fact, not thousands."""

    def __init__(self, complain: Complain, settings: TelemetrySettings) -> None:
        super().__init__(logging.WARNING)
        self._complain = complain
        self._any = settings.endpoint or settings.traces_url
        self._urls = {
            "trace_exporter": settings.traces_url,
            "metric_exporter": settings.metrics_url,
            "_log_exporter": settings.logs_url,
        }
        self._complained_s = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            exporter = record.name.rpartition(".")[2]
            self._complain(record.getMessage(), masked_url(self._urls.get(exporter, self._any)))
