"""An OTLP receiver for tests: takes what real exporters send, and may answer nothing."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

KINDS = dict(zip(Span.SpanKind.values(), Span.SpanKind.keys(), strict=True))
STATUS = dict(zip(Status.StatusCode.values(), Status.StatusCode.keys(), strict=True))


@dataclass(frozen=True, slots=True)
class Link:
    """A link of a received span."""

    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Received:
    """One span as it came, ids in hexadecimal, times in ns."""

    service: str
    instance: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[Link, ...]
    events: tuple[str, ...]
    status: tuple[str, str]
    resource: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """The newest points of one metric from one service; ``traces`` are those of its exemplars."""

    service: str
    name: str
    unit: str
    kind: str
    points: list[tuple[dict[str, Any], float]]
    traces: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Line:
    """One log line as it came, ids in hexadecimal."""

    service: str
    name: str
    level: str
    trace_id: str
    span_id: str
    attributes: dict[str, Any]


@dataclass(slots=True)
class Receiver:
    """Listens on a free loopback port; ``held`` makes it take requests and answer none."""

    spans: list[Received] = field(default_factory=list[Received])
    series: dict[tuple[str, str, str], Series] = field(
        default_factory=dict[tuple[str, str, str], Series]
    )
    lines: list[Line] = field(default_factory=list[Line])
    schemas: set[str] = field(default_factory=set[str])
    requests: int = 0
    status: int = 200
    held: threading.Event | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)
    server: ThreadingHTTPServer = field(init=False)

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(self.path, body)
                if receiver.held is not None:
                    receiver.held.wait()
                self.send_response(receiver.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - silent
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.held is not None:
            self.held.set()
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        with self.changed:
            self.requests += 1
            if path == "/v1/traces":
                traces = _parsed(ExportTraceServiceRequest(), body)
                self.schemas |= _schemas(traces.resource_spans, "scope_spans")
                self.spans += _spans(traces)
            elif path == "/v1/logs":
                lines = _parsed(ExportLogsServiceRequest(), body)
                self.schemas |= _schemas(lines.resource_logs, "scope_logs")
                self.lines += _lines(lines)
            elif path == "/v1/metrics":
                metrics = _parsed(ExportMetricsServiceRequest(), body)
                self.schemas |= _schemas(metrics.resource_metrics, "scope_metrics")
                for series, instance in _series(metrics):
                    self.series[series.service, instance, series.name] = series
            self.changed.notify_all()

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Return once something holds of what was received."""

        def wait() -> bool:
            with self.changed:
                return self.changed.wait_for(holds, timeout_s)

        if not await asyncio.to_thread(wait):
            msg = f"{timeout_s:g} s went by, with {len(self.spans)} spans, {self.requests} posts."
            raise TimeoutError(msg)

    def of(self, trace_id: str) -> list[Received]:
        """Return the spans of one trace, in the order in which they began."""
        return sorted((s for s in self.spans if s.trace_id == trace_id), key=lambda s: s.start_ns)


def _parsed(message: Any, body: bytes) -> Any:
    message.ParseFromString(body)
    return message


def _schemas(groups: Any, scopes: str) -> set[str]:
    """Return the schema URLs of resources and scopes."""
    named = {scope.schema_url for group in groups for scope in getattr(group, scopes)}
    return {group.schema_url for group in groups} | named


def _spans(request: ExportTraceServiceRequest) -> list[Received]:
    return [
        _span(span, _attributes(group.resource.attributes))
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _lines(request: ExportLogsServiceRequest) -> list[Line]:
    return [
        Line(
            service=_attributes(group.resource.attributes)["service.name"],
            name=line.body.string_value,
            level=line.severity_text,
            trace_id=line.trace_id.hex(),
            span_id=line.span_id.hex(),
            attributes=_attributes(line.attributes),
        )
        for group in request.resource_logs
        for scope in group.scope_logs
        for line in scope.log_records
    ]


def _span(span: Span, resource: dict[str, Any]) -> Received:
    return Received(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        kind=KINDS[span.kind].removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
            for link in span.links
        ),
        events=tuple(event.name for event in span.events),
        status=(STATUS[span.status.code].removeprefix("STATUS_CODE_"), span.status.message),
        resource=resource,
    )


def _series(request: ExportMetricsServiceRequest) -> list[tuple[Series, str]]:
    found: list[tuple[Series, str]] = []
    for group in request.resource_metrics:
        resource = _attributes(group.resource.attributes)
        service, instance = resource["service.name"], resource["service.instance.id"]
        for scope in group.scope_metrics:
            for metric in scope.metrics:
                kind = str(metric.WhichOneof("data"))
                named = service, metric.name, metric.unit, kind
                series = Series(*named, _points(metric, kind), _traces(metric, kind))
                found.append((series, instance))
    return found


def _points(metric: Metric, kind: str) -> list[tuple[dict[str, Any], float]]:
    points: list[tuple[dict[str, Any], float]] = []
    for point in getattr(metric, kind).data_points:
        if kind == "histogram":
            value = float(point.count)
        else:
            value = float(getattr(point, str(point.WhichOneof("value"))))
        points.append((_attributes(point.attributes), value))
    return points


def _traces(metric: Metric, kind: str) -> frozenset[str]:
    points = getattr(metric, kind).data_points
    return frozenset(e.trace_id.hex() for point in points for e in point.exemplars)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    return getattr(value, kind) if kind else None
