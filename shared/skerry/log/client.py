"""What every client of the log does, whatever carries its requests.

Message ids that cannot be guessed, repeated publishes, the positions of followers and reads of many
messages: the NATS adapter and the memory log share them, so that simulated faults test the code
that runs in production.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar, cast

from skerry.errors import BrokerUnavailable, BusError, Conflict, Denied, first_cause
from skerry.log.base import MSG_ID, Bus, Deliver, Expect, Receipt, Record, Storage, StreamSpec
from skerry.protocol.subjects import stream_of
from skerry.tasks import TaskGroup, now_s

T = TypeVar("T")
U = TypeVar("U")

ATTEMPTS_WORTH = 4
"""Calls that are safe to repeat go on for this many request timeouts."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
FRESH_IDS = 3
"""A broker that calls this many new ids duplicates of other messages is not asked again."""
AT_ONCE, GROUP_S, GROUP_BYTES = 8, 2.0, 1024**2
"""Reads of single messages in flight at a time, and in how many seconds all of them should come if
they have more bytes than that. A request waits a few seconds for its answer: over a slow link the
last of too many come later, each is asked for again, and none would ever come in time."""


class NoAnswer(Exception):
    """One attempt without an answer; ``sent``: the broker may have acted on it."""

    def __init__(self, reason: str = "no answer", *, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


class NotNow(Exception):
    """One attempt that the broker refused for a moment: nothing was stored, ask again."""


class Retries:
    """Growing pauses between attempts, none of them beyond a deadline on the loop's clock."""

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._pause = FIRST_PAUSE_S

    async def pause(self) -> bool:
        """Wait a little; False if the deadline has passed."""
        left = self.deadline - now_s()
        if left <= 0:
            return False
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return True


class Message(NamedTuple):
    """A message to publish; ``headers`` are those beside its id and its expectation."""

    subject: str
    payload: bytes
    msg_id: str | None
    expect: Expect | None
    headers: dict[str, str]


class PublishPort(Protocol):
    """What a publisher needs of the broker, beside its reads."""

    async def store(self, message: Message, deadline: float) -> Receipt:
        """Store a message in one attempt.

        Raises NoAnswer, NotNow, Conflict, or the error that no further attempt would change.
        """
        ...

    async def exists(self, stream: str, deadline: float) -> bool:
        """Return True if there is a stream of that name."""
        ...

    async def create(self, spec: StreamSpec) -> tuple[str, ...]:
        """Create a stream, or change it to what the spec says; return each difference found."""
        ...

    def failure(self, seconds: float, subject: str = "") -> BusError:
        """Return the error for a broker that does not answer.

        With ``subject``: for a broker that answers, but does not store a message there.
        """
        ...


@dataclass(slots=True)
class Publisher:
    """Publishes each message once, whatever happens to the broker.

    ``key`` makes ids that no other process can predict, and that stay the same over this one's
    retries and reconnects. ``memory_streams`` are created again when a restart has lost them.
    """

    broker: PublishPort
    reads: Bus
    key: bytes
    timeout_s: float
    memory_streams: dict[str, StreamSpec] = field(default_factory=dict[str, StreamSpec])

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        """Create or change streams as ``Bus.declare`` says."""
        self.memory_streams |= {s.name: s for s in specs if s.storage is Storage.MEMORY}
        found = await together(map(self.broker.create, specs))
        return tuple(chain.from_iterable(found))

    async def publish(self, message: Message, deadline: float) -> Receipt:
        """Store a message by the deadline, or raise the reason why not.

        A server whose disk is full leaves publishes unanswered but answers everything else; so
        does, for a moment, one that has just come back. Hence one attempt more.
        """
        began = now_s()
        try:
            return await self._store(message, deadline, unsure=False)
        except BrokerUnavailable:
            if message.msg_id is None:
                raise
        await self.broker.exists(stream_of(message.subject), now_s() + self.timeout_s)
        try:
            return await self._store(message, now_s() + self.timeout_s, unsure=True)
        except BrokerUnavailable as e:
            raise self.broker.failure(now_s() - began, message.subject) from e

    async def _store(self, message: Message, deadline: float, *, unsure: bool) -> Receipt:
        """Send until the broker has the message; ``unsure``: an earlier attempt may have stored it.

        An acknowledgement that calls it a duplicate is believed only if the stored message is ours.
        """
        retries, fresh, began, missing = Retries(deadline), 0, now_s(), None
        while True:
            sent = self._with_id(message, fresh)
            try:
                receipt = await self.broker.store(sent, deadline)
                if not receipt.duplicate or await self._is_ours(sent, receipt.sequence):
                    return receipt
                fresh += 1
            except Conflict:
                ours = await self._own_write(sent) if unsure else None
                if ours is None:
                    raise
                return ours
            except NotNow:
                pass
            except NoAnswer as e:
                unsure = unsure or e.sent
                if e.sent and message.msg_id is None:
                    raise (missing or self.broker.failure(now_s() - began)) from e
                if not e.sent:
                    missing = await self._check_stream(message.subject)
            if not await retries.pause():
                raise missing or self.broker.failure(now_s() - began)

    def _with_id(self, message: Message, fresh: int) -> Message:
        """Add a secret to a message's id: all senders to a stream share its ids."""
        if message.msg_id is None:
            return message
        if fresh > FRESH_IDS:
            msg = f"The broker calls each message on {message.subject} a duplicate of another one."
            raise BusError(msg)
        named = f"{fresh}/{message.msg_id}".encode()
        secret = hashlib.blake2b(named, key=self.key, digest_size=12).hexdigest()
        return message._replace(msg_id=f"{message.msg_id}.{secret}")

    async def _is_ours(self, message: Message, sequence: int) -> bool:
        """Return True unless another message is stored there.

        One that retention has dropped meanwhile was ours: no other process could have known its id.
        """
        record = await self.reads.get(stream_of(message.subject), sequence)
        mine = (message.subject, message.payload)
        return record is None or (record.subject, record.payload) == mine

    async def _own_write(self, message: Message) -> Receipt | None:
        """Return the receipt if the newest message is our own write, not acknowledged; or None."""
        record = await self.reads.last(message.subject)
        if record is None or message.msg_id is None or record.payload != message.payload:
            return None
        ours = record.headers.get(MSG_ID) == message.msg_id
        return Receipt(record.sequence, duplicate=True) if ours else None

    async def _check_stream(self, subject: str) -> BrokerUnavailable | None:
        """Raise BusError if there is no answer because the stream does not exist.

        A single server forgets a memory stream altogether when it restarts: this makes it again. A
        login that may not do so gets an error back, to be raised if no other client does.
        """
        stream = stream_of(subject)
        try:
            if await self.broker.exists(stream, now_s() + self.timeout_s):
                return None
        except BrokerUnavailable:  # a leader is being elected, say: the caller tries again
            return None
        if stream not in self.memory_streams:
            msg = (
                f"No stream takes {subject}: declare the run's streams first ({stream} is missing)."
            )
            raise BusError(msg)
        try:
            await self.broker.create(self.memory_streams[stream])
        except Denied:
            return BrokerUnavailable(
                f"The broker forgot stream {stream} when it was restarted, and this login may not"
                " make it again: start a syncer, which does."
            )
        return None


class Extent(NamedTuple):
    """Where a stream begins and ends; times are 0 where it holds nothing."""

    first_seq: int
    first_ns: int
    last_seq: int
    last_ns: int


@dataclass(slots=True)
class Cursor:
    """A follower's position: the last sequence it is done with, and that message's time."""

    deliver: Deliver
    sequence: int = 0
    time_ns: int = 0

    def move(self, record: Record) -> None:
        """Note that a message was delivered."""
        self.sequence, self.time_ns = record.sequence, record.time_ns

    def place(self, stream: Extent) -> None:
        """Move to where the follower must go on in the stream as it is now.

        The stream was created again, and the cursor starts over, if it is shorter than the cursor
        or if its oldest message is at or before the cursor, but younger.
        """
        known = self.time_ns and stream.first_ns and stream.first_seq <= self.sequence
        younger = known and stream.first_ns > self.time_ns
        if self.deliver is Deliver.NEW and not self.sequence:
            self.deliver = Deliver.ALL
            self.sequence, self.time_ns = stream.last_seq, stream.last_ns
        elif self.sequence and (stream.last_seq < self.sequence or younger):
            self.deliver = Deliver.ALL
            self.sequence = self.time_ns = 0


async def one_by_one(
    get: Callable[[str, int], Awaitable[Record | None]], stream: str, sequences: Sequence[int]
) -> AsyncGenerator[Record]:
    """Yield messages by their sequences up to the first that is gone, each by a request."""
    left, size = deque(sequences), 1  # after a gap the next one is gone, most likely
    while left:
        wanted = [left.popleft() for _ in range(min(size, len(left)))]
        began_s = now_s()
        found = await together(get(stream, sequence) for sequence in wanted)
        each_s, longest = (now_s() - began_s) / len(wanted), 1
        for record in found:
            if record is None:
                return
            longest = max(longest, len(record.payload))
            yield record
        size = min(AT_ONCE, max(GROUP_BYTES // longest, int(GROUP_S / max(each_s, 1e-3)), 1))


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[T]:
    """Yield what several generators yield, each in its own order, and close them at the end.

    Raises what one of them raises.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]):
            async for item in sources[0]:
                yield item
        return
    arrived: asyncio.Queue[T | Exception | None] = asyncio.Queue(1)

    tasks = [asyncio.ensure_future(_pump(source, arrived)) for source in sources]
    left = len(sources)
    try:
        while left:
            got = await arrived.get()
            if isinstance(got, Exception):
                raise got
            if got is None:
                left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for source in sources:
            await source.aclose()


async def _pump(source: AsyncGenerator[T], into: asyncio.Queue[T | Exception | None]) -> None:
    """Put all that a generator yields into a queue, and then what it raised, or None."""
    try:
        async for item in source:
            await into.put(item)
    except Exception as error:  # noqa: BLE001 - it is raised where the items are taken
        await into.put(error)
    else:
        await into.put(None)


async def together(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all calls, made at once; an error cancels the others."""

    async def one(call: Awaitable[T]) -> T:
        return await call

    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    return [task.result() for task in tasks]


async def both(one: Awaitable[T], other: Awaitable[U]) -> tuple[T, U]:
    """Return the results of two calls as ``together`` does; their types may differ."""
    found = await together((one, other))
    return cast("tuple[T, U]", tuple(found))
