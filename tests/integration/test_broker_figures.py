"""What a real nats-server tells of itself, and what is told of one that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.log.base import Storage
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.subjects import Subjects
from skerry.telemetry import metrics
from skerry_health_monitor.metrics.broker import LIES, Brokers, lost
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

DEADLINE_S = 20.0


@pytest.fixture
def local(tmp_path: Path) -> Iterator[NatsServer]:
    broker = NatsServer(tmp_path / "broker", monitored=True)
    broker.start()
    yield broker
    broker.stop()


async def test_a_broker_reports_its_clients_its_store_and_its_slowest_reader(
    local: NatsServer,
) -> None:
    names = Subjects("r")
    brokers = Brokers([local.monitor_url])
    async with NatsBus(local.url) as bus:
        await bus.declare(specs("r", window_bytes=2**20))
        for number in range(1000):
            await bus.publish(names.pulse(f"l{number}"), b"x" * 100)
        reading = bus.follow(names.pulse())
        await anext(reading)
        await brokers.poll()
        (server,) = brokers.servers()
        await reading.aclose()
    assert server.up
    assert server.name == local.monitor_url.removeprefix("http://")
    found = {(p.metric, *p.labels[1:]): p.value for p in server.figures}
    rooms = {room.storage: room for room in server.rooms}
    assert found[metrics.BROKER_CONNECTIONS,] >= 1
    assert found[metrics.BROKER_MESSAGES, "in"] >= 1000
    assert found[metrics.BROKER_IO, "in"] >= 1000 * 100
    assert found[metrics.BROKER_MEMORY,] > 2**20
    assert rooms[Storage.MEMORY].used_bytes > 1000 * 100
    assert rooms[Storage.FILE].limit_bytes > 2**20
    assert 0 < server.lags[names.stream("PULSE")] < 1000
    assert server.lags[names.stream("LEDGER")] == 0


SMALL = """
jetstream { max_file_store: 1MB, max_memory_store: 1MB }
accounts { A { jetstream: {max_file: 900KB, max_mem: 1MB}, users: [{user: a, password: p}] } }
"""


async def test_a_broker_and_an_account_report_how_full_they_are_and_their_limits(
    tmp_path: Path,
) -> None:
    small = NatsServer(tmp_path / "broker", settings=SMALL, monitored=True)
    small.start()
    brokers = Brokers([small.monitor_url])
    try:
        async with NatsBus(small.url, options=NatsOptions(user="a", password="p")) as bus:  # noqa: S106
            await bus.declare(specs("r", window_bytes=2**16))
            await bus.publish(Subjects("r").ledger("run"), b"x" * 860_000)
            own = {room.storage: room for room in await bus.rooms()}
        await brokers.poll()
    finally:
        small.stop()
    theirs = {room.storage: room for room in brokers.servers()[0].rooms}
    assert own[Storage.FILE].limit_bytes == 900 * 1024
    assert theirs[Storage.FILE].limit_bytes == own[Storage.MEMORY].limit_bytes == 2**20
    assert own[Storage.FILE].used_bytes > 860_000
    assert own[Storage.MEMORY].used_bytes == 0


async def test_a_broker_that_is_away_is_reported_once_and_found_again_at_its_port(
    local: NatsServer,
) -> None:
    brokers = Brokers([local.monitor_url])
    local.kill()
    with capture_logs() as said:
        for _ in range(2):
            await brokers.poll()
    assert [server.up for server in brokers.servers()] == [False]
    assert [line["event"] for line in said] == ["broker_figures_missing"]
    local.start()
    await brokers.poll()
    assert [server.up for server in brokers.servers()] == [True]


async def test_an_address_that_answers_something_else_is_a_broker_that_is_down(
    local: NatsServer,
) -> None:
    brokers = Brokers([local.monitor_url + "/healthz?", local.url.replace("nats", "http")])
    await brokers.poll()
    assert [server.up for server in brokers.servers()] == [False, False]


async def test_a_broker_knows_at_once_whose_connection_is_gone(local: NatsServer) -> None:
    brokers = Brokers([local.monitor_url])
    names = {"here", "away", "never"}
    async with NatsBus(local.url, name="here"):
        async with NatsBus(local.url, name="away"):
            assert await brokers.lost(names) == {}
        found: dict[str, float] = {}
        async with asyncio.timeout(DEADLINE_S):
            while not found:
                found = await brokers.lost(names)
        assert found.keys() == {"away"}
        assert 0 <= found["away"] < DEADLINE_S
        async with NatsBus(local.url, name="away"):
            assert await brokers.lost(names) == {}
        deaf = Brokers([local.monitor_url, "http://127.0.0.1:9"])
        assert await deaf.lost(names) == {}


@pytest.mark.parametrize(
    "told",
    [
        {"connections": ["x"], "now": "2026-11-22T10:00:00Z"},
        {"connections": [{"name": "a", "stop": "yesterday"}], "now": "2026-11-22T10:00:00Z"},
        {"connections": [{"name": "a", "stop": "2026-11-22T10:00:00"}], "now": 3},
        {"connections": 7},
        {},
    ],
)
def test_a_broker_that_lies_about_connections_raises_what_is_expected(told: dict[str, Any]) -> None:
    with pytest.raises(LIES):
        lost([(told, {"connections": []})], {"a"})
    if told.get("connections") in (["x"], 7, None):
        with pytest.raises(LIES):
            lost([({"connections": [], "now": "2026-11-22T10:00:00Z"}, told)], {"a"})
