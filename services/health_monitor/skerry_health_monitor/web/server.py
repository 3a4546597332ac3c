"""The monitor's HTTP side: JSON over the newest view, on the loopback unless set otherwise."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Route

from skerry.errors import ConfigError
from skerry.status.report import to_json
from skerry_health_monitor.web.page import Headed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from starlette.requests import Request
    from starlette.routing import BaseRoute

    from skerry.status.view import RunView

log = structlog.get_logger()


def application(
    current: Callable[[], RunView | None], run: str, more: Sequence[BaseRoute] = ()
) -> Starlette:
    """Return the ASGI application over whatever view ``current`` returns at each request.

    ``/healthz`` says that the monitor works; ``/api/run``, ``/api/learners`` and
    ``/api/evaluations`` answer 503 until the run is in the log. ``more`` are other routes.
    """

    async def healthz(_: Request) -> JSONResponse:
        status = "waiting" if current() is None else "following"
        return JSONResponse({"ok": True, "run": run, "status": status})

    async def whole(_: Request) -> JSONResponse:
        view = current()
        return _not_yet(run) if view is None else JSONResponse(to_json(view, time.time()))

    def part(name: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def answer(_: Request) -> JSONResponse:
            view = current()
            return _not_yet(run) if view is None else JSONResponse(to_json(view, time.time())[name])

        return answer

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/api/run", whole),
            Route("/api/learners", part("learners")),
            Route("/api/evaluations", part("evaluations")),
            *more,
        ],
        middleware=[Middleware(Headed)],
    )


def _not_yet(run: str) -> JSONResponse:
    error = f"There is no run {run!r} in this log yet: it appears with its first learner."
    return JSONResponse({"error": error}, status_code=503)


class _Server(uvicorn.Server):
    """Leaves the signals to the service shell."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Connections:
    """The connections of a server that runs, to end one that takes nothing any more."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None

    def cut(self, address: tuple[str, int]) -> None:
        """End the connection from this address at once; what waits to be sent is dropped."""
        state = self.server.server_state if self.server is not None else None
        for connection in tuple(state.connections) if state is not None else ():
            transport = getattr(connection, "transport", None)
            if getattr(connection, "client", None) == address and transport is not None:
                transport.abort()


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
    app: Starlette,
    listening: socket.socket,
    connections: Connections,
    closing: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until cancelled, then close the connections in order.

    ``closing`` is called first, to end answers that would go on for ever.
    """
    host, port = listening.getsockname()[:2]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    connections.server = server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    log.info("health_listening", url=f"http://{_joined(host, port)}/", port=port)
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        closing()
        server.should_exit = True
        await asyncio.wait({serving})
        raise
