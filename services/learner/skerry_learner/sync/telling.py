"""What a learner tells of its rounds: spans, metrics, and one log line for each."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from skerry.algorithm.goodput import Cause, split
from skerry.protocol.messages import Commit, ContributionHeader, Pulse
from skerry.protocol.subjects import Subjects
from skerry.status.view import spent_in
from skerry.telemetry import instruments, metrics, spans, tracer
from skerry.telemetry.instruments import Observation
from skerry.telemetry.metrics import Metric
from skerry.telemetry.spans import Event, Kind, Link, Span, messaging, messaging_name

if TYPE_CHECKING:
    from skerry_learner.sync.session import Learner

log = structlog.get_logger()

T = TypeVar("T")
MOST_TROUBLE = 16
"""Failures to send that a span tells of."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time from which to which something was done, in ns since the epoch."""

    began_ns: int
    ended_ns: int

    @property
    def seconds(self) -> float:
        return max(0, self.ended_ns - self.began_ns) / 1e9


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
class Trouble:
    """What held a contribution up: the first failures and the newest, of perhaps a day of them."""

    count: int = 0
    events: list[Event] = field(default_factory=list[Event])

    def add(self, event: Event) -> None:
        self.count += 1
        if len(self.events) == MOST_TROUBLE:
            self.events.pop()
        self.events.append(event)


@dataclass(slots=True)
class Teller:
    """Tells of one learner's rounds, from both of its threads.

    ``facts`` are what the line of a round will say, by fragment and version, until it is adopted;
    ``sending`` is since when a fragment's contribution is on its way, ``trouble`` what held it up.
    """

    facts: dict[tuple[int, int], dict[str, object]] = field(
        default_factory=dict[tuple[int, int], dict[str, object]]
    )
    sending: dict[int, int] = field(default_factory=dict[int, int])
    trouble: dict[int, Trouble] = field(default_factory=dict[int, "Trouble"])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def captured(self, learner: Learner, header: ContributionHeader, took: Stretch) -> None:
        """Tell that an outer gradient was taken; the device may still be computing it."""
        self._note(
            header.fragment,
            header.round_version,
            answered=header.round_version,
            steps=header.steps,
            tokens=header.tokens,
            capture_ms=_ms(took),
        )
        _tell_own(spans.CAPTURE, learner, header, took, {spans.STEPS: header.steps})

    def quantised(
        self, learner: Learner, header: ContributionHeader, scheme: str, took: Stretch
    ) -> None:
        """Tell that it was read off the device and quantised."""
        self._note(header.fragment, header.round_version, quantise_ms=_ms(took))
        _tell_own(spans.QUANTISE, learner, header, took, {spans.SCHEME: scheme})

    def begins(self, fragment: int, now_ns: int) -> None:
        """Note that a contribution is on its way, unless it has been already."""
        self.sending.setdefault(fragment, now_ns)

    def failed(self, fragment: int, error: str, now_ns: int) -> None:
        """Note that it could not be sent yet."""
        event = Event("not_sent", now_ns, {"exception.message": error})
        self.trouble.setdefault(fragment, Trouble()).add(event)

    def dropped(self, fragment: int) -> None:
        """Note that it never will be."""
        self.sending.pop(fragment, None)
        self.trouble.pop(fragment, None)

    def published(
        self, learner: Learner, header: ContributionHeader, size_bytes: int, now_ns: int
    ) -> None:
        """Tell that the log has all of it."""
        took = Stretch(self.sending.pop(header.fragment, now_ns), now_ns)
        trouble = self.trouble.pop(header.fragment, Trouble())
        self._note(
            header.fragment,
            header.round_version,
            publish_ms=_ms(took),
            sent_bytes=size_bytes,
            attempts=1 + trouble.count,
        )
        place = learner.publishing(header.fragment, header.round_version, header.identity)
        if not place.sampled:
            return
        subject = Subjects(learner.run).contribution(header.fragment, learner.name)
        message = f"{learner.name}/{learner.incarnation}/{header.fragment}/{header.identity}"
        tracer.tell(
            Span(
                name=messaging_name(spans.PUBLISH, spans.CONTRIBUTION),
                kind=Kind.PRODUCER,
                context=place,
                parent=tracer.context(place.trace_id),
                start_ns=took.began_ns,
                end_ns=took.ended_ns,
                attributes={
                    **messaging(spans.PUBLISH, subject, spans.CONTRIBUTION),
                    spans.MESSAGING_MESSAGE_ID: message,
                    spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes,
                    **_about(learner, header),
                },
                events=tuple(trouble.events),
            )
        )

    def received(self, learner: Learner, commit: Commit, size_bytes: int, took: Stretch) -> None:
        """Tell that a global fragment was read and decoded."""
        self._note(commit.fragment, commit.version, receive_ms=_ms(took), received_bytes=size_bytes)
        size = {spans.MESSAGING_MESSAGE_BODY_SIZE: size_bytes}
        _tell_global(spans.RECEIVE, Kind.CLIENT, learner, commit, took, size)

    def adopted(
        self, learner: Learner, commit: Commit, before: int, adoption: str, took: Stretch
    ) -> None:
        """Tell that the parameters have taken it in: the round is over for this learner."""
        trace = learner.trace(commit.fragment, commit.version)
        place = tracer.context(trace, spans.ADOPT, learner.name, learner.incarnation)
        with tracer.within(place):
            log.info(
                "round_adopted",
                fragment=commit.fragment,
                version=commit.version,
                before=before,
                adoption=adoption,
                **self._known(commit.fragment, commit.version),
                adopt_ms=_ms(took),
            )
        told: dict[str, spans.Value] = {spans.ADOPTION: adoption, spans.BASE_VERSION: before}
        _tell_global(spans.ADOPT, Kind.CONSUMER, learner, commit, took, told)

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


def observe(learner: Learner, newest: Callable[[], Pulse | None]) -> None:
    """Have a learner's metrics read off its newest pulse whenever they are sent."""
    of = {metrics.RUN: learner.run, metrics.LEARNER_NAME: learner.name}

    def each(read: Callable[[Pulse], float]) -> Callable[[], Iterable[Observation]]:
        return lambda: [(read(pulse), of) for pulse in (newest(),) if pulse is not None]

    plain: dict[Metric, Callable[[Pulse], float]] = {
        metrics.LEARNER_STEP: lambda pulse: pulse.step,
        metrics.LEARNER_STALENESS: lambda pulse: pulse.max_staleness,
        metrics.LEARNER_CONTRIBUTIONS: lambda pulse: pulse.contributions,
        metrics.LEARNER_SYNCS_SKIPPED: lambda pulse: pulse.syncs_skipped,
        metrics.TOKENS: lambda pulse: pulse.tokens,
    }
    for metric, read in plain.items():
        instruments.observe(metric, each(read))

    def spread(metric: Metric, key: str, parts: Callable[[Pulse], dict[str, float]]) -> None:
        def values() -> Iterable[Observation]:
            pulse = newest()
            found = parts(pulse) if pulse is not None else {}
            return [(value, {**of, key: name}) for name, value in found.items()]

        instruments.observe(metric, values)

    spread(metrics.LEARNER_TIME, metrics.USE, _uses)
    spread(
        metrics.CODEC_TIME,
        metrics.OPERATION,
        lambda p: {"encode": p.encode_s, "decode": p.decode_s},
    )
    spread(metrics.WIRE_IO, metrics.DIRECTION, lambda p: {"up": p.bytes_up, "down": p.bytes_down})
    spread(
        metrics.WIRE_UNCOMPRESSED,
        metrics.DIRECTION,
        lambda p: {"up": p.f32_bytes_up, "down": p.f32_bytes_down},
    )

    def loss() -> Iterable[Observation]:
        pulse = newest()
        return [(pulse.loss, of)] if pulse is not None and math.isfinite(pulse.loss) else []

    instruments.observe(metrics.LOSS, loss)


def _uses(pulse: Pulse) -> dict[str, float]:
    """Return what this process's time went into; it cannot tell of time in which it is down."""
    uses = split(spent_in(pulse), pulse.alive_s)
    return {use: seconds for use, seconds in uses.items() if use != Cause.DOWN}


def _about(learner: Learner, header: ContributionHeader) -> dict[str, spans.Value]:
    return {
        spans.FRAGMENT: header.fragment,
        spans.VERSION: header.round_version,
        spans.LEARNER: learner.name,
    }


def _tell_own(
    name: str,
    learner: Learner,
    header: ContributionHeader,
    took: Stretch,
    more: spans.Attributes,
) -> None:
    """Tell of something that this learner does by itself for a contribution."""
    trace = learner.trace(header.fragment, header.round_version)
    place = tracer.context(trace, name, learner.name, learner.incarnation, header.identity)
    if place.sampled:
        tracer.tell(
            Span(
                name=name,
                kind=Kind.INTERNAL,
                context=place,
                parent=tracer.context(trace),
                start_ns=took.began_ns,
                end_ns=took.ended_ns,
                attributes={**_about(learner, header), **more},
            )
        )


def _tell_global(
    operation: str,
    kind: Kind,
    learner: Learner,
    commit: Commit,
    took: Stretch,
    more: spans.Attributes,
) -> None:
    """Tell of something that is done with a global fragment: linked to its commit."""
    trace = learner.trace(commit.fragment, commit.version)
    place = tracer.context(trace, operation, learner.name, learner.incarnation)
    if not place.sampled:
        return
    subject = Subjects(learner.run).manifest(commit.fragment)
    tracer.tell(
        Span(
            name=messaging_name(operation, spans.GLOBAL_FRAGMENT),
            kind=kind,
            context=place,
            parent=tracer.context(trace),
            start_ns=took.began_ns,
            end_ns=took.ended_ns,
            attributes={
                **messaging(operation, subject, spans.GLOBAL_FRAGMENT),
                spans.FRAGMENT: commit.fragment,
                spans.VERSION: commit.version,
                spans.LEARNER: learner.name,
                **more,
            },
            links=(Link(tracer.context(trace, spans.COMMIT), {spans.SYNCER: commit.syncer}),),
        )
    )


def _ms(took: Stretch) -> float:
    return round(took.seconds * 1e3, 3)
