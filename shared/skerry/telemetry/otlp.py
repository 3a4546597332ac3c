"""``tracer`` and ``instruments`` on OpenTelemetry's SDK; imported by ``sdk.start`` alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from skerry.telemetry import spans, tracer
from skerry.telemetry.metrics import Kind, Metric

if TYPE_CHECKING:
    from skerry.telemetry import ids as tracing
    from skerry.telemetry.instruments import Attributes, Observer
    from skerry.telemetry.sdk import Identity, Target

SCOPE = "skerry"
MOST_RESOURCES = 32
"""Names of a broker's servers are in messages: of more of them, none is told apart."""


class KnownResource(Resource):
    """A resource that is hashed once: the encoder sorts spans by it, and it writes JSON each time.

    That was an eighth of what a span costs.
    """

    def __init__(self, attributes: Mapping[str, str]) -> None:
        whole = Resource.create(attributes)
        super().__init__(whole.attributes, whole.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


class SpanSink:
    """Turns what is told into spans that have ended, and hands them to who sends them in batches.

    The SDK's tracer is left out: ids and sampling are decided already, and it would cost the thread
    that tells eight times as much.
    """

    def __init__(self, identity: Identity, target: Target, processor: SpanProcessor) -> None:
        self.provider = processor
        self._identity = identity
        self._scope = InstrumentationScope(SCOPE, identity.version)
        self._resources = {("", ""): KnownResource(identity.resource())}
        self._server: dict[str, spans.Value] = {}
        if target.broker is not None:
            address, port = target.broker
            self._server = {spans.SERVER_ADDRESS: address, spans.SERVER_PORT: port}

    def take(self, span: spans.Span) -> None:
        attributes = dict(span.attributes)
        if spans.MESSAGING_SYSTEM in attributes and not span.service:
            attributes.update(self._server)
        if span.error:
            attributes[spans.ERROR_TYPE] = span.error
        ended = ReadableSpan(
            name=span.name,
            context=_place(span.context),
            parent=_place(span.parent) if span.parent is not None else None,
            resource=self._resource(span.service, span.instance),
            attributes=attributes,
            events=[Event(e.name, e.attributes, e.time_ns) for e in span.events],
            links=[Link(_place(link.context), link.attributes) for link in span.links],
            kind=KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else UNSET,
            start_time=span.start_ns,
            end_time=max(span.start_ns, span.end_ns),
            instrumentation_scope=self._scope,
        )
        self.provider.on_end(ended)

    def _resource(self, service: str, instance: str) -> Resource:
        """Return the resource of a service: one that we tell of has one of its own."""
        key = service, instance
        if key not in self._resources and len(self._resources) >= MOST_RESOURCES:
            key = service, ""
        if key not in self._resources:
            self._resources[key] = KnownResource(self._identity.resource_of(*key))
        return self._resources[key]


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


UNSET = Status(StatusCode.UNSET)
KEPT, DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
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


@lru_cache(maxsize=32)
def _within(parent: tracing.SpanContext) -> Context:
    """Return the context of what is done for a span; much is recorded for one after another."""
    return set_span_in_context(NonRecordingSpan(_place(parent)), Context())


def _place(context: tracing.SpanContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=KEPT if context.sampled else DROPPED,
    )
