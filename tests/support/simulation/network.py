"""The wires between clients and the memory broker, and everything that can go wrong on them.

A request takes a while to the broker, is done there, and its answer takes a while back. Each leg
can be held up or lost; the client then hears nothing until a timeout of its own. What a client
has sent is on its way even when the client is killed or stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from skerry.errors import SkerryError
from skerry.log.base import Receipt, Record, Storage
from skerry.log.client import Message, NoAnswer
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.protocol.subjects import stream_of
from skerry_tools.chaos.plan import Kind
from skerry_tools.virtual import VirtualLoop

T = TypeVar("T")

EPOCH_NS = 1_700_000_000_000_000_000
NANOSECONDS = 1_000_000_000
LATENCY_S = 0.06
"""A message takes up to this long one way where nothing is wrong."""
REQUEST_TIMEOUT_S = 0.5
REORDER_S = 0.3
"""A message that is overtaken is held up by up to this long."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message as it was stored: what the history is checked against."""

    at_s: float
    client: str
    subject: str
    sequence: int
    payload: bytes
    fences: dict[str, int]


@dataclass(slots=True)
class SimulatedWire:
    """The wire of one client's name, whichever process uses it; faults that overlap add up."""

    name: str
    cuts: int = 0
    held_up_s: float = 0.0
    clock_ns: int = 0
    shares: dict[Kind, float] = field(default_factory=dict[Kind, float])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0

    def change(self) -> None:
        """Wake what waits for the wire, and have what is under way noticed as lost."""
        self.epoch += 1
        self.changed.set()
        self.changed = asyncio.Event()


class SimulatedLink:
    """One process's use of a wire: a ``skerry.log.memory.LinkModel`` with random faults.

    ``sever`` is what kill -9 does to it: nothing more leaves, whatever clean-up tries to send.
    """

    timeout_s = REQUEST_TIMEOUT_S

    def __init__(self, network: SimulatedNetwork, wire: SimulatedWire) -> None:
        self.network = network
        self.wire = wire
        self.severed = False

    def sever(self) -> None:
        """Let nothing more through."""
        self.severed = True

    async def request(self, act: Callable[[], T], store: Message | None = None) -> T:
        await self._connected()
        answer = await self.network.request(self.wire, act, write=store is not None)
        self._check()
        if store is not None and store.subject.endswith(".manifest"):
            self.network.acknowledged.append(store.payload)
        return cast("T", answer)

    async def deliver(self, records: Sequence[Record], since_s: float) -> AsyncGenerator[Record]:
        del since_s
        epoch = self.wire.epoch
        await asyncio.sleep(self.network.delay_s(self.wire))
        if epoch != self.wire.epoch:
            return
        for record in records:
            self._check()
            yield record

    async def usable(self) -> None:
        self._check()
        while not self.network.reachable(self.wire):
            await self.wire.changed.wait()
            self._check()

    def _check(self) -> None:
        if self.severed:
            raise asyncio.CancelledError

    async def _connected(self) -> None:
        """Wait for a broker that takes connections; one that hangs is not noticed at once."""
        self._check()
        while self.network.down:
            self.network.fired[Kind.BROKER_KILL] += 1
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self.wire.changed.wait()
            except TimeoutError as e:
                raise NoAnswer(sent=False) from e
            self._check()


class SimulatedBroker(MemoryBroker):
    """The memory broker, with a record of everything that it stored, and faults in storing it."""

    def __init__(self, network: SimulatedNetwork) -> None:
        super().__init__(clock_ns=network.wall_of("broker"))
        self.network = network
        self.client = ""
        self.log: list[StoredMessage] = []

    def append(self, message: Message) -> Receipt:
        stream = self.streams.get(stream_of(message.subject))
        if self.network.full and stream is not None and stream.spec.storage is Storage.FILE:
            self.network.fired[Kind.DISK_FULL] += 1
            raise NoAnswer
        receipt = self._stored(message)
        sender = self.network.wire(self.client)
        if ".contrib." in message.subject and ".start." not in message.subject:
            if self.network.hits(sender, Kind.CORRUPT):
                self._stored(self.network.damaged(message))
            if message.msg_id is not None and self.network.hits(sender, Kind.REDELIVER):
                # Forgotten ids and a lost answer: its sender stores it once more.
                self.streams[stream_of(message.subject)].seen.pop(message.msg_id, None)
                raise NoAnswer
        return receipt

    def _stored(self, message: Message) -> Receipt:
        receipt = super().append(message)
        if not receipt.duplicate:
            stream = self.streams[stream_of(message.subject)]
            fences = {s: q for s, q in stream.newest.items() if s.endswith(".fence")}
            at_s, sequence = self.network.loop.time(), receipt.sequence
            subject, payload = message.subject, message.payload
            self.log.append(StoredMessage(at_s, self.client, subject, sequence, payload, fences))
        return receipt


@dataclass(frozen=True, slots=True)
class Request:
    """What a client has asked of the broker, and how it hears of the answer."""

    wire: SimulatedWire
    act: Callable[[], object]
    future: asyncio.Future[Any]
    sent_s: float
    epoch: int
    write: bool


class SimulatedNetwork:
    """One broker and the wires to it; ``fired`` counts what each kind of fault has done."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.draw = random.Random(f"network/{seed}").random
        self.wires: dict[str, SimulatedWire] = {}
        self.fired: Counter[Kind] = Counter()
        self.acknowledged: list[bytes] = []
        self.outside = Context()
        self.ticks = 0
        self.down = 0
        self.paused = 0
        self.full = 0
        self.dropped: set[tuple[int, str]] = set()
        self.delayed: list[Callable[[], None]] = []
        self.broker = SimulatedBroker(self)

    def wire(self, name: str) -> SimulatedWire:
        """Return the one wire of a client's name."""
        return self.wires.setdefault(name, SimulatedWire(name))

    def connect(self, name: str) -> tuple[MemoryBus, SimulatedLink]:
        """Return a new process's client of the broker, and its wire."""
        link = SimulatedLink(self, self.wire(name))
        return MemoryBus(self.broker, link), link

    def wall_of(self, name: str) -> Callable[[], int]:
        """Return the wall clock of one machine, which only a clock jump ever sets back."""
        wire = self.wire(name)

        def wall_ns() -> int:
            self.ticks += 1
            return EPOCH_NS + wire.clock_ns + int(self.loop.time() * NANOSECONDS) + self.ticks

        return wall_ns

    @property
    def up(self) -> bool:
        return not self.down and not self.paused

    def reachable(self, wire: SimulatedWire) -> bool:
        return self.up and not wire.cuts

    def change(self) -> None:
        """Have every client notice that the broker came or went."""
        for wire in self.wires.values():
            wire.change()

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something after a while, also when the process that asked for it is gone."""
        self.loop.call_later(delay_s, act, *args, context=self.outside)

    def delay_s(self, wire: SimulatedWire) -> float:
        """Draw how long one message takes one way."""
        delay_s = LATENCY_S * self.draw() + wire.held_up_s
        if wire.held_up_s:
            self.fired[Kind.SLOW] += 1
        if self.hits(wire, Kind.REORDER):
            delay_s += REORDER_S * self.draw()
        return delay_s

    def hits(self, wire: SimulatedWire, kind: Kind) -> bool:
        """Draw whether a fault with a share hits this message, and count it."""
        share = wire.shares.get(kind, 0.0)
        if not share or self.draw() >= share:
            return False
        self.fired[kind] += 1
        return True

    def request(
        self, wire: SimulatedWire, act: Callable[[], object], *, write: bool = False
    ) -> asyncio.Future[Any]:
        """Send a request; its future ends with the answer, its error, or NoAnswer in time."""
        future: asyncio.Future[Any] = self.loop.create_future()
        sent = Request(wire, act, future, self.loop.time(), wire.epoch, write)
        delay_s = self.delay_s(wire)
        self.later(delay_s, self._arrive, sent)
        if write and self.hits(wire, Kind.DUPLICATE):
            again: asyncio.Future[Any] = self.loop.create_future()
            more_s = delay_s + LATENCY_S * self.draw()
            self.later(more_s, self._arrive, replace(sent, future=again))
            again.add_done_callback(_heed, context=self.outside)
        return future

    def _arrive(self, sent: Request) -> None:
        """Do the request at the broker, unless it cannot be reached."""
        wire = sent.wire
        if self.down or (wire.cuts and self.draw() < 0.5):
            self._lose(sent, counts=True)
            return
        if self.paused or wire.cuts:
            # In a socket's buffer: it arrives when the broker or the wire comes back.
            self._lose(sent, counts=True)
            self.delayed.append(lambda: self._arrive(sent))
            return
        self.broker.client = wire.name
        try:
            answer, failed = sent.act(), None
        except NoAnswer as error:
            if error.sent:
                self._lose(sent)
                return
            answer, failed = None, error
        except SkerryError as error:
            answer, failed = None, error
        if sent.write and self.hits(wire, Kind.LOST_ACK):
            self._lose(sent)
            return
        back_s = self.delay_s(wire) if self.draw() < 0.5 or wire.held_up_s else 0.0
        if back_s:
            self.later(back_s, self._answer, sent, answer, failed)
        else:
            self._answer(sent, answer, failed)

    def _answer(self, sent: Request, answer: object, failed: Exception | None) -> None:
        if sent.epoch != sent.wire.epoch and not self.reachable(sent.wire):
            self._lose(sent, counts=True)
        elif not sent.future.done():
            if self.loop.time() - sent.sent_s > REQUEST_TIMEOUT_S:
                sent.future.set_exception(NoAnswer())
            elif failed is not None:
                sent.future.set_exception(failed)
            else:
                sent.future.set_result(answer)

    def _lose(self, sent: Request, *, counts: bool = False) -> None:
        """Let the client find out by its own timeout; ``counts``: by what is wrong right now."""
        if counts and self.down:
            self.fired[Kind.BROKER_KILL] += 1
        elif counts and self.paused:
            self.fired[Kind.BROKER_PAUSE] += 1
        elif counts and sent.wire.cuts:
            self.fired[Kind.PARTITION] += 1
        left_s = max(0.0, sent.sent_s + REQUEST_TIMEOUT_S - self.loop.time())
        self.later(left_s, _fail, sent.future)

    def damaged(self, message: Message) -> Message:
        """Return a message with one byte of its payload changed, and without an id."""
        payload = message.payload
        spot = int(self.draw() * len(payload))
        changed = payload[:spot] + bytes([payload[spot] ^ 0x55]) + payload[spot + 1 :]
        return message._replace(payload=changed, msg_id=None, expect=None, headers={})

    def flush(self) -> None:
        """Deliver what lay in buffers, in the order it was sent; some still lies there after."""
        waiting, self.delayed = self.delayed, []
        for arrive in waiting:
            arrive()


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(NoAnswer())


def _heed(future: asyncio.Future[Any]) -> None:
    """Retrieve the outcome of a message that is not waited for."""
    if not future.cancelled():
        future.exception()
