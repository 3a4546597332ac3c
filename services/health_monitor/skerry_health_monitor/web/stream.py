"""Server-sent events: the whole page to a client that connects, then what changes, to all at once.

A client that does not read is dropped: its queue holds ``MOST_WAITING`` messages and no more, and
its connection ends as that of any client that takes no answer does (``web.connections``).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import structlog
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from skerry.tasks import happens
from skerry_health_monitor.web.sections import Sections

log = structlog.get_logger()

MOST_CLIENTS = 64
MOST_WAITING = 16
PUSH_S, SHARE, LATE_S = 0.3, 0.05, 0.8
"""Messages come no faster than the first of these. Frames that take long come later, so that they
use no more than this share of a core, but no later than the last of these: a change is shown within
a second where a frame takes less than a fifth of one."""
LOOK_S = 0.5
"""How often to look where no message says that something has changed, such as silence."""
BEAT_S = 2.0
"""Where nothing has changed for this long, that is said: silence tells a page that we are away."""


@dataclass(frozen=True, slots=True)
class PageFrame:
    """What a page shows at a moment; differences make sense only within one ``epoch``.

    ``marks`` returns the marks behind a number; None for ``sections``: there is no run yet.
    """

    epoch: object
    sections: Sections | None
    marks: Callable[[int], list[list[Any]]]
    head: dict[str, Any]


@dataclass(slots=True, eq=False)
class Client:
    """One page that listens: its messages, as they come."""

    waiting: deque[bytes] = field(default_factory=deque[bytes])
    ended: bool = False
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, message: bytes, *, last: bool = False) -> bool:
        """Queue a message; end a client that has not read the last ones, and return False."""
        fits = len(self.waiting) < MOST_WAITING
        if fits:
            self.waiting.append(message)
        else:
            self.waiting.clear()
        self.ended |= last or not fits
        self._ready.set()
        return fits

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self.waiting:
            if self.ended:
                raise StopAsyncIteration
            self._ready.clear()
            await self._ready.wait()
        return self.waiting.popleft()


class Hub:
    """Sends frames to all clients; works only while there are any."""

    def __init__(self, frame: Callable[[], PageFrame], changed: asyncio.Event) -> None:
        self._frame = frame
        self._changed = changed
        self._came = asyncio.Event()
        self._sent: PageFrame | None = None
        self._said_s = 0.0
        self._marked = 0
        self.clients: set[Client] = set()

    def join(self) -> Client | None:
        """Return a new client with the whole frame before it; None where there are too many."""
        if len(self.clients) >= MOST_CLIENTS:
            return None
        self._push()
        client = Client()
        assert self._sent is not None
        client.offer(self._whole(self._sent))
        self.clients.add(client)
        self._came.set()
        return client

    async def run(self) -> None:
        """Push what changes, for ever."""
        while True:
            if not self.clients:
                self._came.clear()
                await self._came.wait()
            await happens(self._changed, LOOK_S)
            self._changed.clear()
            began_s = time.thread_time()
            self._push()
            if self._sent is not None and time.monotonic() - self._said_s >= BEAT_S:
                self._send(event("beat", self._sent.head))
            await asyncio.sleep(pause_s(time.thread_time() - began_s))

    def close(self) -> None:
        """Say the last word to everybody."""
        self._push()
        for client in self.clients:
            client.offer(event("end", {}), last=True)

    def _push(self) -> None:
        before, now = self._sent, self._frame()
        self._sent = now
        if before is None:
            return
        if before.epoch is not now.epoch:
            self._send(self._whole(now))
        if before.epoch is not now.epoch or before.sections is None or now.sections is None:
            return
        changes = difference(before.sections, now.sections)
        marks = now.marks(self._marked)
        if marks:
            self._marked = marks[-1][0]
        if changes or marks:
            self._send(event("change", {**now.head, "sections": changes, "marks": marks}))

    def _whole(self, frame: PageFrame) -> bytes:
        if frame.sections is None:
            return event("waiting", frame.head)
        marks = frame.marks(0)
        self._marked = marks[-1][0] if marks else 0
        return event("whole", {**frame.head, "sections": frame.sections, "marks": marks})

    def _send(self, message: bytes) -> None:
        self._said_s = time.monotonic()
        for client in tuple(self.clients):
            if not client.offer(message):
                self.clients.discard(client)
                log.warning("page_client_dropped", reason="it does not read")


def pause_s(took_s: float) -> float:
    """Return how long to wait after a frame that took so much CPU time."""
    return min(max(PUSH_S, took_s / SHARE), LATE_S)


def difference(before: Sections, now: Sections) -> dict[str, dict[str, Any]]:
    """Return what to set and what to remove in each section, keys by section."""
    changes: dict[str, dict[str, Any]] = {}
    for name, section in now.items():
        old = before.get(name, {})
        put = {k: v for k, v in section.items() if k not in old or old[k] != v}
        gone = [k for k in old if k not in section]
        if put or gone:
            changes[name] = {"set": put, "del": gone}
    return changes


def event(name: str, data: object) -> bytes:
    """Return one server-sent event; JSON has no line breaks, so it is one line of data."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return f"event: {name}\ndata: {text}\n\n".encode()


def stream_route(hub: Hub) -> Route:
    """Return the route on which a page is a client of the hub for as long as its request lasts."""

    async def answer(_: Request) -> Response:
        client = hub.join()
        if client is None:
            return PlainTextResponse("Too many pages are open: close some.", 503)
        return _EventStream(client, partial(hub.clients.discard, client))

    return Route("/api/stream", answer)


class _EventStream(StreamingResponse):
    """A client's messages; ``left`` is called once it has gone."""

    def __init__(self, client: Client, left: Callable[[], None]) -> None:
        headers = {"x-accel-buffering": "no"}
        super().__init__(client, media_type="text/event-stream", headers=headers)
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()
