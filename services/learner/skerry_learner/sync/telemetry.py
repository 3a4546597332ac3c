"""What a learner reports of its rounds: spans, metrics, and one log line for each."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Link, SpanContext

from skerry.algorithm.goodput import Cause, split
from skerry.protocol.messages import Commit, ContributionHeader, Pulse
from skerry.protocol.subjects import Subjects
from skerry.status.view import spent_in
from skerry.telemetry import instruments, metrics, spans, tracing
from skerry.telemetry.instruments import Observer
from skerry.telemetry.metrics import Metric
from skerry.telemetry.spans import Attributes, FinishedSpan, Interval, Messages, SpanEvent, Value
from skerry_learner.sync.identity import LearnerIdentity

log = structlog.get_logger()

T = TypeVar("T")
MOST_FAILURES = 16
"""Failures to send that a span reports."""


class Stopwatch(Iterator[T]):
    """Passes an iterator's items on and counts the seconds that making them took."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.spent_s = 0.0

    def __next__(self) -> T:
        began_s = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.spent_s += time.perf_counter() - began_s


@dataclass(slots=True)
class Sending:
    """A contribution on its way: since when, and what held it up.

    Of perhaps a day of failures the first ones and the newest are kept.
    """

    began_ns: int | None = None
    failures: int = 0
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])

    def failed(self, event: SpanEvent) -> None:
        """Note one more failure."""
        self.failures += 1
        if len(self.events) == MOST_FAILURES:
            self.events.pop()
        self.events.append(event)


@dataclass(slots=True)
class LearnerTelemetry:
    """Reports one learner's rounds, from both of its threads.

    ``facts`` are what the line of a round will say, by fragment and version, until it is adopted.
    """

    identity: LearnerIdentity
    facts: dict[tuple[int, int], dict[str, object]] = field(
        default_factory=dict[tuple[int, int], dict[str, object]]
    )
    sending: dict[int, Sending] = field(default_factory=dict[int, Sending])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def captured(self, header: ContributionHeader, took: Interval) -> None:
        """Report that an outer gradient was taken; the device may still be computing it."""
        self._note(
            header.fragment,
            header.round_version,
            answered=header.round_version,
            steps=header.steps,
            tokens=header.tokens,
            capture_ms=_ms(took),
        )
        _emit_own(spans.CAPTURE, self.identity, header, took, {spans.STEPS: header.steps})

    def quantised(self, header: ContributionHeader, scheme: str, took: Interval) -> None:
        """Report that it was read off the device and quantised."""
        self._note(header.fragment, header.round_version, quantise_ms=_ms(took))
        _emit_own(spans.QUANTISE, self.identity, header, took, {spans.SCHEME: scheme})

    def begins(self, fragment: int, now_ns: int) -> None:
        """Note that a contribution is on its way, unless it has been already."""
        sending = self.sending.setdefault(fragment, Sending())
        sending.began_ns = now_ns if sending.began_ns is None else sending.began_ns

    def failed(self, fragment: int, error: str, now_ns: int) -> None:
        """Note that it could not be sent yet."""
        event = SpanEvent("not_sent", now_ns, {"exception.message": error})
        self.sending.setdefault(fragment, Sending()).failed(event)

    def dropped(self, fragment: int) -> None:
        """Note that it never will be sent."""
        self.sending.pop(fragment, None)

    def published(self, header: ContributionHeader, size_bytes: int, now_ns: int) -> None:
        """Report that the log has all of it."""
        learner, fragment = self.identity, header.fragment
        sending = self.sending.pop(fragment, Sending())
        took = Interval(now_ns if sending.began_ns is None else sending.began_ns, now_ns)
        self._note(
            fragment,
            header.round_version,
            publish_ms=_ms(took),
            sent_bytes=size_bytes,
            attempts=1 + sending.failures,
        )
        subject = Subjects(learner.run).contribution(fragment, learner.name)
        message = f"{learner.name}/{learner.incarnation}/{fragment}/{header.identity}"
        size = {spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes}
        messages = Messages(spans.CONTRIBUTION, subject, message)
        events = tuple(sending.events)
        _emit_own(spans.PUBLISH, self.identity, header, took, size, messages, events)

    def received(self, commit: Commit, size_bytes: int, took: Interval) -> None:
        """Report that a global fragment was read and decoded."""
        self._note(commit.fragment, commit.version, receive_ms=_ms(took), received_bytes=size_bytes)
        size = {spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes}
        _emit_global(spans.RECEIVE, self.identity, commit, took, size)

    def adopted(self, commit: Commit, before: int, adoption: str, took: Interval) -> None:
        """Report that the parameters have taken it in: the round is over for this learner."""
        trace = self.identity.trace(commit.fragment, commit.version)
        place = _place(spans.ADOPT, self.identity, trace)
        with tracing.within(place):
            log.info(
                "round_adopted",
                fragment=commit.fragment,
                version=commit.version,
                before=before,
                adoption=adoption,
                **self._known(commit.fragment, commit.version),
                adopt_ms=_ms(took),
            )
        about: Attributes = {spans.ADOPTION: adoption, spans.BASE_VERSION: before}
        _emit_global(spans.ADOPT, self.identity, commit, took, about)

    def _note(self, fragment: int, version: int, **facts: object) -> None:
        with self.lock:
            self.facts.setdefault((fragment, version), {}).update(facts)

    def _known(self, fragment: int, version: int) -> dict[str, object]:
        """Take what is known of a round and of the fragment's earlier ones, which are over too."""
        known: dict[str, object] = {}
        with self.lock:
            for key in sorted(k for k in self.facts if k[0] == fragment and k[1] <= version):
                known |= self.facts.pop(key)
        return known


def observe(learner: LearnerIdentity, newest: Callable[[], Pulse | None]) -> None:
    """Read a learner's metrics from its newest pulse at each collection."""
    of = {metrics.RUN: learner.run, metrics.LEARNER_NAME: learner.name}
    for metric, (key, read) in PULSE_METRICS.items():
        instruments.observe(metric, _observer(newest, of, key, read))


def _observer(
    newest: Callable[[], Pulse | None], of: Mapping[str, str], key: str, read: ReadPulse
) -> Observer:
    def values(_options: CallbackOptions) -> list[Observation]:
        pulse = newest()
        found = read(pulse) if pulse is not None else {}
        return [
            Observation(value, {**of, key: label} if key else of) for label, value in found.items()
        ]

    return values


def _uses(pulse: Pulse) -> dict[str, float]:
    """Return what this process's time went into; time in which it is down it cannot know."""
    uses = split(spent_in(pulse), pulse.alive_s)
    return {use: seconds for use, seconds in uses.items() if use != Cause.DOWN}


ReadPulse = Callable[[Pulse], Mapping[str, float]]
PULSE_METRICS: Mapping[Metric, tuple[str, ReadPulse]] = {
    metrics.LEARNER_STEP: ("", lambda p: {"": p.step}),
    metrics.LEARNER_STALENESS: ("", lambda p: {"": p.max_staleness}),
    metrics.LEARNER_CONTRIBUTIONS: ("", lambda p: {"": p.contributions}),
    metrics.LEARNER_SYNCS_SKIPPED: ("", lambda p: {"": p.syncs_skipped}),
    metrics.TOKENS: ("", lambda p: {"": p.tokens}),
    metrics.LOSS: ("", lambda p: {"": p.loss} if math.isfinite(p.loss) else {}),
    metrics.LEARNER_TIME: (metrics.USE, _uses),
    metrics.CODEC_TIME: (metrics.OPERATION, lambda p: {"encode": p.encode_s, "decode": p.decode_s}),
    metrics.WIRE_IO: (metrics.DIRECTION, lambda p: {"up": p.bytes_up, "down": p.bytes_down}),
    metrics.WIRE_UNCOMPRESSED: (
        metrics.DIRECTION,
        lambda p: {"up": p.f32_bytes_up, "down": p.f32_bytes_down},
    ),
}
"""Metrics that a pulse holds: the attribute that tells its values apart, if any, and the values."""


def _place(operation: str, learner: LearnerIdentity, trace: str, *what: int) -> SpanContext:
    return tracing.context(trace, operation, learner.name, learner.incarnation, *what)


def _emit_own(
    operation: str,
    learner: LearnerIdentity,
    header: ContributionHeader,
    took: Interval,
    more: Attributes,
    messages: Messages | None = None,
    events: tuple[SpanEvent, ...] = (),
) -> None:
    """Emit a span about something that this learner does for a contribution."""
    trace = learner.trace(header.fragment, header.round_version)
    if tracing.kept(trace):
        place = _place(operation, learner, trace, header.identity)
        about = {**_about(learner, header.fragment, header.round_version), **more}
        root = tracing.context(trace)
        tracing.emit(FinishedSpan(operation, place, root, took, about, messages, events=events))


def _emit_global(
    operation: str, learner: LearnerIdentity, commit: Commit, took: Interval, more: Attributes
) -> None:
    """Emit a span about something that is done with a global fragment: linked to its commit."""
    trace = learner.trace(commit.fragment, commit.version)
    if tracing.kept(trace):
        place, root = _place(operation, learner, trace), tracing.context(trace)
        subject = Subjects(learner.run).manifest(commit.fragment)
        message = f"{commit.fragment}/{commit.version}"
        messages = Messages(spans.GLOBAL_FRAGMENT, subject, message)
        about = {**_about(learner, commit.fragment, commit.version), **more}
        links = (Link(tracing.context(trace, spans.COMMIT), {spans.SYNCER: commit.syncer}),)
        tracing.emit(FinishedSpan(operation, place, root, took, about, messages, links))


def _about(learner: LearnerIdentity, fragment: int, version: int) -> dict[str, Value]:
    return {spans.FRAGMENT: fragment, spans.VERSION: version, spans.LEARNER: learner.name}


def _ms(took: Interval) -> float:
    return round(took.seconds * 1e3, 3)
