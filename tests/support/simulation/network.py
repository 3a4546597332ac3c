"""The wires between clients and the memory broker, and everything that can go wrong on them.

A request takes a while to the broker, is done there, and its answer takes a while back. Each leg
can be held up or lost; whoever waits then hears nothing until a timeout of its own. What a client
has sent is on its way even when the client is killed or stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.errors import SkerryError
from skerry.log.base import Storage
from skerry.log.memory import MemoryBroker
from skerry.log.streams import stream_of
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.log.base import Expect, Receipt
    from skerry_tools.virtual import VirtualLoop

EPOCH_NS = 1_700_000_000_000_000_000
NANOSECONDS = 1_000_000_000
LATENCY_S = 0.06
"""A message takes up to this long one way where nothing is wrong."""
REQUEST_TIMEOUT_S = 0.5
REORDER_S = 0.3
"""A message that is overtaken is held up by up to this long."""


class NoAnswer(Exception):
    """One attempt without an answer in time; the broker may have acted on it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One message as it was stored: what the history is checked against."""

    at_s: float
    client: str
    subject: str
    sequence: int
    payload: bytes
    fences: dict[str, int]


@dataclass(slots=True)
class Link:
    """One client's wire; faults that overlap add up."""

    name: str
    cuts: int = 0
    held_up_s: float = 0.0
    clock_ns: int = 0
    shares: dict[Kind, float] = field(default_factory=dict[Kind, float])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    epoch: int = 0

    def change(self) -> None:
        """Wake those who wait for the wire, and have what is under way noticed as lost."""
        self.epoch += 1
        self.changed.set()
        self.changed = asyncio.Event()


class Broker(MemoryBroker):
    """The memory broker, with a record of everything that it stored."""

    def __init__(self, network: Network) -> None:
        super().__init__(clock_ns=network.wall_of("broker"))
        self.network = network
        self.client = ""
        self.log: list[Stored] = []

    def append(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None,
        expect: Expect | None,
        headers: Mapping[str, str],
    ) -> Receipt:
        receipt = super().append(subject, payload, msg_id=msg_id, expect=expect, headers=headers)
        if not receipt.duplicate:
            stream = self.streams[stream_of(subject)]
            fences = {s: q for s, q in stream.newest.items() if ".fence." in s}
            at_s = self.network.loop.time()
            stored = Stored(at_s, self.client, subject, receipt.sequence, payload, fences)
            self.log.append(stored)
        return receipt

    def takes(self, subject: str) -> bool:
        """Tell whether a message on this subject finds room."""
        stream = self.streams.get(stream_of(subject))
        filed = stream is not None and stream.spec.storage is Storage.FILE
        return not (self.network.full and filed)


class Network:
    """One broker and the links to it; ``fired`` counts what each kind of fault has done."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop = loop
        self.draw = random.Random(f"network/{seed}").random
        self.links: dict[str, Link] = {}
        self.fired: Counter[Kind] = Counter()
        self.acknowledged: list[bytes] = []
        self.outside = Context()
        self.ticks = 0
        self.down = 0
        self.paused = 0
        self.full = 0
        self.dropped: set[tuple[int, str]] = set()
        self.delayed: list[Callable[[], None]] = []
        self.broker = Broker(self)

    def link(self, name: str) -> Link:
        """Return the one wire of a client's name, whichever process uses it."""
        return self.links.setdefault(name, Link(name))

    def wall_of(self, name: str) -> Callable[[], int]:
        """Return the wall clock of one machine, which only a clock jump ever sets back."""
        link = self.link(name)

        def wall_ns() -> int:
            self.ticks += 1
            return EPOCH_NS + link.clock_ns + int(self.loop.time() * NANOSECONDS) + self.ticks

        return wall_ns

    @property
    def up(self) -> bool:
        return not self.down and not self.paused

    def reachable(self, link: Link) -> bool:
        return self.up and not link.cuts

    def change(self) -> None:
        """Have every client notice that the broker came or went."""
        for link in self.links.values():
            link.change()

    def later(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something after a while, whatever becomes of who asked for it."""
        self.loop.call_later(delay_s, act, *args, context=self.outside)

    def delay_s(self, link: Link) -> float:
        """Draw how long one message takes one way."""
        delay_s = LATENCY_S * self.draw() + link.held_up_s
        if link.held_up_s:
            self.fired[Kind.SLOW] += 1
        if self.hits(link, Kind.REORDER):
            delay_s += REORDER_S * self.draw()
        return delay_s

    def hits(self, link: Link, kind: Kind) -> bool:
        """Draw whether a fault with a share hits this message, and count it."""
        share = link.shares.get(kind, 0.0)
        if not share or self.draw() >= share:
            return False
        self.fired[kind] += 1
        return True

    def request(
        self, link: Link, act: Callable[[], object], *, write: bool = False
    ) -> asyncio.Future[Any]:
        """Send a request; its future ends with the answer, its error, or NoAnswer in time."""
        future: asyncio.Future[Any] = self.loop.create_future()
        sent_s = self.loop.time()
        delay_s = self.delay_s(link)
        self.later(delay_s, self._arrive, link, act, future, sent_s, link.epoch, write)
        if write and self.hits(link, Kind.DUPLICATE):
            again: asyncio.Future[Any] = self.loop.create_future()
            more_s = delay_s + LATENCY_S * self.draw()
            self.later(more_s, self._arrive, link, act, again, sent_s, link.epoch, write)
            again.add_done_callback(_heed, context=self.outside)
        return future

    def _arrive(
        self,
        link: Link,
        act: Callable[[], object],
        future: asyncio.Future[Any],
        sent_s: float,
        epoch: int,
        write: bool,
    ) -> None:
        """Do the request at the broker, unless it cannot be reached."""
        if self.down or (link.cuts and self.draw() < 0.5):
            self._count(link)
            self._lose(future, sent_s)
            return
        if self.paused or link.cuts:
            # In a socket's buffer: it arrives when the broker or the wire comes back.
            self._count(link)
            self._lose(future, sent_s)
            self.delayed.append(lambda: self._arrive(link, act, future, sent_s, epoch, write))
            return
        self.broker.client = link.name
        try:
            answer, failed = act(), None
        except Unanswered:
            self._lose(future, sent_s)
            return
        except SkerryError as error:
            answer, failed = None, error
        if write and self.hits(link, Kind.LOST_ACK):
            self._lose(future, sent_s)
            return
        back_s = self.delay_s(link) if self.draw() < 0.5 or link.held_up_s else 0.0
        if back_s:
            self.later(back_s, self._answer, link, answer, failed, future, sent_s, link.epoch)
        else:
            self._answer(link, answer, failed, future, sent_s, link.epoch)

    def _answer(
        self,
        link: Link,
        answer: object,
        failed: SkerryError | None,
        future: asyncio.Future[Any],
        sent_s: float,
        epoch: int,
    ) -> None:
        if epoch != link.epoch and not self.reachable(link):
            self._count(link)
            self._lose(future, sent_s)
        elif not future.done():
            if self.loop.time() - sent_s > REQUEST_TIMEOUT_S:
                future.set_exception(NoAnswer())
            elif failed is not None:
                future.set_exception(failed)
            else:
                future.set_result(answer)

    def _lose(self, future: asyncio.Future[Any], sent_s: float) -> None:
        """Let who waits find out by its own timeout."""
        left_s = max(0.0, sent_s + REQUEST_TIMEOUT_S - self.loop.time())
        self.later(left_s, _fail, future)

    def after_store(self, link: Link, subject: str, payload: bytes, msg_id: str | None) -> None:
        """Do to a stored contribution what a fault on its sender's wire does."""
        if ".contrib." not in subject or ".contrib.start." in subject:
            return
        if self.hits(link, Kind.CORRUPT):
            spot = int(self.draw() * len(payload))
            damaged = payload[:spot] + bytes([payload[spot] ^ 0x55]) + payload[spot + 1 :]
            self.broker.append(subject, damaged, msg_id=None, expect=None, headers={})
        if msg_id is not None and self.hits(link, Kind.REDELIVER):
            # Forgotten ids and a lost answer: its sender stores it once more.
            self.broker.streams[stream_of(subject)].seen.pop(msg_id, None)
            raise Unanswered

    def _count(self, link: Link) -> None:
        """Count a message as hit by what is wrong right now."""
        if self.down:
            self.fired[Kind.BROKER_KILL] += 1
        elif self.paused:
            self.fired[Kind.BROKER_PAUSE] += 1
        elif link.cuts:
            self.fired[Kind.PARTITION] += 1

    def flush(self) -> None:
        """Deliver what lay in buffers, in the order it was sent; some still lies there after."""
        waiting, self.delayed = self.delayed, []
        for arrive in waiting:
            arrive()


class Unanswered(Exception):
    """The broker does not answer this request, as with a publish for which its disk is full."""


def _fail(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(NoAnswer())


def _heed(future: asyncio.Future[Any]) -> None:
    """Look at the outcome of a message that nobody waits for."""
    if not future.cancelled():
        future.exception()
