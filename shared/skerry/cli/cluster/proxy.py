"""A TCP proxy between each service of a local cluster and its broker, for faults of the network.

``skerry up`` runs it and hands on these commands of its control socket: ``{"op": "set", "route":
NAME, "cut": "none|reset|blackhole", "delay_s": S, "rate_bytes_s": R, "ways": ["up", "down"]}`` and
``{"op": "open"}``, which opens every route. All it knows of NATS is how to keep from a service
where else it might go.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skerry.cli.cluster.relay import OPEN, Cut, LinkShape, Relay, RelayEnd, Route, Way
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping


def can_proxy(url: str) -> bool:
    """Return True if a proxy can stand in for a broker: one address, in the clear."""
    return "," not in url and urlsplit(url).scheme == "nats"


class Proxy:
    """The routes of one cluster; ``ports`` are where they listen, by service."""

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.routes: dict[str, Route] = {}
        self.ports: dict[str, int] = {}
        self._dials: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, hosts: Mapping[str, str]) -> AsyncGenerator[None]:
        """Listen for every service on its host, at any free port, while the context lasts."""
        servers: list[asyncio.Server] = []
        loop = asyncio.get_running_loop()
        try:
            for name, host in hosts.items():
                route = self.routes[name] = Route(name)
                server = await loop.create_server(partial(self._accept, route), host, 0)
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
                for relay in tuple(route.relays):
                    relay.abort()

    def set(self, name: object, shape: LinkShape) -> dict[str, Any]:
        """Shape a service's route and return its counters; ConfigError if there is no such one."""
        if not isinstance(name, str) or name not in self.routes:
            msg = f"There is no route {name!r}: use one of {', '.join(sorted(self.routes))}."
            raise ConfigError(msg, path="route")
        self.routes[name].set(shape)
        return shown(self.routes[name])

    def open_all(self) -> list[str]:
        """Let every route pass everything, and return those that did not."""
        shaped = [name for name, route in self.routes.items() if not route.shape.free]
        for name in shaped:
            self.routes[name].set(OPEN)
        return sorted(shaped)

    def show(self) -> dict[str, dict[str, Any]]:
        """Return shape and counters of every route."""
        return {name: shown(route) for name, route in self.routes.items()}

    def _accept(self, route: Route) -> RelayEnd:
        return Relay(route, self._dial).service

    def _dial(self, relay: Relay) -> None:
        task = asyncio.get_running_loop().create_task(self._dialled(relay), name="dial")
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dialled(self, relay: Relay) -> None:
        try:
            await asyncio.get_running_loop().create_connection(lambda: relay.broker, *self.upstream)
        except OSError:  # the service sees what it would see without us: nobody listens
            relay.abort()


def shape_from(request: Mapping[str, Any]) -> LinkShape:
    """Return the shape that a command asks for; ConfigError says what is wrong with it."""
    try:
        shape = LinkShape(
            delay_s=float(request.get("delay_s", 0.0)),
            rate_bytes_s=float(request.get("rate_bytes_s", 0.0)),
            cut=Cut(request.get("cut", Cut.NONE)),
            ways=frozenset(Way(way) for way in request.get("ways", tuple(Way))),
        )
    except (TypeError, ValueError) as error:
        msg = f"This is no shape of a route ({error}): see the head of {__name__}."
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
        "connections": len(route.relays),
        "accepted": route.accepted,
        "refused": route.refused,
        "aborted": route.aborted,
        "bytes_up": route.bytes_up,
        "bytes_down": route.bytes_down,
        "shaped_bytes": route.shaped_bytes,
        "stalled_bytes": route.stalled_bytes,
    }
