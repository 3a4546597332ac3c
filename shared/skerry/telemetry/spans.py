"""What a span of ours is: its names, attribute keys and kinds, and the shape in which it is told.

Messaging spans follow OpenTelemetry's conventions (a test compares the keys with its package):
``{operation} {destination template}`` for a name; who sends is PRODUCER, who receives CLIENT, who
processes CONSUMER. Messages are joined by links, which carry what is true of one message only; a
span about a single message also has its round as parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from skerry.telemetry.ids import SpanContext, parse

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value]


class Kind(StrEnum):
    """How a span stands to others; the names are OpenTelemetry's."""

    INTERNAL = "INTERNAL"
    CLIENT = "CLIENT"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"
    SERVER = "SERVER"


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that this one has to do with, and what is true of that relation."""

    context: SpanContext
    attributes: Attributes = field(default_factory=dict[str, Value])


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span; ``time_ns`` since the epoch."""

    name: str
    time_ns: int
    attributes: Attributes = field(default_factory=dict[str, Value])


@dataclass(frozen=True, slots=True)
class Span:
    """One span, told when it is over; times in ns since the epoch.

    ``error`` is what went wrong, in a word; empty: nothing did. ``service`` is whose it is, where
    that is not the process that tells of it, and ``instance`` which one of those.
    """

    name: str
    kind: Kind
    context: SpanContext
    parent: SpanContext | None
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict[str, Value])
    links: tuple[Link, ...] = ()
    events: tuple[Event, ...] = ()
    error: str = ""
    service: str = ""
    instance: str = ""


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
DELIVER = "deliver"
"""What the broker does with a message."""

CONTRIBUTION = "skerry.{run}.contrib.{fragment}.{learner}"
"""Destination templates: what subjects look like, with their variables left open."""
GLOBAL_FRAGMENT = "skerry.{run}.state.{fragment}.manifest"

# Keys of OpenTelemetry's semantic conventions.

MESSAGING_SYSTEM = "messaging.system"
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
"""Versions behind: above 0 on a link, it leads to an earlier round's trace."""
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
STREAM = "skerry.stream"
SERVER_NAME = "skerry.server.name"

TRACE_PARENT = "traceparent"
"""The W3C header; on the wire exactly so, since nats-server looks for it letter by letter."""
TRACE_DEST = "Nats-Trace-Dest"
"""The header that asks a NATS server to tell of a message's way, and where."""

TYPES = {
    PUBLISH: "send",
    COMMIT: "send",
    RECEIVE: "receive",
    PROCESS: "process",
    ADOPT: "process",
}
"""The conventions' type of each messaging operation, by our name for it; a broker's has none."""


def messaging_name(operation: str, template: str) -> str:
    """Return the name of a messaging span."""
    return f"{operation} {template}"


def messaging(operation: str, subject: str, template: str) -> dict[str, Value]:
    """Return the attributes that every messaging span has, in a dict of the caller's own.

    ``subject`` is empty for a span about messages of several.
    """
    told: dict[str, Value] = {
        MESSAGING_SYSTEM: NATS,
        MESSAGING_OPERATION_NAME: operation,
        MESSAGING_DESTINATION_TEMPLATE: template,
    }
    if operation in TYPES:
        told[MESSAGING_OPERATION_TYPE] = TYPES[operation]
    if subject:
        told[MESSAGING_DESTINATION_NAME] = subject
    return told


def extract(headers: Mapping[str, str]) -> SpanContext | None:
    """Return the trace context in a message's headers, in whatever case their keys are.

    NATS keeps the case that a sender chose, and W3C's key has none.
    """
    for key, value in headers.items():
        if key.lower() == TRACE_PARENT:
            return parse(value)
    return None
