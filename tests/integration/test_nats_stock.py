"""With a nats-py that is none of the tested versions all goes on, on its own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from nats.aio.client import Client

from skerry.log.nats import fast
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.connection import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.log import all_of, specs, take
from tests.support.nats_server import NatsServer

pytestmark = [pytest.mark.nats, pytest.mark.fault]


@pytest.fixture
async def bus(
    nats_server: NatsServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NatsBus]:
    monkeypatch.setattr(fast, "version", lambda _: "2.99.0")
    options = NatsOptions(request_timeout_s=1.0, patience_s=20.0)
    async with NatsBus(nats_server.url, options=options) as bus:
        assert type((await bus._connection.ready(None)).client) is Client
        await bus.declare(specs(run_id))
        yield bus


async def test_publishing_and_following_pass_a_restart(
    nats_server: NatsServer, bus: NatsBus, run_id: str
) -> None:
    names = Subjects(run_id)
    async with aclosing(bus.follow(names.commit())) as records:
        reading = asyncio.ensure_future(take(records, 60))
        for i in range(60):
            await bus.publish(names.commit(0), b"%d" % i, msg_id=f"0/{i}")
            if i == 30:
                nats_server.restart()
        found = await reading
    assert [int(record.payload) for record in found] == list(range(60))


async def test_large_messages_come_in_bulk(bus: NatsBus, run_id: str) -> None:
    names = Subjects(run_id)
    sent = [bytes([i]) * 500_000 for i in range(40)]
    wanted = [
        (await bus.publish(names.chunk(0, 0, i), payload)).sequence
        for i, payload in enumerate(sent)
    ]
    found = await all_of(bus.get_each(names.chunk(0, 0), wanted))
    assert [record.payload for record in found] == sent
