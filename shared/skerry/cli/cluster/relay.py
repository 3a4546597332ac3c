"""One TCP connection through the proxy: its two ends, what is on its way between them, its shape.

While a route is open and nothing waits, bytes go straight from one socket to the other; a delay, a
rate or a cut makes them wait in a queue that is bounded by not reading any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.cli.cluster.peer_filter import PeerFilter

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_BYTES = 4 * 1024**2
"""A direction in which this much waits is not read from until some of it has gone."""
WRITE_BYTES = 1024**2


class Cut(StrEnum):
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

    ``ways`` are the directions that a black hole swallows; a reset ends both.
    """

    delay_s: float = 0.0
    rate_bytes_s: float = 0.0
    cut: Cut = Cut.NONE
    ways: frozenset[Way] = frozenset(Way)

    @property
    def free(self) -> bool:
        return self == OPEN

    def swallows(self, way: Way) -> bool:
        return self.cut is Cut.BLACKHOLE and way in self.ways


OPEN = LinkShape()


@dataclass(slots=True)
class Route:
    """The way of one service to the broker; counters are over all of its connections.

    ``shaped_bytes`` had to wait for a delay or a rate, ``stalled_bytes`` came while the route was
    cut; ``refused`` and ``aborted`` count connections that a cut kept out or ended.
    """

    name: str
    shape: LinkShape = OPEN
    relays: set[Relay] = field(default_factory=set["Relay"])
    bytes_up: int = 0
    bytes_down: int = 0
    shaped_bytes: int = 0
    stalled_bytes: int = 0
    accepted: int = 0
    refused: int = 0
    aborted: int = 0

    def set(self, shape: LinkShape) -> None:
        """Give the route another shape; what waits goes on at once, or ends."""
        self.shape = shape
        for relay in tuple(self.relays):
            if shape.cut is Cut.RESET:
                self.aborted += 1
                relay.abort()
            else:
                relay.reshape()


class Relay:
    """A service's connection and the one to the broker that answers it."""

    def __init__(self, route: Route, dial: Callable[[Relay], None]) -> None:
        self.route = route
        self.service = RelayEnd(self, Way.DOWN)
        self.broker = RelayEnd(self, Way.UP)
        self.dialled = False
        self.peer_filter = PeerFilter()
        self._dial = dial
        route.relays.add(self)

    def opened(self) -> None:
        """A service has connected: dial the broker, unless the route is cut."""
        route = self.route
        route.accepted += 1
        self.service.hold()
        if route.shape.cut is Cut.RESET:
            route.refused += 1
            self.abort()
        elif route.shape.cut is Cut.BLACKHOLE:
            route.refused += 1
        else:
            self._begin()

    def reshape(self) -> None:
        """Go on under the route's new shape."""
        if not self.dialled and self.route.shape.cut is Cut.NONE:
            self._begin()
        for end in (self.service, self.broker):
            end.flush(at_once=True)

    def abort(self) -> None:
        """End both connections with a reset."""
        for end in (self.service, self.broker):
            end.abort()
        self.gone()

    def gone(self) -> None:
        self.route.relays.discard(self)

    def other(self, end: RelayEnd) -> RelayEnd:
        return self.broker if end is self.service else self.service

    def _begin(self) -> None:
        self.dialled = True
        self._dial(self)


class RelayEnd(asyncio.Protocol):
    """One side of a relay; ``way`` is the direction of the bytes that are *sent* on it."""

    def __init__(self, relay: Relay, way: Way) -> None:
        self.relay = relay
        self.way = way
        self.transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._full = False
        self._closing = False
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        other = self.relay.other(self)
        if self is self.relay.service:
            self.relay.opened()
        elif other.transport is None or other.transport.is_closing():
            transport.abort()
        else:
            self.flush()
            other.release()

    def data_received(self, data: bytes) -> None:
        if self is self.relay.broker:
            data = self.relay.peer_filter.without_peers(data)
        if data:
            self.relay.other(self).send(data)

    def pause_writing(self) -> None:
        self._full = True
        self.relay.other(self).hold()

    def resume_writing(self) -> None:
        self._full = False
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio calls it so
        if self._timer is not None:
            self._timer.cancel()
        if self is self.relay.broker and (rest := self.relay.peer_filter.rest()):
            self.relay.service.send(rest)
        self.relay.other(self).close()
        if self.relay.other(self).transport is None:
            self.relay.gone()

    def send(self, data: bytes) -> None:
        """Send now, or once the shape allows it."""
        route, size = self.relay.route, len(data)
        if self.way is Way.UP:
            route.bytes_up += size
        else:
            route.bytes_down += size
        shape = route.shape
        if shape.free and not self._waiting and self.transport is not None:
            self.transport.write(data)
            return
        if shape.swallows(self.way):
            route.stalled_bytes += size
        elif not shape.free:
            route.shaped_bytes += size
        self._waiting.append((self._due(size), data))
        self._waiting_bytes += size
        if self._waiting_bytes > HELD_BYTES:
            self.relay.other(self).hold()
        self.flush()

    def flush(self, *, at_once: bool = False) -> None:
        """Send what is due; ``at_once``: what waits is due at once, for the shape has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.transport is None or self.relay.route.shape.swallows(self.way):
            return
        now = self._loop.time()
        if at_once:
            self._free_at = now
        while self._waiting and not self._full and (at_once or self._waiting[0][0] <= now):
            _, data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self.transport.write(data)
        if self._waiting and not self._full:
            self._timer = self._loop.call_at(self._waiting[0][0], self.flush)
        elif self._closing and not self._waiting:
            self.transport.close()
        if self._waiting_bytes <= HELD_BYTES and not self._full:
            self.relay.other(self).release()

    def close(self) -> None:
        """Close once everything that waits has been sent; a cut hides even that."""
        self._closing = True
        self.flush()
        if self.transport is not None and self.transport.is_closing():
            self.relay.gone()

    def abort(self) -> None:
        """End this connection with a reset."""
        self._waiting.clear()
        if self.transport is None:
            return
        bare = self.transport.get_extra_info("socket")
        if bare is not None:
            with contextlib.suppress(OSError):
                bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def hold(self) -> None:
        """Read no more for now."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def release(self) -> None:
        """Read on."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def _due(self, size: int) -> float:
        shape, now = self.relay.route.shape, self._loop.time()
        begins = max(now, self._free_at)
        self._free_at = begins + (size / shape.rate_bytes_s if shape.rate_bytes_s else 0.0)
        return self._free_at + shape.delay_s
