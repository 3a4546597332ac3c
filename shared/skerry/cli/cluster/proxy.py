"""A TCP proxy between each service of a local cluster and its broker, for faults of the network.

``skerry up`` runs it, and hands on ``{"op": "set", "route": NAME, "cut": "none|reset|blackhole",
"delay_s": S, "rate_bytes_s": R, "loss": SHARE}`` and ``{"op": "open"}`` of its control socket. A
delay, a rate, a loss or a cut makes bytes wait in a queue that is bounded by not reading any more;
no byte is lost for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from skerry.errors import ConfigError
from skerry.tasks import now_s

HOST = "127.0.0.1"
READ_BYTES = 256 * 1024
MOST_WAITING = 32
"""Pieces of at most READ_BYTES; a direction in which so many wait is not read from."""
RETRANSMIT_S, MOST_RETRANSMIT_S = 0.2, 6.0
"""How long TCP waits before it sends a lost segment again: first, and after losses in a row."""
MOST_LOSS = 0.95
"""A link that loses more would pass nothing, as a black hole does."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER by which a connection ends with a reset."""


class LinkCut(StrEnum):
    """How a route is cut: not, by ending its connections, or by letting nothing through."""

    NONE = "none"
    RESET = "reset"
    BLACKHOLE = "blackhole"


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What a route does to its bytes; ``rate_bytes_s`` 0: as fast as they come.

    ``loss`` is the chance of a segment to be lost each time that it is sent: all that comes behind
    waits until TCP has sent it again.
    """

    delay_s: float = 0.0
    rate_bytes_s: float = 0.0
    loss: float = 0.0
    cut: LinkCut = LinkCut.NONE


OPEN = LinkShape()


@dataclass(slots=True)
class Counters:
    """Counts of one route, over all its connections.

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
            up, down = self._pipe(near, broker, "bytes_up"), self._pipe(far, service, "bytes_down")
            await asyncio.gather(up, down)
        except (OSError, asyncio.CancelledError):
            # An OSError when no broker listens: the service sees what it would see without us.
            # And a cancelled connection is an error that asyncio.streams logs before Python 3.12.
            _reset(writers)
        finally:
            del self.connections[task]
            for writer in writers:
                writer.close()

    async def _pipe(self, reader: StreamReader, writer: StreamWriter, counter: str) -> None:
        """Pass on what comes in one direction until its end, each piece when it is due."""
        waiting = asyncio.Queue[tuple[bytes, float, asyncio.Event]](MOST_WAITING)

        async def receive() -> None:
            free_at_s, change = 0.0, self.changed
            with contextlib.suppress(OSError):
                while data := await reader.read(READ_BYTES):
                    came_s = now_s()
                    begins_s = max(came_s, free_at_s) if change is self.changed else came_s
                    free_at_s, change = begins_s + self._takes_s(data, counter), self.changed
                    await waiting.put((data, free_at_s + self.shape.delay_s, change))
            await waiting.put((b"", 0.0, self.changed))

        receiving = asyncio.create_task(receive(), name="receive")
        try:
            with contextlib.suppress(OSError):
                while True:
                    data, due_s, change = await waiting.get()
                    await self._until_due(due_s, change)  # a cut hides even the end
                    if not data:
                        break
                    writer.write(data)
                    await writer.drain()
        finally:
            receiving.cancel()
        writer.close()

    def _takes_s(self, data: bytes, counter: str) -> float:
        """Count a piece, and return how long the route is busy with it."""
        shape, counters = self.shape, self.counters
        setattr(counters, counter, getattr(counters, counter) + len(data))
        if shape.cut is LinkCut.BLACKHOLE:
            counters.stalled_bytes += len(data)
        elif shape.delay_s or shape.rate_bytes_s:
            counters.shaped_bytes += len(data)
        takes_s = len(data) / shape.rate_bytes_s if shape.rate_bytes_s else 0.0
        again_s = RETRANSMIT_S
        while random.random() < shape.loss:  # noqa: S311 - a fault, no secret
            counters.lost_segments += 1
            takes_s += again_s
            again_s = min(2 * again_s, MOST_RETRANSMIT_S)
        return takes_s

    async def _until_due(self, due_s: float, change: asyncio.Event) -> None:
        """Wait until a piece is due; after a change of the route it is due at once."""
        while True:
            if self.shape.cut is LinkCut.BLACKHOLE:
                await self.changed.wait()
            elif change.is_set() or due_s <= now_s():
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due_s):
                        await change.wait()


class Proxy:
    """The routes of one cluster to its broker; ``ports`` are where they listen, by service."""

    def __init__(self, port: int) -> None:
        self.upstream = (HOST, port)
        self.routes: dict[str, Route] = {}
        self.ports: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def serving(self, names: Iterable[str]) -> AsyncGenerator[None]:
        """Listen for every service, at any free port, while the context lasts."""
        servers: list[asyncio.Server] = []
        try:
            for name in names:
                route = self.routes[name] = Route()
                carry = partial(route.carry, self.upstream)
                servers.append(await asyncio.start_server(carry, HOST, 0, limit=READ_BYTES))
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
        """Shape a service's route and return its counters; ConfigError if it has none."""
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


def shape_from(request: Mapping[str, Any]) -> LinkShape:
    """Return the shape that a command asks for; ConfigError says what is wrong with it."""
    try:
        numbers = {n: float(request.get(n, 0.0)) for n in ("delay_s", "rate_bytes_s", "loss")}
        cut = LinkCut(request.get("cut", LinkCut.NONE))
    except (TypeError, ValueError) as error:
        msg = f"This is no shape of a route ({error}): see the head of {__name__}."
        raise ConfigError(msg, path="cut") from error
    for name, value in numbers.items():
        most = 1.0 if name == "loss" else math.inf
        if not math.isfinite(value) or not 0 <= value <= most:
            bound = "a share from 0 to 1" if name == "loss" else "a finite number, 0 or more"
            msg = f"{name} is {value}: give {bound}."
            raise ConfigError(msg, path=name)
    return LinkShape(**{**numbers, "loss": min(numbers["loss"], MOST_LOSS)}, cut=cut)


def _reset(writers: list[StreamWriter]) -> None:
    for writer in writers:
        bare = writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
