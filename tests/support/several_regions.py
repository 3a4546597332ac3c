"""A cluster like that of ``skerry up``, with a broker for each of several regions.

It lies in its folder as a local cluster does, so that ``skerry chaos`` drills it. The hub is called
``broker``; a region's broker has the region's name and the kind ``region``, and so has the route of
its link to the hub, so that a ``kill`` strikes the one and a ``partition`` the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skerry.cli.cluster.broker import FOREVER, LocalBroker, find_server
from skerry.cli.cluster.cluster import Cluster, ServedBroker, StopSignal, Team, note, prepared
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import ProcessTable
from skerry.cli.cluster.proxy import HOST, Proxy
from skerry.cli.cluster.supervisor import Change, Command, ProcessEvent, Supervisor
from skerry.cli.up import conduct
from skerry.cli.viewer import Screen
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.roles import Grant, Role
from skerry.service.accounts import services_of
from skerry.service.keyring import Keyring
from skerry.service.private import private_file, write_private
from skerry.service.region import begin_region, cache_of, make_cache
from skerry.settings import loading
from skerry.settings.local import NatsSettings, Settings
from skerry_learner.work import find_or_create
from tests.support.nats_server import NatsServer
from tests.support.ports import free_ports


class Hub(LocalBroker):
    """A local cluster's broker that takes leaf nodes; its keys are made before it starts."""

    leaf_port = 0

    def _prepare(self) -> None:
        super()._prepare()
        config = self.folder / "nats.conf"
        text = config.read_text().replace("jetstream {", "jetstream { domain: hub,")
        # A leaf node that hears of this address goes there itself once the proxy cuts its link.
        leaves = f'listen: "{HOST}:{self.leaf_port}", no_advertise: true'
        write_private(config, f"{text}leafnodes {{ {leaves} }}\n")


class HubAndKeys(ServedBroker):
    """The hub, and keys that are there already."""

    async def keys(self, run: str, kinds: Mapping[str, str], shards: int = 1) -> dict[str, Path]:
        del run, shards
        assert self.local is not None
        return {name: self.local.keyring.seed(name).absolute() for name in kinds}


@dataclass(slots=True)
class Regions:
    """A run and its brokers; ``events`` is what became of its processes.

    ``homes`` is the region of each learner. A broker in ``losing`` loses its disk when it dies.
    """

    folder: RunFolder
    settings: Settings
    team: Team
    homes: Mapping[str, str]
    hub: Hub
    proxy: Proxy = field(init=False)
    brokers: ServedBroker = field(init=False)
    leaves: dict[str, NatsServer] = field(default_factory=dict[str, NatsServer])
    events: list[ProcessEvent] = field(default_factory=list[ProcessEvent])
    losing: set[str] = field(default_factory=set[str])
    stop: StopSignal = field(default_factory=lambda: StopSignal(print))

    @property
    def keyring(self) -> Keyring:
        return self.hub.keyring

    @property
    def unasked(self) -> list[str]:
        """The ends of processes that nobody killed, in words."""
        killed = Change.CRASHED, -9
        return [e.summary for e in self.events if e.summary and (e.change, e.code) != killed]

    def learners(self, region: str) -> list[str]:
        return [name for name, home in self.homes.items() if home == region]

    def admin(self) -> NatsBus:
        options = NatsOptions(credentials=self.keyring.seed("admin"))
        return NatsBus(self.hub.url, name="admin", options=options)

    async def make_cache(self, region: str) -> None:
        seed = self.keyring.seed(cache_of(region))
        there = NatsSettings(url=self.leaves[region].url, credentials=seed)
        await make_cache(there, self.keyring.region_of(region))

    async def train(self, script: Awaitable[None]) -> None:
        """Train to the run's end, or until ``stop``, while a script runs beside it."""

        async def beside(*_: object) -> None:
            await script

        settings, folder = prepared(self.settings, self.brokers, self.folder), self.folder
        cluster = Cluster(folder, settings, self.brokers, self.stop, self.proxy)
        with (
            private_file(folder.token, "of no use elsewhere"),
            folder.announced(self.brokers.nats, proxied=True),
            Screen() as screen,
        ):
            await conduct(cluster, screen, team=self.team, script=beside, on_event=self.heard)

    def heard(self, event: ProcessEvent) -> None:
        self.events.append(event)
        if event.change is Change.CRASHED and event.name in self.losing:
            self.losing.remove(event.name)
            shutil.rmtree(self.leaves[event.name].folder / "jetstream")


@contextlib.asynccontextmanager
async def several_regions(
    folder: RunFolder, config: Path, homes: Mapping[str, str], days: int | None = None
) -> AsyncGenerator[Regions]:
    """Yield a run with two syncers at the hub, and a broker with a cache in each region."""
    settings = loading.load(config, ["chaos.allow=true", "health.port=0"])
    team = Team(len(homes), syncers=2, evaluators=0, chaos=True, shards=settings.run.sync.shards)
    regions = Regions(folder, settings, team, homes, Hub(folder.broker, find_server()))
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(folder.held())
        await stack.enter_async_context(laid(regions, days))
        await stack.enter_async_context(served(regions))
        for region, leaf in regions.leaves.items():
            regions.proxy.upstream = (HOST, leaf.port)
            await stack.enter_async_context(regions.proxy.serving(regions.learners(region)))
        regions.proxy.upstream = (HOST, regions.hub.port)
        services = team.kinds().keys() - homes.keys()
        await stack.enter_async_context(regions.proxy.serving(services))
        async with regions.admin() as admin:
            await find_or_create(admin, folder.run, settings.run)
        for region in regions.leaves:
            await regions.make_cache(region)
        yield regions


@contextlib.asynccontextmanager
async def laid(regions: Regions, days: int | None) -> AsyncGenerator[None]:
    """Write keys and configurations of all brokers, and listen for their links to the hub."""
    run, hub, homes, team = regions.folder.run, regions.hub, regions.homes, regions.team
    hub.keyring = keyring = Keyring.begun(hub.keyring.folder, days)
    kinds = team.kinds().items()
    services = (Grant(Role(kind), name, run, team.shards) for name, kind in kinds)
    grants = {g.name: g for g in (*services_of(run, team.shards), *services)}
    keyring.add(*(grant for name, grant in grants.items() if name not in homes))
    names = sorted({*homes.values()})
    hub.leaf_port, *ports = free_ports(1 + len(names))
    regions.proxy = Proxy(hub.leaf_port)
    async with regions.proxy.serving(names):
        for region, port in zip(names, ports, strict=True):
            grant = Grant(Role.REGION, region, run, team.shards)
            link = f"nats-leaf://{HOST}:{regions.proxy.ports[region]}"
            there = begin_region(keyring, grant, regions.learners(region), link).absolute()
            text = (there / "nats.conf").read_text().replace("/data", str(there))
            leaf = NatsServer(there, settings=text, port=port, jetstream=False)
            regions.leaves[region] = leaf
        yield


@contextlib.asynccontextmanager
async def served(regions: Regions) -> AsyncGenerator[None]:
    """Run the brokers."""
    hub, table = regions.hub, ProcessTable(regions.folder.processes)
    leaves = [
        Command(name, "region", ("env", "-C", str(at.folder), *at.command()), at.log, os.environ)
        for name, at in regions.leaves.items()
    ]
    kinds = {command.name: command.kind for command in (hub.command(), *leaves)}

    def on_event(event: ProcessEvent) -> None:
        note(table, kinds[event.name], event)
        regions.heard(event)

    kept = Supervisor([leaves, [hub.command()]], on_event, FOREVER)
    async with kept.running():
        nats = NatsSettings(url=hub.url, credentials=hub.credentials)
        regions.brokers = HubAndKeys(nats, table, kept, hub.monitor_url, hub)
        yield
