"""``tracer`` and ``instruments`` on OpenTelemetry's SDK; imported by ``sdk.start`` alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from skerry.telemetry import spans, tracer
from skerry.telemetry.metrics import Kind, Metric

if TYPE_CHECKING:
    from skerry.core import tracing
    from skerry.telemetry.instruments import Attributes, Observer
    from skerry.telemetry.sdk import Identity, Target

SCOPE = "skerry"
MOST_LINKS = 4096
"""Links and events of one span; the SDK's 128 would drop contributions of a large fleet."""


class GivenIds(IdGenerator):
    """Gives out the ids that its thread was told last: ours are computed, not drawn."""

    def __init__(self) -> None:
        self._next = threading.local()

    def told(self, place: tracing.SpanContext) -> None:
        self._next.place = place

    def generate_trace_id(self) -> int:
        return int(self._next.place.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self._next.place.span_id, 16)


class SpanSink:
    """Turns what is told into spans of the SDK, under the ids that they were told with."""

    def __init__(self, identity: Identity, target: Target, processor: SpanProcessor) -> None:
        self._identity = identity
        self._ratio = target.sample_ratio
        self._processor = processor
        self._ids = GivenIds()
        self._lock = threading.Lock()
        self._tracers: dict[str, Tracer] = {}
        self._server: dict[str, spans.Value] = {}
        if target.broker is not None:
            address, port = target.broker
            self._server = {spans.SERVER_ADDRESS: address, spans.SERVER_PORT: port}
        self.provider = self._add("")

    def take(self, span: spans.Span) -> None:
        self._ids.told(span.context)
        server = self._server if spans.MESSAGING_SYSTEM in span.attributes else {}
        told = self._tracer(span.service).start_span(
            span.name,
            context=_within(span.parent),
            kind=KINDS[span.kind],
            attributes={**server, **span.attributes},
            links=[Link(_place(link.context), link.attributes) for link in span.links],
            start_time=span.start_ns,
        )
        for event in span.events:
            told.add_event(event.name, event.attributes, event.time_ns)
        if span.error:
            told.set_attribute(spans.ERROR_TYPE, span.error)
            told.set_status(Status(StatusCode.ERROR, span.error))
        told.end(max(span.start_ns, span.end_ns))

    def _tracer(self, service: str) -> Tracer:
        """Return the tracer of a service: one that we tell of has a resource of its own."""
        with self._lock:
            if service not in self._tracers:
                self._add(service)
            return self._tracers[service]

    def _add(self, service: str) -> TracerProvider:
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(self._ratio),
            resource=Resource.create(self._identity.resource(service)),
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=SpanLimits(max_links=MOST_LINKS, max_events=MOST_LINKS),
        )
        provider.add_span_processor(self._processor)
        self._tracers[service] = provider.get_tracer(SCOPE, self._identity.version)
        return provider


class SdkMeters:
    """Instruments of the SDK, made when they are first used."""

    def __init__(self, provider: MeterProvider, version: str) -> None:
        self.provider = provider
        self._meter = provider.get_meter(SCOPE, version)
        self._lock = threading.Lock()
        self._recording: dict[str, Callable[..., None]] = {}

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None:
        """Record now; where the code works for a span, that is the value's exemplar."""
        recording = self._recording.get(metric.name) or self._made(metric)
        place = tracer.current()
        if place is not None and place.sampled:
            recording(value, attributes, context=_within(place))
        else:
            recording(value, attributes)

    def observe(self, metric: Metric, observer: Observer) -> None:
        """Ask ``observer`` at each collection."""

        def read(_options: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, attributes) for value, attributes in observer()]

        create = {
            Kind.COUNTER: self._meter.create_observable_counter,
            Kind.UPDOWNCOUNTER: self._meter.create_observable_up_down_counter,
            Kind.GAUGE: self._meter.create_observable_gauge,
        }[metric.kind]
        create(metric.name, [read], metric.unit, metric.description)

    def _made(self, metric: Metric) -> Callable[..., None]:
        with self._lock:
            if metric.name not in self._recording:
                self._recording[metric.name] = self._make(metric)
            return self._recording[metric.name]

    def _make(self, metric: Metric) -> Callable[..., None]:
        told: dict[str, Any] = {
            "name": metric.name,
            "unit": metric.unit,
            "description": metric.description,
        }
        match metric.kind:
            case Kind.COUNTER:
                return self._meter.create_counter(**told).add
            case Kind.UPDOWNCOUNTER:
                return self._meter.create_up_down_counter(**told).add
            case Kind.GAUGE:
                return self._meter.create_gauge(**told).set
            case Kind.HISTOGRAM:
                bounds = metric.buckets or None
                histogram = self._meter.create_histogram(
                    **told, explicit_bucket_boundaries_advisory=bounds
                )
                return histogram.record


KINDS = {kind: SpanKind[kind.value] for kind in spans.Kind}


def span_sink(identity: Identity, target: Target) -> SpanSink:
    """Return a sink that sends spans in batches, from a thread of its own."""
    return SpanSink(identity, target, BatchSpanProcessor(OTLPSpanExporter(target.traces)))


def meters(identity: Identity, target: Target) -> SdkMeters:
    """Return instruments that are read and sent at an interval, by a thread of their own."""
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(target.metrics), target.metrics_interval_s * 1e3
    )
    resource = Resource.create(identity.resource())
    return SdkMeters(MeterProvider([reader], resource, shutdown_on_exit=False), identity.version)


def _within(parent: tracing.SpanContext | None) -> Context:
    """Return the context of a span whose parent is somewhere else, or of a root."""
    if parent is None:
        return Context()
    return set_span_in_context(NonRecordingSpan(_place(parent)), Context())


def _place(context: tracing.SpanContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
    )
