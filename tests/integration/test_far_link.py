"""A far link is filled: as much is on its way as a round trip takes, both ways."""

from __future__ import annotations

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.cluster.proxy import Proxy, shape_from
from skerry.log.contributions import SEND_LEAST, Sender
from skerry.log.nats import follow
from skerry.log.nats.bus import NatsBus
from skerry.protocol.subjects import Subjects
from tests.support.builders import header
from tests.support.learners import encode_vector, walk
from tests.support.log import specs
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

RUN = "t"
PLAN = plan([LeafSpec("w", (1024, 1024))], 1)
CHUNK_BYTES = 32_768
DELAY_S = 0.05


async def test_what_is_on_its_way_follows_the_round_trip_up_and_down(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "BULK_BYTES", (2 * CHUNK_BYTES, 4 * CHUNK_BYTES, 2**25))
    proxy = Proxy(nats_server.port)
    chunks = list(encode_vector("bf16", walk(PLAN.fragments[0], 0), CHUNK_BYTES))
    most = 0
    asked = follow.Flow.more

    def more(flow: follow.Flow) -> int:
        nonlocal most
        number = asked(flow)
        most = max(most, flow._coming)
        return number

    monkeypatch.setattr(follow.Flow, "more", more)
    async with proxy.serving("a"), NatsBus(f"nats://127.0.0.1:{proxy.ports['a']}") as bus:
        await bus.declare(specs(RUN))
        proxy.set("a", shape_from({"delay_s": DELAY_S}))
        sender = Sender(bus, RUN, PLAN)
        await sender.send(header(fragment=0), chunks)
        assert sender.window.size >= 4 * SEND_LEAST
        subject = Subjects(RUN).shard(0).contribution(0, header(fragment=0).learner)
        read = [record async for record in bus.get_each(subject, range(1, len(chunks) + 1))]
    assert len(read) == len(chunks)
    assert most > 8
