"""The logs that the contract holds for: memory, a real nats-server, and three that replicate."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import pytest

from skerry.log.base import Bus, StreamInfo, StreamSpec
from skerry.log.memory import MemoryBroker
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.log import REAL_LOGS, specs
from tests.support.nats_cluster import NatsCluster
from tests.support.raw_nats import forget_streams

OPTIONS = NatsOptions(connect_timeout_s=5.0, request_timeout_s=5.0)


class Replicated(NatsBus):
    """Declares every stream with a replica on each of three servers, and does not show it."""

    async def declare(self, specs: Sequence[StreamSpec]) -> tuple[str, ...]:
        return await super().declare([replace(spec, replicas=3) for spec in specs])

    async def streams(self) -> list[StreamInfo]:
        found = await super().streams()
        return [replace(info, spec=replace(info.spec, replicas=1)) for info in found]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers; every stream of these tests has a replica on each."""
    with NatsCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(params=("memory", *REAL_LOGS))
async def bus(request: pytest.FixtureRequest) -> AsyncIterator[Bus]:
    async with await client(request, request.param) as connected:
        yield connected
        if isinstance(connected, Replicated):
            cluster: NatsCluster = request.getfixturevalue("cluster")
            await cluster.ready()
            await forget_streams(cluster.url)


async def client(request: pytest.FixtureRequest, kind: str) -> Bus:
    """Return a client of the same log; ``async with`` connects it."""
    if kind == "memory":
        return request.getfixturevalue("memory_broker").connect()
    if kind == "nats":
        return NatsBus(request.getfixturevalue("shared_nats").url, options=OPTIONS)
    cluster: NatsCluster = request.getfixturevalue("cluster")
    await cluster.ready()
    return Replicated(cluster.url, options=OPTIONS)


@pytest.fixture
def memory_broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def stranger(request: pytest.FixtureRequest, bus: Bus) -> AsyncIterator[Bus]:
    """Another process's client of the same log."""
    kind = {"MemoryBus": "memory", "NatsBus": "nats", "Replicated": "cluster"}[type(bus).__name__]
    async with await client(request, kind) as connected:
        yield connected


@pytest.fixture
async def names(bus: Bus, run_id: str) -> Subjects:
    """The subjects of a run whose streams are declared."""
    await bus.declare(specs(run_id))
    return Subjects(run_id)
