"""A TCP proxy between each service of a local cluster and its broker, for faults of the network.

Run as a child of ``skerry up``: ``python -m skerry.cli.cluster.proxy BROKER SOCKET
NAME=HOST:PORT...``. It prints the port of every service as one line of JSON once it listens (port
0: any that is free), and then obeys the socket: ``{"op": "set", "route": NAME, "cut":
"none|reset|blackhole", "delay_s": S, "rate_bytes_s": R, "ways": ["up", "down"]}``,
``{"op": "show"}`` and ``{"op": "heal"}``. It starts open, and all it knows of NATS is how to keep
from a service where else it might go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skerry.cli.cluster.link import OPEN, Cut, End, Link, Route, Shape, Way
from skerry.errors import ConfigError
from skerry.service.control import listening

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping


class Proxy:
    """The routes of one cluster; ``ports`` are where they listen, by service."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.routes: dict[str, Route] = {}
        self.ports: dict[str, int] = {}
        self._dials: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, wanted: Mapping[str, tuple[str, int]]) -> AsyncGenerator[None]:
        """Listen for every service at its address for as long as the context lasts."""
        servers: list[asyncio.Server] = []
        loop = asyncio.get_running_loop()
        try:
            for name, (host, port) in wanted.items():
                route = self.routes[name] = Route(name)
                accept = partial(self._accept, route)
                server = await loop.create_server(accept, host, port)
                servers.append(server)
                self.ports[name] = server.sockets[0].getsockname()[1]
            yield
        finally:
            for server in servers:
                server.close()
            for task in tuple(self._dials):
                task.cancel()
            await asyncio.gather(*self._dials, return_exceptions=True)
            for route in self.routes.values():
                for link in tuple(route.links):
                    link.abort()

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one command; ConfigError for one that does not exist."""
        match request.get("op"):
            case "set":
                route = self._route(request.get("route"))
                route.set(shape_from(request))
                return shown(route)
            case "heal":
                shaped = {n: route for n, route in self.routes.items() if not route.shape.free}
                for route in shaped.values():
                    route.set(OPEN)
                return {"opened": sorted(shaped)}
            case "show":
                return {"routes": {name: shown(route) for name, route in self.routes.items()}}
            case op:
                msg = f"There is no command {op!r}: use set, heal or show."
                raise ConfigError(msg, path="op")

    def _route(self, name: object) -> Route:
        if not isinstance(name, str) or name not in self.routes:
            msg = f"There is no route {name!r}: use one of {', '.join(sorted(self.routes))}."
            raise ConfigError(msg, path="route")
        return self.routes[name]

    def _accept(self, route: Route) -> End:
        return Link(route, self._dial).service

    def _dial(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(self._dialled(link), name="dial")
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dialled(self, link: Link) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: link.broker, *self.upstream)
        except OSError:  # the service sees what it would see without us: nobody listens
            link.abort()


def shape_from(request: Mapping[str, Any]) -> Shape:
    """Return the shape that a command asks for; ConfigError says what is wrong with it."""
    try:
        shape = Shape(
            delay_s=float(request.get("delay_s", 0.0)),
            rate_bytes_s=float(request.get("rate_bytes_s", 0.0)),
            cut=Cut(request.get("cut", Cut.NONE)),
            ways=frozenset(Way(way) for way in request.get("ways", tuple(Way))),
        )
    except (TypeError, ValueError) as error:
        msg = f"This is no shape of a route ({error}): see the head of skerry.cli.cluster.proxy."
        raise ConfigError(msg, path="cut") from error
    for name in ("delay_s", "rate_bytes_s"):
        value = getattr(shape, name)
        if not math.isfinite(value) or value < 0:
            msg = f"{name} is {value}: give a finite number, 0 or more."
            raise ConfigError(msg, path=name)
    return shape


def shown(route: Route) -> dict[str, Any]:
    """Return a route's shape and counters as plain types."""
    return {
        "cut": route.shape.cut.value,
        "delay_s": route.shape.delay_s,
        "rate_bytes_s": route.shape.rate_bytes_s,
        "connections": len(route.links),
        "accepted": route.accepted,
        "refused": route.refused,
        "aborted": route.aborted,
        "bytes_up": route.bytes_up,
        "bytes_down": route.bytes_down,
        "shaped_bytes": route.shaped_bytes,
        "stalled_bytes": route.stalled_bytes,
    }


async def run(broker: str, control: Path, wanted: Mapping[str, tuple[str, int]]) -> None:
    """Serve until SIGTERM."""
    proxy, stop = Proxy(*_address(broker)), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with proxy.serving(wanted), listening(control, proxy.answer):
        print(json.dumps(proxy.ports), flush=True)
        await stop.wait()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    broker, control, *routes = sys.argv[1:]
    wanted = {name: _address(at) for name, _, at in (route.partition("=") for route in routes)}
    asyncio.run(run(broker, Path(control), wanted))


if __name__ == "__main__":
    main()
