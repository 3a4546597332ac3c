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

ROUND = "round"
CAPTURE = "capture"
QUANTISE = "quantise"
PUBLISH = "publish"
RECEIVE = "receive"
PROCESS = "process"
MERGE = "merge"
COMMIT = "commit"
ADOPT = "adopt"
CHECKPOINT = "checkpoint"
WRITE = "write"
EVALUATE = "evaluate"
JUDGE = "judge"
"""What the broker does with a message."""

CONTRIBUTION = "skerry.{run}.contrib.{fragment}.{learner}"
"""Destination templates: what subjects look like, with their variables left open."""
GLOBAL_FRAGMENT = "skerry.{run}.state.{fragment}.manifest"

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
ERROR_TYPE = "error.type"

NATS = "nats"
"""The messaging system: the conventions have no page for it, and allow the value."""

# Keys of our own.

RUN = "skerry.run"
"""The run's id: an attribute of the resource, so of every span."""
FRAGMENT = "skerry.fragment"
VERSION = "skerry.version"
"""The version that a round makes of its fragment."""
STEP = "skerry.step"
REASON = "skerry.round.reason"
ATTEMPT = "skerry.round.attempt"
FINAL = "skerry.round.final"
QUORUM_S = "skerry.round.quorum_s"
GRACE_S = "skerry.round.grace_s"
CONTRIBUTIONS = "skerry.round.contributions"
REFUSED = "skerry.round.refused"
LEARNER = "skerry.learner"
BASE_VERSION = "skerry.base_version"
STALENESS = "skerry.staleness"
"""How many versions late: above 0 on a link, it leads to an earlier round's trace."""
WEIGHT = "skerry.weight"
STEPS = "skerry.steps"
SCHEME = "skerry.scheme"
MERGE_METHOD = "skerry.merge.method"
SYNCER = "skerry.syncer"
FENCE = "skerry.fence"
ADOPTION = "skerry.adoption"
CHECKPOINT_PATH = "skerry.checkpoint.path"
CHECKPOINT_SIZE = "skerry.checkpoint.size"
LEDGER_SEQUENCE = "skerry.ledger.sequence"
VERSIONS = "skerry.versions"
LOSS = "skerry.loss"

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
    """A span that is over.

    ``error`` is the type of what went wrong, in a word, and ``detail`` the sentence; both empty if
    nothing did.
    """

    operation: str
    context: SpanContext
    parent: SpanContext | None
    interval: Interval
    attributes: Attributes = field(default_factory=dict[str, Value])
    messages: Messages | None = None
    links: tuple[Link, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    error: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        """The span's name, by the conventions of messaging where it is about messages."""
        template = self.messages.template if self.messages is not None else ""
        return f"{self.operation} {template}" if template else self.operation

    @property
    def kind(self) -> SpanKind:
        return OPERATIONS[self.operation][0] if self.messages is not None else SpanKind.INTERNAL

    def all_attributes(self) -> dict[str, Value]:
        """Return all attributes, those of messaging and errors too, in a dict of the caller's."""
        found = dict(self.attributes)
        if self.error:
            found[ERROR_TYPE] = self.error
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
