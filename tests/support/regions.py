"""A region of real brokers: a hub with the shipped configuration, and the leaf node of a region."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.roles import Grant, Role
from skerry.service.accounts import services_of
from skerry.service.keyring import Keyring
from skerry.service.region import begin_region, cache_of, make_cache
from skerry.settings.local import NatsSettings
from tests.support.keyed import mount_keys
from tests.support.nats_server import NatsServer
from tests.support.ports import free_ports

INFRA = Path(__file__).parents[2] / "infra" / "nats"


@dataclass(frozen=True, slots=True)
class Region:
    """The brokers of a hub, and that of one region, eu, with a learner eu-0."""

    keyring: Keyring
    hubs: tuple[NatsServer, ...]
    leaf: NatsServer

    @property
    def hub(self) -> NatsServer:
        return self.hubs[0]

    def bus(self, server: NatsServer, name: str, options: NatsOptions | None = None) -> NatsBus:
        seed = self.keyring.seed(name)
        login = replace(options or NatsOptions(), credentials=seed)
        servers = self.hubs if server in self.hubs else (server,)
        return NatsBus(",".join(each.url for each in servers), name=name, options=login)

    def learner(self, options: NatsOptions | None = None) -> NatsBus:
        return self.bus(self.leaf, "eu-0", options)

    async def make_cache(self, *, standby: bool = False) -> None:
        seed = self.keyring.seed(cache_of("eu"))
        there = NatsSettings(url=self.leaf.url, credentials=seed)
        await make_cache(there, self.keyring.region_of("eu"), standby=standby)

    async def until_whole(self) -> None:
        """Start every broker of the hub, and return once each has all that it should hold."""
        for hub in self.hubs:
            hub.start()
        async with asyncio.timeout(60.0):
            while not all(asked(hub, "healthz").get("status") == "ok" for hub in self.hubs):  # noqa: ASYNC110 - health sends no event
                await asyncio.sleep(0.05)

    def linked(self) -> NatsServer:
        """Return the broker of the hub that the region's link is with."""
        (hub,) = [hub for hub in self.hubs if hub.running and asked(hub, "leafz").get("leafnodes")]
        return hub


def asked(hub: NatsServer, what: str) -> dict[str, Any]:
    """Return what a broker's monitoring says, nothing where it does not answer well."""
    try:
        return dict(httpx.get(f"{hub.monitor_url}/{what}", timeout=1.0).json())
    except (httpx.HTTPError, ValueError):
        return {}


@contextmanager
def region_of(
    folder: Path,
    run: str,
    learners: Sequence[str] = ("eu-0",),
    *,
    days: int | None = None,
    certificate: Path | None = None,
    trusted: Path | None = None,
    brokers: int = 1,
) -> Generator[Region]:
    """Run a hub of one broker or three, and the broker of its region eu; us-0 is at the hub.

    Keys expire after ``days``, if ever. A hub with a ``certificate`` speaks TLS alone, and the
    region takes what ``trusted`` vouches for.
    """
    free = free_ports(2 * brokers)
    ports, routes = tuple(free[:brokers]), tuple(free[brokers:])
    keyring = Keyring.begun(folder / "keys", days)
    keyring.add(*services_of(run), Grant(Role.LEARNER, "us-0", run))
    scheme = "tls" if certificate else "nats-leaf"
    links = ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports)
    eu, authority = Grant(Role.REGION, "eu", run), str(trusted or "")
    there = begin_region(keyring, eu, learners, links, authority)
    hubs: list[NatsServer] = []
    for number, port in enumerate(ports):
        at = folder / ("hub" if brokers == 1 else f"hub-{number}")
        mount_keys(keyring, at)
        alone = (INFRA / "nats.conf").read_text().replace("/data", str(at))
        (at / "alone.conf").write_text(alone.replace(":8222", ":-1"))
        text = settings_of(certificate, port) if brokers == 1 else one_of(number, routes, port)
        text = text.replace('"nats.conf"', '"alone.conf"')
        hubs.append(NatsServer(at, settings=text, jetstream=False, monitored=True))
    shipped = (there / "nats.conf").read_text()
    leaf = NatsServer(there, settings=shipped.replace("/data", str(there)), jetstream=False)
    try:
        for server in (*hubs, leaf):
            server.start()
        yield Region(keyring, tuple(hubs), leaf)
    finally:
        for server in (leaf, *hubs):
            server.kill()


def settings_of(certificate: Path | None, port: int) -> str:
    """Return the configuration of a hub of one broker, as it is shipped."""
    text = (INFRA / ("tls.conf" if certificate else "hub.conf")).read_text()
    text = text.replace("0.0.0.0:7422", f"127.0.0.1:{port}")
    return text if certificate is None else text.replace("/certs", str(certificate.parent))


def one_of(number: int, routes: Sequence[int], port: int) -> str:
    """Return the configuration of one of three brokers: the shipped one, and its leaf nodes."""
    known = [f"nats://route:x@127.0.0.1:{route}" for route in routes]
    text = (INFRA / "cluster.conf").read_text()
    text = text.replace("0.0.0.0:6222", f"127.0.0.1:{routes[number]}")
    text = text.replace("$NATS_NAME", f"hub-{number}").replace("$ROUTE_PASSWORD", '"x"')
    leaves = settings_of(None, port).partition('include "nats.conf"')[2]
    return text.replace("$NATS_ROUTES", json.dumps(known)) + leaves
