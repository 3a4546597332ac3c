"""A TCP proxy between each service of a local cluster and its broker, for faults of the network.

``skerry up`` runs it, and hands on ``{"op": "set", "route": NAME, "cut": "none|reset|blackhole",
"delay_s": S, "rate_bytes_s": R, "loss": SHARE, "ways": ["up", "down"]}`` and ``{"op": "open"}`` of
its control socket. A delay, a rate, a loss or a cut makes bytes wait in a queue that is bounded by
not reading any more; no byte is lost for good. All it knows of NATS is how to hide the addresses of
other brokers.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from collections import deque
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skerry.cli.cluster.peer_filter import PeerFilter
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncGenerator, Mapping

HELD_BYTES = 4 * 1024**2
"""A direction in which this much waits is not read from until some of it has gone."""
READ_BYTES = 256 * 1024
RETRANSMIT_S, MOST_RETRANSMIT_S = 0.2, 6.0
"""How long TCP waits before it sends a lost segment again: first, and after losses in a row."""
MOST_LOSS = 0.95
"""A link that loses more would never be through: a black hole does that."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which a connection ends with a reset."""


class LinkCut(StrEnum):
    """How a route is cut: not, by ending its connections, or by letting nothing through."""

    NONE = "none"
    RESET = "reset"
    BLACKHOLE = "blackhole"


class Way(StrEnum):
    """A direction, seen from the service: ``up`` is towards the broker."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a route does to its bytes; ``rate_bytes_s`` 0: as fast as they come.

    ``loss`` is the chance of a segment to be lost each time that it is sent: all that comes behind
    waits until TCP has sent it again. ``ways`` are the directions that a black hole swallows; a
    reset ends both.
    """

    delay_s: float = 0.0
    rate_bytes_s: float = 0.0
    loss: float = 0.0
    cut: LinkCut = LinkCut.NONE
    ways: frozenset[Way] = frozenset(Way)

    def swallows(self, way: Way) -> bool:
        return self.cut is LinkCut.BLACKHOLE and way in self.ways


OPEN = LinkShape()


@dataclass(slots=True)
class Counters:
    """Of one route, over all its connections.

    ``shaped_bytes`` had to wait for a delay or a rate, ``stalled_bytes`` came while the route was
    cut; ``refused`` and ``aborted`` count connections that a cut kept out or ended.
    """

    accepted: int = 0
    refused: int = 0
    aborted: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    shaped_bytes: int = 0
    lost_segments: int = 0
    stalled_bytes: int = 0


@dataclass(slots=True)
class Route:
    """The way of one service to the broker; ``changed`` is replaced when its shape changes."""

    shape: LinkShape = OPEN
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    counters: Counters = field(default_factory=Counters)
    connections: dict[asyncio.Task[None], list[StreamWriter]] = field(
        default_factory=dict[asyncio.Task[None], "list[StreamWriter]"]
    )

    def set(self, shape: LinkShape) -> None:
        """Give the route another shape; what waits goes on at once, or ends."""
        self.shape = shape
        self.changed.set()
        self.changed = asyncio.Event()
        if shape.cut is LinkCut.RESET:
            self.counters.aborted += len(self.connections)
            self.abort()

    def abort(self) -> None:
        """End every connection with a reset."""
        for task, writers in self.connections.items():
            _reset(writers)
            task.cancel()

    def count(self, way: Way, size: int) -> None:
        """Count bytes that have come."""
        counters = self.counters
        if way is Way.UP:
            counters.bytes_up += size
        else:
            counters.bytes_down += size
        if self.shape.swallows(way):
            counters.stalled_bytes += size
        elif self.shape != OPEN:
            counters.shaped_bytes += size

    async def carry(
        self, upstream: tuple[str, int], near: StreamReader, service: StreamWriter
    ) -> None:
        """Serve a service's connection to its end; the broker is dialled while nothing is cut."""
        writers, task = [service], asyncio.current_task()
        self.counters.accepted += 1
        self.counters.refused += self.shape.cut is not LinkCut.NONE
        if self.shape.cut is LinkCut.RESET or task is None:
            _reset(writers)
            return
        self.connections[task] = writers
        try:
            while self.shape.cut is not LinkCut.NONE:
                await self.changed.wait()
            far, broker = await asyncio.open_connection(*upstream, limit=READ_BYTES)
            writers.append(broker)
            up = _Pipe(self, Way.UP, near, broker)
            down = _Pipe(self, Way.DOWN, far, service, PeerFilter())
            await asyncio.gather(up.run(), down.run())
        except (OSError, asyncio.CancelledError):
            # An OSError when no broker listens: the service sees what it would see without us.
            # And a cancelled connection is an error that asyncio.streams logs before Python 3.12.
            _reset(writers)
        finally:
            del self.connections[task]
            for writer in writers:
                writer.close()


@dataclass(slots=True)
class _Pipe:
    """One direction of a connection; ``waiting`` are bytes and when they are due.

    After a change of the route what waited is due at once.
    """

    route: Route
    way: Way
    reader: StreamReader
    writer: StreamWriter
    peer_filter: PeerFilter | None = None
    waiting: deque[tuple[bytes, float, asyncio.Event]] = field(
        default_factory=deque[tuple[bytes, float, asyncio.Event]]
    )
    held_bytes: int = 0
    free_at_s: float = 0.0
    ended: bool = False
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Pass on what comes until its end, then end the other side, unless a cut hides that."""
        sending = asyncio.create_task(self._send(), name="send")
        try:
            with contextlib.suppress(OSError):
                await self._receive()
            self.ended = True
            self.moved.set()
            with contextlib.suppress(OSError):
                await sending
        finally:
            sending.cancel()
        self.writer.close()

    async def _receive(self) -> None:
        while data := await self.reader.read(READ_BYTES):
            self._take(data if self.peer_filter is None else self.peer_filter.without_peers(data))
            while self.held_bytes > HELD_BYTES and not self.ended:
                self.moved.clear()
                await self.moved.wait()
        if self.peer_filter is not None:
            self._take(self.peer_filter.rest())

    def _take(self, data: bytes) -> None:
        shape, now_s = self.route.shape, asyncio.get_running_loop().time()
        self.route.count(self.way, len(data))
        begins_s = max(now_s, self.free_at_s) if self.waiting else now_s
        self.free_at_s = begins_s + (len(data) / shape.rate_bytes_s if shape.rate_bytes_s else 0.0)
        again_s = RETRANSMIT_S
        while random.random() < shape.loss:  # noqa: S311 - a fault, no secret
            self.route.counters.lost_segments += 1
            self.free_at_s += again_s
            again_s = min(2 * again_s, MOST_RETRANSMIT_S)
        self.waiting.append((data, self.free_at_s + shape.delay_s, self.route.changed))
        self.held_bytes += len(data)
        self.moved.set()

    async def _send(self) -> None:
        try:
            while self.waiting or not self.ended:
                while self.waiting:
                    data, due_s, change = self.waiting[0]
                    await self._until_due(due_s, change)
                    self.writer.write(data)
                    await self.writer.drain()
                    self.waiting.popleft()
                    self.held_bytes -= len(data)
                    self.moved.set()
                if not self.ended:
                    self.moved.clear()
                    await self.moved.wait()
            await self._until_due(0.0, self.route.changed)  # a cut hides even the end
        finally:
            self.ended = True
            self.moved.set()

    async def _until_due(self, due_s: float, change: asyncio.Event) -> None:
        route = self.route
        while True:
            if route.shape.swallows(self.way):
                await route.changed.wait()
            elif change.is_set() or due_s <= asyncio.get_running_loop().time():
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due_s):
                        await change.wait()


class Proxy:
    """The routes of one cluster; ``ports`` are where they listen, by service."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.routes: dict[str, Route] = {}
        self.ports: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def serving(self, hosts: Mapping[str, str]) -> AsyncGenerator[None]:
        """Listen for every service on its host, at any free port, while the context lasts."""
        servers: list[asyncio.Server] = []
        try:
            for name, host in hosts.items():
                route = self.routes[name] = Route()
                carry = partial(route.carry, self.upstream)
                servers.append(await asyncio.start_server(carry, host, 0, limit=READ_BYTES))
                self.ports[name] = servers[-1].sockets[0].getsockname()[1]
            yield
        finally:
            for server in servers:
                server.close()
            tasks = [task for route in self.routes.values() for task in route.connections]
            for route in self.routes.values():
                route.abort()
            await asyncio.gather(*tasks, return_exceptions=True)

    def set(self, name: object, shape: LinkShape) -> dict[str, Any]:
        """Shape a service's route and return its counters; ConfigError if there is no such one."""
        if not isinstance(name, str) or name not in self.routes:
            msg = f"There is no route {name!r}: use one of {', '.join(sorted(self.routes))}."
            raise ConfigError(msg, path="route")
        self.routes[name].set(shape)
        return self.show()[name]

    def open_all(self) -> list[str]:
        """Let every route pass everything, and return those that did not."""
        shaped = [name for name, route in self.routes.items() if route.shape != OPEN]
        for name in shaped:
            self.routes[name].set(OPEN)
        return sorted(shaped)

    def show(self) -> dict[str, dict[str, Any]]:
        """Return how every route is cut, and its counters."""
        return {
            name: {"cut": route.shape.cut.value, **asdict(route.counters)}
            for name, route in self.routes.items()
        }


def can_proxy(url: str) -> bool:
    """Return True if a proxy can stand in for a broker: one address, in the clear."""
    return "," not in url and urlsplit(url).scheme == "nats"


def shape_from(request: Mapping[str, Any]) -> LinkShape:
    """Return the shape that a command asks for; ConfigError says what is wrong with it."""
    try:
        numbers = {n: float(request.get(n, 0.0)) for n in ("delay_s", "rate_bytes_s", "loss")}
        cut = LinkCut(request.get("cut", LinkCut.NONE))
        ways = frozenset(Way(way) for way in request.get("ways", tuple(Way)))
    except (TypeError, ValueError) as error:
        msg = f"This is no shape of a route ({error}): see the head of {__name__}."
        raise ConfigError(msg, path="cut") from error
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            msg = f"{name} is {value}: give a finite number, 0 or more."
            raise ConfigError(msg, path=name)
    if numbers["loss"] > 1:
        msg = f"loss is {numbers['loss']}: give a share from 0 to 1."
        raise ConfigError(msg, path="loss")
    numbers["loss"] = min(numbers["loss"], MOST_LOSS)
    return LinkShape(**numbers, cut=cut, ways=ways)


def _reset(writers: list[StreamWriter]) -> None:
    for writer in writers:
        bare = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
