"""The web page: its files, its stream of events, and the ledger record behind a round.

Nothing on it comes from another host, and a browser that obeys ``POLICY`` would refuse it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from skerry.errors import BrokerUnavailable
from skerry.log import ledger
from skerry.protocol.messages import why
from skerry.status.format import clip

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit
    from skerry.status.model import RunModel
    from skerry_health_monitor.web.stream import Client, Hub

FILES = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
LOOK_UP_S = 10.0
NUMBER = re.compile(r"[0-9]{1,20}")
"""A fragment or version in an address: Python refuses to read thousands of digits."""

Cut = Callable[[tuple[str, int]], None]
"""Ends the connection of a client, by its address, whatever still waits to be sent on it."""


def routes(hub: Hub, current: Callable[[], RunModel | None], bus: Bus, cut: Cut) -> list[BaseRoute]:
    """Return what the page needs."""

    async def index(_: Request) -> Response:
        return FileResponse(FILES / "index.html", media_type="text/html")

    async def one_round(request: Request) -> Response:
        model = current()
        texts = [request.path_params[name] for name in ("fragment", "version")]
        if not all(NUMBER.fullmatch(text) for text in texts):
            return _missing(*texts)
        fragment, version = map(int, texts)
        if model is None:
            return JSONResponse({"error": "The log is not read yet: try again."}, 503)
        place = model.history.timeline.place(fragment, version)
        if place is None:
            return _unread() if _to_come(model, fragment, version) else _missing(fragment, version)
        try:
            async with asyncio.timeout(LOOK_UP_S):
                found = await _look_up(bus, model.record.run, fragment, version, place - 1)
        except (BrokerUnavailable, TimeoutError):
            return JSONResponse({"error": "The broker does not answer: try again."}, 503)
        if found is None:
            return _missing(fragment, version)
        shown = {**as_json(found[1]), "ledger_sequence": found[0]}
        return Response(
            json.dumps(shown, indent=1, ensure_ascii=False), media_type="application/json"
        )

    return [
        Route("/", index),
        Mount("/static", StaticFiles(directory=FILES)),
        Route("/api/stream", EventStream(hub, cut)),
        Route("/api/rounds/{fragment}/{version}", one_round),
    ]


def _to_come(model: RunModel, fragment: int, version: int) -> bool:
    """Say whether a commit is known to be there, though the ledger is not read that far."""
    return model.view.counting and 0 < version <= model.view.versions.get(fragment, 0)


def _unread() -> Response:
    error = "Still reading the history, which has not come to this round: try again."
    return JSONResponse({"error": error}, 503)


def _missing(fragment: int | str, version: int | str) -> Response:
    names = (clip(str(number)) for number in (version, fragment))
    error = "The ledger has no version {} of fragment {}.".format(*names)
    return JSONResponse({"error": error}, 404)


async def _look_up(
    bus: Bus, run: str, fragment: int, version: int, after: int
) -> tuple[int, Commit] | None:
    """Read on behind a place in the ledger up to this version; None if it was left out."""
    commits = ledger.follow_commits(bus, run, after, fragment=fragment)
    async with aclosing(commits):
        async for sequence, commit in commits:
            if commit.version >= version:
                return (sequence, commit) if commit.version == version else None
    return None


def as_json(commit: Commit) -> dict[str, Any]:
    """Return a commit for JSON: digests as hexadecimal, which JSON's numbers cannot hold."""
    shown = asdict(commit) | {"reason": why(commit)}
    for name in ("plan_digest", "params_digest", "master_digest", "previous"):
        shown[name] = f"{shown[name]:016x}"
    shown = json.loads(json.dumps(shown), parse_constant=lambda _: None)  # NaN is no JSON
    return dict(shown)


class EventStream:
    """An ASGI application: one client of the hub for as long as the request lasts."""

    def __init__(self, hub: Hub, cut: Cut) -> None:
        self._hub = hub
        self._cut = cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = self._hub.join()
        if client is None:
            refusal = PlainTextResponse("Too many pages are open: close some.", 503)
            await refusal(scope, receive, send)
            return
        writing = asyncio.ensure_future(_write(client, send))
        leaving = asyncio.ensure_future(_left(receive))
        stuck = asyncio.ensure_future(client.dropped.wait())
        try:
            await asyncio.wait({writing, leaving, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and not leaving.done():
                self._cut(scope["client"])
                await leaving
        finally:
            self._hub.leave(client)
            for task in (writing, leaving, stuck):
                task.cancel()
            await asyncio.gather(writing, leaving, stuck, return_exceptions=True)


async def _write(client: Client, send: Send) -> None:
    headers = {"content-type": "text/event-stream", "x-accel-buffering": "no"}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    with suppress(OSError):
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        while (message := await client.next()) is not None:
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    """Return once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Headed:
    """Adds ``HEADERS`` to whatever an application answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        await self._app(scope, receive, headed)
