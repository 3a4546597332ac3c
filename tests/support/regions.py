"""A region of real brokers: a hub with the shipped configuration, and the leaf node of a region."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.roles import Grant, Role
from skerry.service.accounts import services_of
from skerry.service.keyring import Keyring
from skerry.service.region import begin_region, cache_of, make_cache
from skerry.settings.local import NatsSettings
from tests.support.keyed import mount_keys
from tests.support.nats_cluster import free_ports
from tests.support.nats_server import NatsServer

INFRA = Path(__file__).parents[2] / "infra" / "nats"


@dataclass(frozen=True, slots=True)
class Region:
    """A hub and the broker of one region, eu, with a learner eu-0."""

    keyring: Keyring
    hub: NatsServer
    leaf: NatsServer

    def bus(self, server: NatsServer, name: str, options: NatsOptions | None = None) -> NatsBus:
        seed = self.keyring.seed(name)
        login = replace(options or NatsOptions(), credentials=seed)
        return NatsBus(server.url, name=name, options=login)

    def learner(self, options: NatsOptions | None = None) -> NatsBus:
        return self.bus(self.leaf, "eu-0", options)

    async def make_cache(self, *, standby: bool = False) -> None:
        seed = self.keyring.seed(cache_of("eu"))
        there = NatsSettings(url=self.leaf.url, credentials=seed)
        await make_cache(there, self.keyring.region_of("eu"), standby=standby)


@contextmanager
def region_of(
    folder: Path,
    run: str,
    learners: Sequence[str] = ("eu-0",),
    *,
    days: int | None = None,
    certificate: Path | None = None,
    trusted: Path | None = None,
) -> Generator[Region]:
    """Run a hub, and the broker of its region eu; us-0 is a learner at the hub.

    Keys expire after ``days``, if ever. A hub with a ``certificate`` speaks TLS alone, and the
    region takes what ``trusted`` vouches for.
    """
    (port,) = free_ports(1)
    keyring = Keyring.begun(folder / "keys", days)
    keyring.add(*services_of(run), Grant(Role.LEARNER, "us-0", run))
    hub_url = f"{'tls' if certificate else 'nats-leaf'}://127.0.0.1:{port}"
    eu, authority = Grant(Role.REGION, "eu", run), str(trusted or "")
    there = begin_region(keyring, eu, learners, hub_url, authority)
    mount_keys(keyring, folder / "hub")
    alone = (INFRA / "nats.conf").read_text().replace("/data", str(folder / "hub"))
    (folder / "hub" / "alone.conf").write_text(alone.replace(":8222", ":-1"))
    taking = (INFRA / ("tls.conf" if certificate else "hub.conf")).read_text()
    taking = taking.replace('"nats.conf"', '"alone.conf"')
    taking = taking.replace("0.0.0.0:7422", f"127.0.0.1:{port}")
    if certificate is not None:
        taking = taking.replace("/certs", str(certificate.parent))
    hub = NatsServer(folder / "hub", settings=taking, jetstream=False)
    shipped = (there / "nats.conf").read_text()
    leaf = NatsServer(there, settings=shipped.replace("/data", str(there)), jetstream=False)
    hub.start()
    leaf.start()
    try:
        yield Region(keyring, hub, leaf)
    finally:
        leaf.kill()
        hub.kill()
