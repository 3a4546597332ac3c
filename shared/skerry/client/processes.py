"""The processes of one learner: the first one decides, and gives all others their orders.

If one is lost, all end: a process that loses another says so and ends at once, whatever its other
threads wait for, and all begin again from the log. Nothing here depends on JAX or torch.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from skerry.client.inner import Point
from skerry.client.inner_file import Origin
from skerry.client.peer import BEAT_S, SILENCE_S, Deed, Peer, Words, end_at_once
from skerry.errors import BrokerUnavailable, Diverged, Overtaken, SkerryError, first_cause
from skerry.protocol.messages import ContributionHeader

HEED_S = 5.0
"""Seconds to notice that the first process has failed; one that does not is stuck on devices."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a learner's other processes must know of its place in the run.

    ``data`` is the digest of the text that it reads, if that is the run's. ``blank``: its
    parameters begin as zeros, for all of them come from the log. ``mesh`` is that of all devices.
    """

    origin: Origin
    incarnation: int
    shard: int
    config: str
    data: str = ""
    blank: bool = False
    mesh: str = ""

    @classmethod
    def read(cls, words: Words) -> Assignment:
        """Return what ``HOLD`` says."""
        origin, *about = words
        return cls(Origin(**origin), *about)


REQUESTS = frozenset({Deed.READ, Deed.SEND, Deed.QUANTISE, Deed.FORGET})
"""Deeds of the network's thread; each but the last has an answer."""
ERRORS: Mapping[str, type[SkerryError]] = {"Overtaken": Overtaken, "Diverged": Diverged}
"""Errors of another process that mean the same in the first one."""


@dataclass(slots=True)
class _Asked:
    """A request that every other process is to answer."""

    left: int
    future: asyncio.Future[list[Any]]
    loop: asyncio.AbstractEventLoop
    values: list[Any] = field(default_factory=list[Any])
    failed: tuple[str, str] | None = None


class OtherProcesses:
    """All processes of a learner but the first, as the first one's network uses them."""

    def __init__(self, count: int, post: Callable[..., None]) -> None:
        self._count = count
        self._post = post
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._read: dict[int, list[tuple[int, Any]]] = {}

    async def ask(self, deed: Deed, *words: Any) -> list[Any]:
        """Have each of them do something, and return what each answers.

        Raises one of ERRORS, or BrokerUnavailable, where one of them could not.
        """
        self._number += 1
        loop = asyncio.get_running_loop()
        asked = _Asked(self._count, loop.create_future(), loop)
        self._asked[self._number] = asked
        self._post(deed, self._number, *words)
        values = await asked.future
        if asked.failed:
            kind, why = asked.failed
            msg = f"Another process of this learner did not do its part: {why}"
            raise ERRORS.get(kind, BrokerUnavailable)(msg)
        return values

    async def read(self, fragment: int, version: int) -> int:
        """Have them read their parts of a version; return the bytes that they read."""
        return sum(await self.ask(Deed.READ, fragment, version))

    async def send(self, number: int, header: ContributionHeader) -> int:
        """Have them send their parts of a capture; return the bytes sent."""
        whose = header.fragment, header.identity, header.base_version
        return sum(await self.ask(Deed.SEND, number, *whose))

    async def quantise(
        self, number: int, header: ContributionHeader, squares: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Have them quantise their parts of a capture; return the norms over all, by slice."""
        theirs = await self.ask(Deed.QUANTISE, number, header.fragment, header.identity)
        return tuple(math.sqrt(sum(each)) for each in zip(squares, *theirs, strict=True))

    def forget(self, fragment: int, identity: int) -> None:
        """Have them forget the residual of a contribution, as ``Residuals.unmerged``."""
        self._post(Deed.FORGET, 0, fragment, identity)

    def hold(self, fragment: int, version: int, vector: Any) -> None:
        """Note the vector of a version that all have read."""
        self._read.setdefault(fragment, []).append((version, vector))

    def version_of(self, fragment: int, vector: Any) -> int:
        """Return the version of an adopted vector, and forget it and those before it."""
        read = self._read.get(fragment, [])  # to which another thread may add meanwhile
        at = next(n for n, (_, held) in enumerate(read) if held is vector)
        version = read[at][0]
        del read[: at + 1]
        return version

    def take_answer(self, number: int, failed: Any, value: Any) -> None:
        """Take what one of them has answered, in any thread."""
        asked = self._asked[number]
        with suppress(RuntimeError):  # the loop has closed
            asked.loop.call_soon_threadsafe(self._answered, number, failed, value)

    def _answered(self, number: int, failed: Any, value: Any) -> None:
        asked = self._asked[number]
        asked.left -= 1
        asked.values.append(value)
        asked.failed = asked.failed or (tuple(failed) if failed else None)
        if not asked.left:
            del self._asked[number]
            if not asked.future.done():
                asked.future.set_result(asked.values)


class LeadProcess:
    """The first process of a learner, and its connections to the others.

    ``on_stop`` is called, in a thread, when another process was asked to end: that counts as a
    signal to this one.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        lost: Callable[[str], None] = end_at_once,
    ) -> None:
        self.on_stop: Callable[[], object] = partial(os.kill, os.getpid(), signal.SIGTERM)
        self.abandoned = False
        self.others = OtherProcesses(len(connections), self.post)
        self._met = threading.Semaphore(0)
        self._found = SimpleQueue[set[Point]]()
        self._ready = set[int]()
        self._peers = [
            Peer(connection, str(process), partial(self._heard, process), lost)
            for process, connection in sorted(connections.items())
        ]

    @property
    def processes(self) -> int:
        """The number of processes of this learner."""
        return len(self._peers) + 1

    def post(self, deed: Deed, *words: Any) -> None:
        """Tell the others what comes next."""
        for peer in self._peers:
            peer.say(deed, words)

    def meet(self, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until the others have done all that was asked of them, calling ``tick`` meanwhile.

        Devices that wait for each other give up, on a CPU after half a minute: so long work on one
        of them must be over first.
        """
        self.post(Deed.MEET)
        for _ in self._peers:
            while not self._met.acquire(timeout=BEAT_S):
                tick()

    def all_found(self, within_s: float) -> list[set[Point]]:
        """Return the points of the saves that each other process finds; none if it is silent."""
        ends_s, found = time.monotonic() + within_s, list[set[Point]]()
        for _ in self._peers:
            try:
                found.append(self._found.get(timeout=max(0.0, ends_s - time.monotonic())))
            except Empty:
                found.append(set())
        return found

    def all_ready(self) -> bool:
        """Return True if each of the others can save the next portion of its state."""
        return len(self._ready) == len(self._peers)

    def order_save(self, begins: bool, step: int, steps: int) -> None:  # noqa: FBT001 - goes on
        """Have the others save a portion of their states, the first one if a save ``begins``."""
        self._ready.clear()
        self.post(Deed.SAVE, begins, step, steps)

    def close(self) -> None:
        """Say to all that this is the end."""
        for peer in self._peers:
            peer.close()

    def abandon(self) -> None:
        """End the others at once, even while they compile, and wait until they are gone."""
        self.abandoned = True
        for peer in self._peers:
            peer.close(Deed.STOP)
        for peer in self._peers:
            peer.await_end(SILENCE_S)

    def _heard(self, process: int, deed: Deed, words: Words) -> None:
        if deed is Deed.STOP:
            self.on_stop()
        elif deed is Deed.FOUND:
            self._found.put({(int(incarnation), int(step)) for incarnation, step in words})
        elif deed is Deed.READY:
            self._ready.add(process)
        elif deed is Deed.MEET:
            self._met.release()
        elif deed is Deed.DONE:
            self.others.take_answer(*words)


class FollowingProcess:
    """A process of a learner other than the first, and its connection to the first.

    ``orders`` are those of the first process, END the last; ``next_order`` takes them. Requests of
    the first one's network go to the function given to ``take_requests``, in a thread. ``number``
    is this process's index.
    """

    def __init__(
        self,
        connection: socket.socket,
        lost: Callable[[str], None] = end_at_once,
        *,
        number: int = 1,
    ) -> None:
        self.number = number
        self.orders: SimpleQueue[tuple[Deed, Words]] = SimpleQueue()
        self._early: list[tuple[Deed, Words]] = []
        self._take: Callable[[Deed, Words], None] = lambda deed, words: self._early.append(
            (deed, words)
        )
        self._turn = threading.Lock()
        self._heeds = threading.Event()
        self._lost = lost
        self._peer = Peer(connection, "0", self._heard, lost)

    def next_order(self) -> tuple[Deed, Words]:
        """Wait for the first process's next order; SkerryError if it says that it has failed."""
        deed, words = self.orders.get()
        if deed is Deed.FAIL:
            self._heeds.set()
            raise SkerryError(failed(words))
        return deed, words

    def take_requests(self, take: Callable[[Deed, Words], None]) -> None:
        """Hand on requests from now on, beginning with those that came before."""
        with self._turn:
            for deed, words in self._early:
                take(deed, words)
            self._take = take

    def answer(self, number: int, value: object = 0, error: BaseException | None = None) -> None:
        failed = None if error is None else (type(error).__name__, str(error))
        self._peer.say(Deed.DONE, (number, failed, value))

    def tell(self, deed: Deed, *words: Any) -> None:
        """Tell the first process something."""
        self._peer.say(deed, words)

    def meet(self) -> None:
        """Report that all orders of the first process so far are done."""
        self._peer.say(Deed.MEET)

    def ask_stop(self) -> None:
        """Ask the first process to end this learner in order."""
        self._peer.say(Deed.STOP)

    def close(self) -> None:
        """Say that this is the end."""
        self._peer.close()

    def break_off(self) -> None:
        """Have all processes end: this one has failed."""
        self._peer.break_off()

    def _heard(self, deed: Deed, words: Words) -> None:
        if deed in REQUESTS:
            with self._turn:
                self._take(deed, words)
            return
        if deed is Deed.STOP:
            self._lost("")
        self.orders.put((deed, words))
        if deed is Deed.FAIL and not self._heeds.wait(HEED_S):  # its devices wait for that one's
            self._lost(failed(words))


def failed(words: Words) -> str:
    """Say why the first process has failed."""
    return f"The first process of this learner has failed: {words[0]}"


@asynccontextmanager
async def leading(lead: LeadProcess | None) -> AsyncGenerator[None]:
    """End the other processes as this one ends, in order or by an error; None has none."""
    try:
        yield
    except BaseException as error:
        if lead is not None:
            lead.post(Deed.FAIL, str(first_cause(error)))
        raise
    finally:
        if lead is not None:
            lead.close()


def await_own_end(error: BaseException) -> None:
    """Return only if an error was not caused by another process's end.

    A process that computes with one that dies fails at the same moment; it is then ended meanwhile,
    with a sentence that says why.
    """
    if not isinstance(error, SkerryError):
        time.sleep(2 * BEAT_S)
