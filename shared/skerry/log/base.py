"""The log as Skerry needs it: a port with two adapters, NATS JetStream and memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self

from skerry.protocol.records import StoredMessage

MSG_ID = "Nats-Msg-Id"
"""The one broker header that records keep: the ``msg_id`` they were published with."""


class Retention(StrEnum):
    """What a stream keeps when it is asked for more room than it has."""

    LAST_PER_SUBJECT = "last_per_subject"
    FEW_PER_SUBJECT = "few_per_subject"
    EVERYTHING = "everything"
    WINDOW = "window"


PER_SUBJECT = {Retention.LAST_PER_SUBJECT: 1, Retention.FEW_PER_SUBJECT: 64}
"""How many messages of a subject a stream keeps, where that is bounded."""


class Storage(StrEnum):
    FILE = "file"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One stream, as it should be."""

    name: str
    subjects: tuple[str, ...]
    retention: Retention
    storage: Storage
    max_bytes: int = -1
    max_age_s: float = 0.0
    replicas: int = 1
    duplicate_window_s: float = 120.0
    max_message_bytes: int = -1


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """One stream, as the broker reports it; ``spec`` is read from its settings."""

    name: str
    messages: int
    bytes: int
    first_seq: int
    last_seq: int
    spec: StreamSpec


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes stored in this account, and the most that may be; 0 if it has no limit."""

    storage: Storage
    used_bytes: int
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Expect:
    """Refuse the write unless ``subject``'s newest message has sequence ``sequence`` (0: none).

    ``subject`` may be a pattern: then the newest of all messages that match counts.
    """

    subject: str
    sequence: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server's acknowledgement that a message is stored."""

    sequence: int
    duplicate: bool = False


@dataclass(slots=True)
class SharedReads:
    """Payload bytes that came out of a region's cache, of the chunks that every learner reads.

    ``region`` is that of this client's broker, '' if that is the hub.
    """

    region: str = ""
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MirrorInfo:
    """A region's mirror of one stream; ``lag`` counts the messages that it does not have yet.

    ``silent_s`` is how long it has heard nothing from the hub; None: it never has heard anything.
    """

    messages: int
    bytes: int
    lag: int
    silent_s: float | None


Record = StoredMessage
"""One message as the log holds it."""


class Deliver(StrEnum):
    """Where a follower begins: NATS's deliver policy; ``LIVE`` begins as ``NEW`` does."""

    ALL = "all"
    NEW = "new"
    LAST_PER_SUBJECT = "last_per_subject"
    LIVE = "live"


class Bus(Protocol):
    """A durable, ordered log of small records and payload chunks.

    Every method raises BrokerUnavailable once its own deadline has passed without an answer;
    ``follow`` alone waits for ever and heals by itself.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    @property
    def max_payload_bytes(self) -> int:
        """The largest message this server takes, headers included."""
        ...

    @property
    def shared_reads(self) -> SharedReads:
        """How much of the chunks that every learner reads came out of a region's cache."""
        ...

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        """Create missing streams, change different ones in place, return each difference found.

        Raises StreamDrift for a difference that cannot be changed in place, StorageFull when the
        server has no room for the stream.
        """
        ...

    async def streams(self) -> list[StreamInfo]:
        """Return every Skerry stream in this log, by name."""
        ...

    async def now_ns(self, subject: str) -> int:
        """Return the time by the clock that dates messages on this subject, in ns since the epoch.

        Raises BusError if no stream takes the subject.
        """
        ...

    async def rooms(self) -> tuple[Room, ...]:
        """Return how full this account is, by kind of storage.

        The room that the server itself has is not in it: only its monitoring port shows that.
        """
        ...

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Store one message and return its sequence once the server has it.

        With ``msg_id`` a publish whose acknowledgement was lost is sent again, and stored once;
        without one it is not sent again. The id counts for this client only, which adds a secret
        to it; use ``expect`` where two processes must not store the same message. A receipt says
        ``duplicate`` only if the stored message has this subject and payload.

        Raises Conflict when ``expect`` does not hold, StorageFull when there is no room. Where a
        repeated id and ``expect`` both speak against a write, either may be reported. In a cluster,
        writes whose ``expect`` names the same subject or pattern are sent one by one.
        """
        ...

    async def last(self, subject: str) -> Record | None:
        """Return the newest message on this subject, or on any that matches a pattern, or None."""
        ...

    async def last_each(self, pattern: str) -> list[Record]:
        """Return the newest message of every subject that matches, in sequence order."""
        ...

    async def get(self, stream: str, sequence: int) -> Record | None:
        """Return the message with that sequence, or None if it is gone."""
        ...

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        """Yield the messages of one stream with those ascending sequences; ends before a gap.

        Messages after one that is gone are not read: ask for them again. The messages are expected
        on subjects that match ``pattern``; on others they are found more slowly. Chunks that every
        learner reads may come out of a region's cache, which may be wrong: compare them with their
        manifest, and ask ``get`` for those that differ.
        """
        ...

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        """Yield matching messages of one stream in order, without gap or repeat, for ever.

        ``after`` > 0 starts after that sequence and overrides ``deliver``; ``Deliver.NEW`` means
        new since the first ``anext``, and ``Deliver.LIVE`` the same, without what is stored while
        the follower is cut off. Waits for a stream that does not exist yet. Survives a
        broker restart: continues after the last message it yielded, or from the start of a stream
        that was created again (memory storage loses its messages and counts from 1). Skips what
        retention dropped. ``aclose()`` the iterator to end it.
        """
        ...
