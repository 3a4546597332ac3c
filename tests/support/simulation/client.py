"""One client of the simulated broker: what NatsBus does about each fault, without a socket.

Every deadline, retry and doubt is NatsBus's own: a publish with an id is sent again until its
patience ends and once more after a look at the stream, one without is not; a compare-and-set whose
acknowledgement was lost is read back before it counts as lost; followers go on where they were.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, cast

from skerry.errors import BrokerUnavailable, BusError, Conflict, StorageFull
from skerry.log.base import MSG_ID, Deliver, Receipt, Record, Storage
from skerry.log.memory import one_by_one
from skerry.log.streams import STREAM_PREFIX, stream_of
from skerry_tools.chaos.plan import Kind
from tests.support.simulation.network import REQUEST_TIMEOUT_S, NoAnswer, Unanswered

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from types import TracebackType

    from skerry.log.base import Expect, Room, StreamInfo, StreamSpec
    from skerry.log.memory import MemoryStream
    from tests.support.simulation.network import Link, Network

T = TypeVar("T")

PATIENCE_S = 4 * REQUEST_TIMEOUT_S
PAUSE_S = 0.1
"""Between two attempts."""


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent for one publish."""

    subject: str
    payload: bytes
    msg_id: str | None
    expect: Expect | None
    headers: Mapping[str, str]


class SimulatedBus:
    """One process's connection; implements ``skerry.log.base.Bus``.

    ``sever`` is what kill -9 does to it: nothing more leaves, whatever clean-up tries to send.
    """

    def __init__(self, network: Network, name: str) -> None:
        self.network = network
        self.link: Link = network.link(name)
        self.severed = False
        self._forgetful: dict[str, StreamSpec] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def sever(self) -> None:
        """Let nothing more through."""
        self.severed = True

    @property
    def max_payload_bytes(self) -> int:
        return self.network.broker.max_payload_bytes

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        changes: list[str] = []
        broker = self.network.broker
        for spec in specs:
            changes += await self._repeat(partial(broker.declare, spec))
        self._forgetful |= {s.name: s for s in specs if s.storage is Storage.MEMORY}
        return tuple(changes)

    async def streams(self) -> list[StreamInfo]:
        def look() -> list[StreamInfo]:
            streams = self.network.broker.streams
            names = sorted(name for name in streams if name.startswith(STREAM_PREFIX))
            return [streams[name].info() for name in names]

        return await self._repeat(look)

    async def rooms(self) -> tuple[Room, ...]:
        return await self._repeat(self.network.broker.rooms)

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        message = Message(subject, payload, msg_id, expect, headers or {})
        try:
            receipt = await self._store(message, self._deadline(), doubt=False)
        except BrokerUnavailable:
            if msg_id is None:
                raise
            receipt = await self._last_attempt(message)
        if subject.endswith(".manifest"):
            self.network.acknowledged.append(payload)
        return receipt

    async def last(self, subject: str) -> Record | None:
        def look() -> Record | None:
            stream = self.network.broker.stream(stream_of(subject))
            return None if stream is None else stream.last(subject)

        return await self._repeat(look)

    async def last_each(self, pattern: str) -> list[Record]:
        def look() -> list[Record]:
            stream = self.network.broker.stream(stream_of(pattern))
            return [] if stream is None else stream.newest_each((pattern,))

        return await self._repeat(look)

    async def get(self, stream: str, sequence: int) -> Record | None:
        def look() -> Record | None:
            found = self.network.broker.stream(stream)
            return None if found is None else found.records.get(sequence)

        return await self._repeat(look)

    def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        return one_by_one(self, stream_of(pattern), sequences)

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
        return self._follow(patterns, deliver, after)

    # requests

    def _now(self) -> float:
        return self.network.loop.time()

    def _deadline(self) -> float:
        return self._now() + PATIENCE_S

    async def _ask(self, act: Callable[[], T], *, write: bool = False) -> T:
        """Send one request once; NoAnswer if nothing came back."""
        if self.severed:
            raise asyncio.CancelledError
        answer = await self.network.request(self.link, act, write=write)
        if self.severed:
            raise asyncio.CancelledError
        return cast("T", answer)

    async def _connected(self, deadline: float) -> None:
        """Wait for a broker that takes connections; one that hangs is not noticed at once."""
        while self.network.down:
            if self.severed:
                raise asyncio.CancelledError
            self.network.fired[Kind.BROKER_KILL] += 1
            try:
                async with asyncio.timeout_at(deadline):
                    await self.link.changed.wait()
            except TimeoutError as e:
                raise self._unavailable() from e

    async def _repeat(self, act: Callable[[], T]) -> T:
        """Ask until there is an answer: only for what is safe to do again."""
        deadline = self._deadline()
        while True:
            await self._connected(deadline)
            try:
                return await self._ask(act)
            except NoAnswer as e:
                if self._now() >= deadline:
                    raise self._unavailable() from e
            await asyncio.sleep(PAUSE_S)

    def _unavailable(self) -> BrokerUnavailable:
        msg = f"The simulated broker has not answered {self.link.name!r} for {PATIENCE_S} s."
        return BrokerUnavailable(msg, url="simulated")

    # publishing

    async def _store(self, message: Message, deadline: float, *, doubt: bool) -> Receipt:
        """Publish until the broker has the message; ``doubt``: an earlier attempt may have."""
        while True:
            await self._connected(deadline)
            try:
                receipt = await self._ask(lambda: self._append(message), write=True)
            except Conflict:
                if doubt and (found := await self._ours(message)) is not None:
                    return found
                raise
            except NoAnswer as e:
                doubt = True
                if message.msg_id is None or self._now() >= deadline:
                    raise self._unavailable() from e
            else:
                if receipt is not None:
                    return receipt
                await self._make_again(message.subject)
            await asyncio.sleep(PAUSE_S)

    async def _last_attempt(self, message: Message) -> Receipt:
        """Try once more where the broker answers otherwise; StorageFull if it still does not."""
        stream = stream_of(message.subject)
        await self._exists(stream)
        try:
            return await self._store(message, self._now() + REQUEST_TIMEOUT_S, doubt=True)
        except BrokerUnavailable as e:
            msg = f"The simulated broker answers, but stores nothing on {message.subject}."
            raise StorageFull(msg) from e

    def _append(self, message: Message) -> Receipt | None:
        """Do a publish at the broker; None where the stream is not there."""
        broker = self.network.broker
        if broker.stream(stream_of(message.subject)) is None:
            return None
        if not broker.takes(message.subject):
            self.network.fired[Kind.DISK_FULL] += 1
            raise Unanswered
        receipt = broker.append(
            message.subject,
            message.payload,
            msg_id=message.msg_id,
            expect=message.expect,
            headers=dict(message.headers),
        )
        self.network.after_store(self.link, message.subject, message.payload, message.msg_id)
        return receipt

    async def _ours(self, message: Message) -> Receipt | None:
        """Return the receipt of our own write whose acknowledgement was lost, if it was that."""
        record = await self.last(message.subject)
        if record is not None and record.headers.get(MSG_ID) == message.msg_id:
            return Receipt(record.sequence, duplicate=True)
        return None

    async def _exists(self, stream: str) -> bool:
        return await self._repeat(lambda: self.network.broker.stream(stream) is not None)

    async def _make_again(self, subject: str) -> None:
        """Declare a memory stream again that a restart has lost."""
        spec = self._forgetful.get(stream_of(subject))
        if spec is None:
            msg = f"No stream takes {subject}: declare the run's streams first."
            raise BusError(msg)
        await self.declare((spec,))

    # following

    async def _follow(
        self, patterns: tuple[str, ...], deliver: Deliver, position: int
    ) -> AsyncGenerator[Record]:
        name, time_ns = stream_of(patterns[0]), 0
        network, link = self.network, self.link
        while True:
            stream = await self._stream(name)
            if position and _began_anew(stream, position, time_ns):
                position, time_ns, deliver = 0, 0, Deliver.ALL
            if deliver is Deliver.NEW and not position:
                position, deliver = stream.last_seq, Deliver.ALL
            if deliver is Deliver.LAST_PER_SUBJECT and not position:
                batch = stream.newest_each(patterns)
            else:
                batch = stream.after(position, patterns)
            if not batch:
                await stream.more(patterns)
                continue
            epoch = link.epoch
            await asyncio.sleep(network.delay_s(link))
            if epoch != link.epoch:
                continue
            for record in batch:
                if self.severed:
                    raise asyncio.CancelledError
                yield record
                position, time_ns = record.sequence, record.time_ns

    async def _stream(self, name: str) -> MemoryStream:
        """Return a stream of a broker that can be reached, waiting for both."""
        broker = self.network.broker
        while True:
            if self.severed:
                raise asyncio.CancelledError
            if not self.network.reachable(self.link):
                await self.link.changed.wait()
            elif (stream := broker.stream(name)) is None:
                await broker.declared.wait()
            else:
                return stream


def _began_anew(stream: MemoryStream, position: int, time_ns: int) -> bool:
    """Tell whether this is another stream than the one that the position is of."""
    if stream.last_seq < position:
        return True
    oldest = next(iter(stream.records.values()), None)
    if not time_ns or oldest is None or oldest.sequence > position:
        return False
    return oldest.time_ns > time_ns
