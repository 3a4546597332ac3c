"""Names, attribute keys and kinds of spans, and the shape of a finished one.

Messaging spans follow OpenTelemetry's conventions (a test compares the keys with its package):
their name is ``{operation} {destination template}``; a sender is PRODUCER, a receiver CLIENT, a
processor CONSUMER. Messages are joined by links, which carry what is true of one message only; a
span about a single message also has its round as parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from opentelemetry.trace import Link, SpanContext, SpanKind

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value]

# Names of spans. One round has the first eight; a round of n learners 4 + 6n spans.
ROUND, CAPTURE, QUANTISE, PUBLISH = "round", "capture", "quantise", "publish"
RECEIVE, PROCESS, MERGE, COMMIT, ADOPT = "receive", "process", "merge", "commit", "adopt"
TRAINING_STEP, DATA, TRAIN, BOUNDARY = "step", "data", "train", "boundary"
CHECKPOINT, WRITE, EVALUATE, JUDGE = "checkpoint", "write", "evaluate", "judge"

CONTRIBUTION = "skerry.{run}.contrib.{shard}.{fragment}.{learner}"
"""Destination templates: what subjects look like, with their variables left open."""
GLOBAL_FRAGMENT = "skerry.{run}.state.{shard}.{fragment}.manifest"

# Keys of OpenTelemetry's semantic conventions.
MESSAGING_SYSTEM = "messaging.system"
MESSAGING_CLIENT_ID = "messaging.client.id"
MESSAGING_OPERATION_NAME = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
MESSAGING_DESTINATION_NAME = "messaging.destination.name"
MESSAGING_DESTINATION_TEMPLATE = "messaging.destination.template"
MESSAGING_MESSAGE_ID = "messaging.message.id"
MESSAGING_MESSAGE_BODY_SIZE = "messaging.message.body.size"
MESSAGING_BATCH_MESSAGE_COUNT = "messaging.batch.message_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

NATS = "nats"  # the conventions have no page for this system, and allow the value

# Keys of our own.
RUN = "skerry.run"  # an attribute of the resource, so of every span
FRAGMENT, VERSION, STEP = "skerry.fragment", "skerry.version", "skerry.step"
REASON, ATTEMPT = "skerry.round.reason", "skerry.round.attempt"
FINAL, REFUSED = "skerry.round.final", "skerry.round.refused"
QUORUM_S, GRACE_S = "skerry.round.quorum_s", "skerry.round.grace_s"
CONTRIBUTIONS = "skerry.round.contributions"
LEARNER, SYNCER, FENCE = "skerry.learner", "skerry.syncer", "skerry.fence"
BASE_VERSION = "skerry.base_version"
STALENESS = "skerry.staleness"  # in versions: above 0 on a link, it leads to an earlier round
WEIGHT, STEPS, SCHEME = "skerry.weight", "skerry.steps", "skerry.scheme"
MERGE_METHOD, ADOPTION = "skerry.merge.method", "skerry.adoption"
CHECKPOINT_PATH, CHECKPOINT_SIZE = "skerry.checkpoint.path", "skerry.checkpoint.size"
LEDGER_SEQUENCE = "skerry.ledger.sequence"
VERSIONS, LOSS = "skerry.versions", "skerry.loss"

TRACE_PARENT = "traceparent"
"""The W3C header; on the wire exactly so, since nats-server looks for it letter by letter."""

OPERATIONS = {
    PUBLISH: (SpanKind.PRODUCER, "send"),
    COMMIT: (SpanKind.PRODUCER, "send"),
    RECEIVE: (SpanKind.CLIENT, "receive"),
    PROCESS: (SpanKind.CONSUMER, "process"),
    ADOPT: (SpanKind.CONSUMER, "process"),
}
"""Kind of span and the conventions' type of each messaging operation."""


def seconds(start_ns: int, end_ns: int) -> float:
    """Return the time between two readings of a clock; 0 where it was set back meanwhile."""
    return max(0, end_ns - start_ns) / 1e9


class Interval(NamedTuple):
    """A time interval in nanoseconds since the epoch."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return seconds(self.start_ns, self.end_ns)


class SpanEvent(NamedTuple):
    """Something that happened within a span; ``time_ns`` since the epoch."""

    name: str
    time_ns: int
    attributes: Attributes = MappingProxyType({})


class Messages(NamedTuple):
    """What a messaging span is about: one message with its subject and id, or ``batch`` of them."""

    template: str
    subject: str = ""
    id: str = ""
    batch: int = 1


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A span that is over."""

    operation: str
    context: SpanContext
    parent: SpanContext | None
    interval: Interval
    attributes: Attributes = field(default_factory=dict[str, Value])
    messages: Messages | None = None
    links: tuple[Link, ...] = ()
    events: tuple[SpanEvent, ...] = ()

    @property
    def name(self) -> str:
        """The span's name, by the conventions of messaging where it is about messages."""
        template = self.messages.template if self.messages is not None else ""
        return f"{self.operation} {template}" if template else self.operation

    @property
    def kind(self) -> SpanKind:
        return OPERATIONS[self.operation][0] if self.messages is not None else SpanKind.INTERNAL

    def all_attributes(self) -> dict[str, Value]:
        """Return all attributes, those of messaging too, in a dict of the caller's."""
        found = dict(self.attributes)
        if self.messages is None:
            return found
        template, subject, message, batch = self.messages
        found[MESSAGING_SYSTEM] = NATS
        found[MESSAGING_OPERATION_NAME] = self.operation
        found[MESSAGING_DESTINATION_TEMPLATE] = template
        found[MESSAGING_OPERATION_TYPE] = OPERATIONS[self.operation][1]
        if subject:
            found[MESSAGING_DESTINATION_NAME] = subject
        if message:
            found[MESSAGING_MESSAGE_ID] = message
        if batch != 1:
            found[MESSAGING_BATCH_MESSAGE_COUNT] = batch
        return found
