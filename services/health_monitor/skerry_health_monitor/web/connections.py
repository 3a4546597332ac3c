"""The page's connections: how many there may be, and how long each may keep the server waiting.

A client that sends no whole request, or takes no answer, is cut off in time. Where there are too
many connections the oldest one that waits for a request makes room, so that idle ones do not lock
other clients out.
"""

from __future__ import annotations

import asyncio
import resource
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

REQUEST_S = 5.0
"""For a whole request: from the connection, or from the first byte on one that is kept open."""
TAKE_S, LEAST_TAKEN = 10.0, 16 * 1024
"""A client that takes fewer bytes in this time, while more wait for it, has stopped reading."""
MOST_CONNECTIONS = 256
MOST_BY_ADDRESS = 32
ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before it looks at one of them."""


def most_connections() -> int:
    """Return how many connections there may be: with at most half of the files of a process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MOST_CONNECTIONS, max(1, soft // 2 - ACCEPTED_AT_ONCE))


class PageProtocol(H11Protocol):
    """HTTP/1.1 with bounds on connections, patience and unsent bytes."""

    since_s = 0.0
    _waiting: asyncio.TimerHandle | None = None
    _sending: asyncio.TimerHandle | None = None

    @property
    def host(self) -> str:
        """Return the client's address without its port."""
        return self.client[0] if self.client else ""

    @property
    def idle(self) -> bool:
        """Return True while no request is being answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        super().connection_made(transport)
        self.since_s = self.loop.time()
        self._wait()
        crowd = list(cast("set[PageProtocol]", self.connections))
        if len(crowd) <= most_connections():
            crowd = [c for c in crowd if c.host == self.host]
            if len(crowd) <= MOST_BY_ADDRESS:
                return
        idle = (c for c in crowd if c.idle and c is not self)
        given_up = min(idle, key=lambda c: c.since_s, default=self)
        self.connections.discard(given_up)
        given_up.transport.abort()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(REQUEST_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.idle or self.cycle.more_body:
            self._wait()
        elif self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def _watch(self, unsent: int) -> None:
        self._sending = self.loop.call_later(TAKE_S, self._look, unsent)

    def _look(self, before: int) -> None:
        if before - (unsent := self.transport.get_write_buffer_size()) < LEAST_TAKEN:
            self.transport.abort()
        else:
            self._watch(unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending is not None:
            self._sending.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._waiting, self._sending):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
