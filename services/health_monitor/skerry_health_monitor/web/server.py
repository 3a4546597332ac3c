"""The monitor's HTTP side: the page's files and JSON, on the loopback unless set otherwise.

Nothing on the page comes from another host, and a browser that obeys ``POLICY`` would refuse it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from skerry.errors import BrokerUnavailable, ConfigError
from skerry.log import ledger
from skerry.protocol.messages import Commit, why
from skerry.status.format import clip
from skerry_health_monitor.web.connections import ACCEPTED_AT_ONCE, PageProtocol
from skerry_health_monitor.web.gate import refusal

if TYPE_CHECKING:
    from skerry.status.feed import RunFeed
    from skerry.status.model import RunSnapshot

log = structlog.get_logger()

FILES = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
]
LOOK_UP_S = 10.0
NUMBER = re.compile(r"[0-9]{1,20}")
"""A fragment or version in an address: Python refuses to read thousands of digits."""


def application(
    feed: RunFeed, current: Callable[[], RunSnapshot | None], more: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application over a feed's run, of which ``current`` returns what is known.

    ``more`` are other routes.
    ``/healthz`` says that the monitor works; ``/api/run`` and ``/api/rounds`` answer 503 until the
    run is in the log.
    """

    async def healthz(_: Request) -> JSONResponse:
        status = "waiting" if feed.model is None else "following"
        return JSONResponse({"ok": True, "status": status})

    async def whole(_: Request) -> JSONResponse:
        now = current()
        if now is None:
            what = f"There is no run {feed.name!r} in this log yet"
            return refusal(503, f"{what}: it appears with its first learner.")
        return JSONResponse(asdict(now.report))

    async def index(_: Request) -> Response:
        return FileResponse(FILES / "index.html", media_type="text/html")

    async def one_round(request: Request) -> Response:
        return await _round(feed, *(request.path_params[name] for name in ("fragment", "version")))

    return Starlette(
        routes=[
            Route("/", index),
            Mount("/static", StaticFiles(directory=FILES)),
            Route("/healthz", healthz),
            Route("/api/run", whole),
            Route("/api/rounds/{fragment}/{version}", one_round),
            *more,
        ],
    )


async def _round(feed: RunFeed, *texts: str) -> Response:
    """Return the ledger record behind a round, by the fragment and version in an address."""
    missing = "The ledger has no version {1} of fragment {0}.".format(*map(clip, texts))
    if not all(NUMBER.fullmatch(text) for text in texts):
        return refusal(404, missing)
    fragment, version = map(int, texts)
    if feed.model is None:
        return refusal(503, "The log is not read yet: try again.")
    try:
        async with asyncio.timeout(LOOK_UP_S):
            found = await ledger.commit_of(feed.bus, feed.name, fragment, version)
    except (BrokerUnavailable, TimeoutError):
        return refusal(503, "The broker does not answer: try again.")
    if found is None:
        return refusal(404, missing)
    shown = {**as_json(found[1]), "ledger_sequence": found[0]}
    text = json.dumps(shown, indent=1, ensure_ascii=False)
    return Response(text, media_type="application/json")


def as_json(commit: Commit) -> dict[str, Any]:
    """Return a commit for JSON: digests as hexadecimal, which JSON's numbers cannot hold."""
    shown = asdict(commit) | {"reason": why(commit)}
    for name in ("plan_digest", "params_digest", "master_digest", "previous"):
        shown[name] = f"{shown[name]:016x}"
    shown = json.loads(json.dumps(shown), parse_constant=lambda _: None)  # NaN is no JSON
    return dict(shown)


class _Server(uvicorn.Server):
    """Leaves the signals to the service shell."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind the server's socket; ConfigError with the fix when that is not possible."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        unresolved = (error.errno or 0) < 0  # a number of getaddrinfo's own
        unfit = unresolved or error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
        path, fix = (
            ("health.host", "an address of this machine with --set health.host=…")
            if unfit
            else ("health.port", "another with --set health.port=…; 0 picks a free one")
        )
        why = str(error.strerror or error).partition(" (while")[0]  # Python says the address again
        msg = f"Cannot listen on {_joined(host, port)} ({why}): choose {fix}."
        raise ConfigError(msg, path=path) from error


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve_http(
    app: ASGIApp,
    listening: socket.socket,
    closing: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until cancelled, then close the connections in order.

    ``closing`` is called first, to end answers that would go on for ever.
    """
    host, port = listening.getsockname()[:2]
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        http=PageProtocol,
        ws="none",
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=1,
        headers=HEADERS,
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    log.info("health_listening", url=f"http://{_joined(host, port)}/", port=port)
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        closing()
        server.should_exit = True
        await asyncio.wait({serving})
        raise
