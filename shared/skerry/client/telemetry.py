"""What a learner reports of its rounds: spans, metrics, and one log line for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.trace import Link, SpanContext

from skerry.protocol.messages import Commit, ContributionHeader, Pulse
from skerry.protocol.subjects import ShardSubjects, Subjects
from skerry.status.pulse_metrics import PULSE_METRICS, ReadPulse
from skerry.telemetry import instruments, metrics, spans, tracing
from skerry.telemetry.instruments import Observer
from skerry.telemetry.spans import Attributes, FinishedSpan, Interval, Messages, SpanEvent, Value

log = structlog.get_logger()

MOST_FAILURES = 16
"""Failures to send that a span reports."""


@dataclass(frozen=True, slots=True)
class LearnerIdentity:
    """One incarnation in one run; ``created_ns`` tells the run from others with the same id."""

    run: str
    name: str
    incarnation: int
    created_ns: int = 0
    shards: int = 1

    @property
    def start(self) -> tuple[str, int]:
        """What tells this start of a learner from all others in its run."""
        return self.name, self.incarnation

    @property
    def labels(self) -> dict[str, str]:
        """The attributes of its metrics."""
        return {metrics.RUN: self.run, metrics.LEARNER_NAME: self.name}

    def subjects(self, fragment: int) -> ShardSubjects:
        return Subjects(self.run).of_fragment(fragment, self.shards)

    def trace(self, fragment: int, version: int) -> str:
        """Return the id of the trace of the round that makes this version."""
        return tracing.trace_id(self.run, fragment, version, self.created_ns)

    def publishing(self, fragment: int, version: int, identity: int) -> SpanContext:
        """Return the span that sends a contribution: the same one at each attempt."""
        trace = self.trace(fragment, version)
        return tracing.context(trace, spans.PUBLISH, *self.start, identity)


@dataclass(slots=True)
class Sending:
    """A contribution being sent: since when, and which failures delayed it.

    The first failures and the newest are kept, since there may be a day of them.
    """

    began_ns: int | None = None
    failures: int = 0
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])


@dataclass(slots=True)
class LearnerTelemetry:
    """Reports one learner's rounds, from both of its threads.

    ``facts`` are the fields of a round's log line, by fragment and version, until it is adopted.
    """

    identity: LearnerIdentity
    facts: dict[tuple[int, int], dict[str, object]] = field(
        default_factory=dict[tuple[int, int], dict[str, object]]
    )
    sending: dict[int, Sending] = field(default_factory=dict[int, Sending])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def captured(self, header: ContributionHeader, took: Interval) -> None:
        """Report that an outer gradient was taken; the device may still be computing it."""
        version, steps, tokens = header.round_version, header.steps, header.tokens
        facts = {"answered": version, "steps": steps, "tokens": tokens, "capture_ms": _ms(took)}
        self._note(header.fragment, version, facts)
        self._emit_own(spans.CAPTURE, header, took, {spans.STEPS: steps})

    def quantised(self, header: ContributionHeader, scheme: str, took: Interval) -> None:
        """Report that an outer gradient was read off the device and quantised."""
        self._note(header.fragment, header.round_version, {"quantise_ms": _ms(took)})
        self._emit_own(spans.QUANTISE, header, took, {spans.SCHEME: scheme})

    def begins(self, fragment: int, now_ns: int) -> None:
        """Note that a fragment's contribution is being sent, unless that was noted before."""
        sending = self.sending.setdefault(fragment, Sending())
        sending.began_ns = now_ns if sending.began_ns is None else sending.began_ns

    def failed(self, fragment: int, error: Exception, now_ns: int) -> None:
        """Note that a fragment's contribution could not be sent yet."""
        sending = self.sending.setdefault(fragment, Sending())
        sending.failures += 1
        del sending.events[MOST_FAILURES - 1 :]
        about = {"error.type": type(error).__name__, "exception.message": str(error)}
        sending.events.append(SpanEvent("not_sent", now_ns, about))

    def dropped(self, fragment: int) -> None:
        """Note that a fragment's contribution never will be sent."""
        self.sending.pop(fragment, None)

    def published(self, header: ContributionHeader, size_bytes: int, now_ns: int) -> None:
        """Report that the log has all of a contribution."""
        learner, fragment = self.identity, header.fragment
        sending = self.sending.pop(fragment, Sending())
        took = Interval(now_ns if sending.began_ns is None else sending.began_ns, now_ns)
        attempts = 1 + sending.failures
        facts = {"publish_ms": _ms(took), "sent_bytes": size_bytes, "attempts": attempts}
        self._note(fragment, header.round_version, facts)
        subject = learner.subjects(fragment).contribution(fragment, learner.name)
        message = f"{learner.name}/{learner.incarnation}/{fragment}/{header.identity}"
        messages = Messages(spans.CONTRIBUTION, subject, message)
        size = {spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes}
        self._emit_own(spans.PUBLISH, header, took, size, messages, tuple(sending.events))

    def received(self, commit: Commit, size_bytes: int, took: Interval) -> None:
        """Report that a global fragment was read and decoded."""
        facts = {"receive_ms": _ms(took), "received_bytes": size_bytes}
        self._note(commit.fragment, commit.version, facts)
        size = {spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes}
        self._emit_global(spans.RECEIVE, commit, took, size)

    def adopted(self, commit: Commit, before: int, adoption: str, took: Interval) -> None:
        """Report that a commit was adopted: its round is over for this learner.

        The log line also has what is known of the fragment's earlier rounds, which are over too.
        """
        fragment, version = commit.fragment, commit.version
        known: dict[str, object] = {}
        with self.lock:
            for key in sorted(k for k in self.facts if k[0] == fragment and k[1] <= version):
                known |= self.facts.pop(key)
        trace = self.identity.trace(fragment, version)
        with tracing.within(tracing.context(trace, spans.ADOPT, *self.identity.start)):
            log.info(
                "round_adopted",
                fragment=fragment,
                version=version,
                before=before,
                adoption=adoption,
                **known,
                adopt_ms=_ms(took),
            )
        about: Attributes = {spans.ADOPTION: adoption, spans.BASE_VERSION: before}
        self._emit_global(spans.ADOPT, commit, took, about)

    def _note(self, fragment: int, version: int, facts: Mapping[str, object]) -> None:
        with self.lock:
            self.facts.setdefault((fragment, version), {}).update(facts)

    def _emit_own(
        self,
        operation: str,
        header: ContributionHeader,
        took: Interval,
        more: Attributes,
        messages: Messages | None = None,
        events: tuple[SpanEvent, ...] = (),
    ) -> None:
        """Emit a span about something that this learner does for a contribution."""
        trace = self.identity.trace(header.fragment, header.round_version)
        if tracing.kept(trace):
            place = tracing.context(trace, operation, *self.identity.start, header.identity)
            about = {**self._about(header.fragment, header.round_version), **more}
            root = tracing.context(trace)
            tracing.emit(FinishedSpan(operation, place, root, took, about, messages, events=events))

    def _emit_global(
        self, operation: str, commit: Commit, took: Interval, more: Attributes
    ) -> None:
        """Emit a span about something that is done with a global fragment: linked to its commit."""
        trace = self.identity.trace(commit.fragment, commit.version)
        if tracing.kept(trace):
            place = tracing.context(trace, operation, *self.identity.start)
            subject = self.identity.subjects(commit.fragment).manifest(commit.fragment)
            message = f"{commit.fragment}/{commit.version}"
            messages = Messages(spans.GLOBAL_FRAGMENT, subject, message)
            about = {**self._about(commit.fragment, commit.version), **more}
            links = (Link(tracing.context(trace, spans.COMMIT), {spans.SYNCER: commit.syncer}),)
            root = tracing.context(trace)
            tracing.emit(FinishedSpan(operation, place, root, took, about, messages, links))

    def _about(self, fragment: int, version: int) -> dict[str, Value]:
        learner = self.identity.name
        return {spans.FRAGMENT: fragment, spans.VERSION: version, spans.LEARNER: learner}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that each part of a training step took; ``data_s`` is the wait for its batch."""

    data_s: float
    train_s: float
    boundary_s: float


def trace_step(learner: LearnerIdentity, step: int, lasted: StepTimes) -> None:
    """Emit the spans of a step that ends now, where its trace is kept."""
    if not tracing.on():
        return
    trace = tracing.step_id(learner.run, learner.created_ns, *learner.start, step)
    if not tracing.kept_step(trace):
        return
    parts = {
        spans.DATA: lasted.data_s,
        spans.TRAIN: lasted.train_s,
        spans.BOUNDARY: lasted.boundary_s,
    }
    root, ended_ns = tracing.context(trace), time.time_ns()
    at_ns = began_ns = ended_ns - round(sum(parts.values()) * 1e9)
    about: Attributes = {spans.LEARNER: learner.name, spans.STEP: step}
    whole = Interval(began_ns, ended_ns)
    tracing.emit(FinishedSpan(spans.TRAINING_STEP, root, None, whole, about))
    for name, took_s in parts.items():
        until_ns = at_ns + round(took_s * 1e9)
        place, took = tracing.child(root, name), Interval(at_ns, until_ns)
        tracing.emit(FinishedSpan(name, place, root, took))
        at_ns = until_ns


def observe(learner: LearnerIdentity, newest: Callable[[], Pulse | None]) -> None:
    """Read a learner's metrics from its newest pulse at each collection."""

    def observer(key: str, read: ReadPulse) -> Observer:
        def values(_options: CallbackOptions) -> list[Observation]:
            pulse = newest()
            found = read(pulse).items() if pulse is not None else ()
            return [
                Observation(value, {**learner.labels, key: label} if key else learner.labels)
                for label, value in found
            ]

        return values

    for metric, (key, read) in PULSE_METRICS.items():
        instruments.observe(metric, observer(key, read))


def _ms(took: Interval) -> float:
    return round(took.seconds * 1e3, 3)
