"""The monitor's HTTP side: JSON over the newest view, on the loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from skerry.bus.report import to_json
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

    from starlette.requests import Request

    from skerry.bus.view import RunView

log = structlog.get_logger()


def application(current: Callable[[], RunView | None], run: str) -> Starlette:
    """Return the ASGI application over whatever view ``current`` returns at each request.

    ``/healthz`` says that the monitor works; ``/api/run``, ``/api/learners`` and
    ``/api/evaluations`` answer 503 until the run is in the log.
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
        ]
    )


def _not_yet(run: str) -> JSONResponse:
    error = f"There is no run {run!r} in this log yet: it appears with its first learner."
    return JSONResponse({"error": error}, status_code=503)


class _Server(uvicorn.Server):
    """Leaves the signals to the service shell."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Bind the server's socket; ConfigError with the fix when that is not possible."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        msg = (
            f"Cannot listen on {host}:{port} ({error.strerror or error}): "
            "choose another with --set health.port=…; 0 picks a free one."
        )
        raise ConfigError(msg, path="health.port") from error


async def serve_http(app: Starlette, listening: socket.socket) -> None:
    """Answer requests until cancelled, then close the connections in order."""
    host, port = listening.getsockname()[:2]
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    log.info("health_listening", url=f"http://{host}:{port}/api/run", port=port)
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait({serving})
        raise
