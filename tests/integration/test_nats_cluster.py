"""NatsBus on three servers that replicate: elections, lagging replicas, lost nodes and messages."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable, Conflict, StateLost, StorageFull
from skerry.log.base import Deliver, Expect
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.log import DEADLINE_S, newest, specs, stored, take
from tests.support.nats_cluster import NatsCluster
from tests.support.nats_server import NatsServer
from tests.support.raw_nats import js_api

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path / "cluster") as running:
        yield running


@pytest.fixture
def names(run_id: str) -> Subjects:
    return Subjects(run_id)


@pytest.fixture
async def bus(cluster: NatsCluster, names: Subjects) -> AsyncIterator[NatsBus]:
    """A bus that knows every node, with the run's streams on all of them."""
    await cluster.ready()
    async with NatsBus(
        cluster.url, options=NatsOptions(request_timeout_s=2.0, patience_s=DEADLINE_S)
    ) as bus:
        await bus.declare(specs(names.run, replicas=3))
        for spec in specs(names.run):
            await cluster.until_current(spec.name)
        yield bus


async def test_writes_and_followers_pass_the_death_of_a_leader_once_each(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    total = 90
    leader = cluster.nodes[await cluster.leader(names.stream("LEDGER"))]

    async def write() -> None:
        for i in range(total):
            await bus.publish(names.commit(0), b"%d" % i, msg_id=f"0/{i}")
            if i == total // 3:
                leader.kill9()

    async with aclosing(bus.follow(names.commit())) as records:
        reading = asyncio.ensure_future(take(records, total))
        await write()
        found = await reading
    assert [int(record.payload) for record in found] == list(range(total))
    assert [record.sequence for record in found] == list(range(1, total + 1))


async def test_compare_and_set_counts_through_the_death_of_a_leader(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    """Three writers count together; a write that was acknowledged counts, any other does not."""
    subject, each = names.shard(0).fence(), 20
    leader = cluster.nodes[await cluster.leader(names.shard(0).stream("STATE"))]
    won: list[int] = []

    async def count(writer: str) -> None:
        mine = 0
        while mine < each:
            held = await bus.last(subject)
            value = int(held.payload) + 1 if held else 1
            expect = Expect(subject, held.sequence if held else 0)
            try:
                await bus.publish(subject, b"%d" % value, msg_id=f"{writer}/{mine}", expect=expect)
            except Conflict:
                continue
            won.append(value)
            mine += 1
            if len(won) == each:
                leader.kill9()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(count(writer) for writer in "abc"))
    assert sorted(won) == list(range(1, 3 * each + 1))


async def test_a_replica_that_lags_is_not_believed(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    """Direct gets alone read 13, 65 and 297 here, between and after reads of the newest."""
    stream, count = names.stream("LEDGER"), 1500
    lagging = cluster.nodes[(await cluster.leader(stream) + 1) % 3]
    async with NatsBus(others(cluster, lagging)) as writer, NatsBus(lagging.url) as reader:
        lagging.pause()
        for i in range(1, count + 1):
            await writer.publish(names.commit(0), bytes(20_000), msg_id=f"0/{i}")
        asking = [asyncio.ensure_future(reader.last(names.commit(0))) for _ in range(40)]
        asking += [asyncio.ensure_future(reader.get(stream, count)) for _ in range(40)]
        listing = [asyncio.ensure_future(reader.last_each(names.commit())) for _ in range(40)]
        await asyncio.sleep(0.1)
        lagging.resume()
        async with asyncio.timeout(DEADLINE_S):
            found = await asyncio.gather(*asking)
            found += [record for records in await asyncio.gather(*listing) for record in records]
    assert {record.sequence if record else None for record in found} == {count}


def others(cluster: NatsCluster, without: NatsServer) -> str:
    return ",".join(node.url for node in cluster.nodes if node is not without)


@pytest.mark.soak
async def test_a_client_leaves_a_server_that_hangs(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    frozen = cluster.nodes[(await cluster.leader(names.stream("LEDGER")) + 1) % 3]
    events: list[str] = []
    options = NatsOptions(
        patience_s=DEADLINE_S, on_event=lambda event, _fields: events.append(event)
    )
    async with NatsBus(frozen.url, options=options) as client:
        frozen.pause()
        await client.publish(names.commit(0), b"x", msg_id="0/1")
        frozen.resume()
    assert events[-1] == "reconnected"
    await stored(bus, names.stream("LEDGER"), 1)
    assert await bus.get(names.stream("LEDGER"), 2) is None


@pytest.mark.soak
async def test_pulses_in_memory_survive_the_loss_of_one_node(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    await bus.publish(names.pulse("a"), b"here", msg_id="a")
    cluster.nodes[await cluster.leader(names.stream("PULSE"))].kill9()
    record = await newest(bus, names.pulse("a"))
    assert record.payload == b"here"


@pytest.mark.soak
async def test_a_memory_stream_that_all_nodes_have_lost_is_followed_from_its_start(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    for i in range(5):
        await bus.publish(names.pulse("a"), b"old %d" % i, msg_id=f"{i}")
    follower = bus.follow(names.pulse(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower) as records:
        await take(records, 1)
        waiting = asyncio.ensure_future(take(records, 1))
        cluster.kill9()
        cluster.start()
        await bus.publish(names.pulse("a"), b"new", msg_id="new")
        assert [r.payload for r in await waiting] == [b"new"]


@pytest.mark.soak
async def test_a_memory_stream_without_replicas_is_there_again_with_its_node(
    cluster: NatsCluster, names: Subjects
) -> None:
    await cluster.ready()
    async with NatsBus(
        cluster.url, options=NatsOptions(request_timeout_s=2.0, patience_s=DEADLINE_S)
    ) as bus:
        await bus.declare([s for s in specs(names.run) if s.name.endswith("PULSE")])
        await bus.publish(names.pulse("a"), b"old", msg_id="old")
        holder = cluster.nodes[await cluster.leader(names.stream("PULSE"))]
        holder.restart()
        await bus.publish(names.pulse("a"), b"new", msg_id="new")
        record = await newest(bus, names.pulse("a"))
    assert record.payload == b"new"


@pytest.mark.soak
async def test_a_cluster_without_a_majority_says_what_to_bring_back(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    receipt = await bus.publish(names.commit(0), b"kept", msg_id="0/1")
    for node in cluster.nodes[:2]:
        node.kill9()
    async with NatsBus(
        cluster.nodes[2].url, options=NatsOptions(request_timeout_s=1.0, patience_s=3.0)
    ) as client:
        with pytest.raises(BrokerUnavailable, match=r"bring back the nodes.*more than half"):
            await client.publish(names.commit(0), b"no", msg_id="0/2")
    cluster.start()
    record = await stored(bus, names.stream("LEDGER"), receipt.sequence)
    assert record.payload == b"kept"  # the other one may be stored after all


@pytest.mark.soak
async def test_a_cluster_that_came_back_with_an_older_copy_is_found_out(
    cluster: NatsCluster, run_id: str
) -> None:
    await cluster.ready()
    names = Subjects(run_id)
    async with NatsBus(
        cluster.url, options=NatsOptions(request_timeout_s=2.0, patience_s=15.0)
    ) as bus:
        await bus.declare(specs(run_id, replicas=3))
        await bus.publish(names.commit(0), b"old", msg_id="0/1")
        await cluster.until_current(names.stream("LEDGER"))
        cluster.kill9()
        for node in cluster.nodes:
            shutil.copytree(node.store, node.folder / "older")
        cluster.start()
        await bus.publish(names.commit(0), b"acknowledged", msg_id="0/2")
        cluster.kill9()
        for node in cluster.nodes:
            shutil.rmtree(node.store)
            (node.folder / "older").rename(node.store)
        cluster.start()
        with pytest.raises(StateLost, match=r"ends at sequence 1.*acknowledged 2.*sync_interval"):
            await bus.last_each(names.commit())


@pytest.mark.soak
async def test_more_replicas_than_nodes_wait_for_the_missing_ones(
    cluster: NatsCluster, run_id: str
) -> None:
    await cluster.ready()
    wanted = specs(run_id, replicas=3)
    cluster.nodes[2].kill9()
    async with NatsBus(
        cluster.url, options=NatsOptions(request_timeout_s=1.0, patience_s=4.0)
    ) as bus:
        with pytest.raises(BrokerUnavailable, match=r"bring back the nodes.*log\.replicas"):
            await bus.declare([replace(spec, replicas=5) for spec in wanted])
        cluster.start()
        await cluster.ready()
        assert await bus.declare(wanted) == ()


async def test_a_window_that_fits_no_node_is_a_question_of_room(
    cluster: NatsCluster, run_id: str
) -> None:
    await cluster.ready()
    async with NatsBus(cluster.url, options=NatsOptions(patience_s=5.0)) as bus:
        with pytest.raises(StorageFull, match=r"log\.window_bytes"):
            await bus.declare(specs(run_id, replicas=3, window_bytes=10**12))


async def test_a_follower_passes_what_was_purged_and_deleted(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    stream = names.shard(0).stream("CONTRIB")
    for i in range(10):
        await bus.publish(names.shard(0).contribution(0, "a"), b"%d" % i, msg_id=f"{i}")
    follower = bus.follow(names.shard(0).contribution())
    async with aclosing(follower) as records:
        assert [r.sequence for r in await take(records, 2)] == [1, 2]
    await js_api(cluster.url, f"STREAM.PURGE.{stream}", {"seq": 6})
    await js_api(cluster.url, f"STREAM.MSG.DELETE.{stream}", {"seq": 8})
    async with aclosing(bus.follow(names.shard(0).contribution(), after=2)) as records:
        assert [r.sequence for r in await take(records, 4)] == [6, 7, 9, 10]
    assert await bus.get(stream, 3) is None
    assert await bus.get(stream, 8) is None
    assert await bus.get(stream, 11) is None


async def test_a_follower_continues_on_a_stream_that_was_removed_and_recreated(
    cluster: NatsCluster, bus: NatsBus, names: Subjects
) -> None:
    stream = names.shard(0).stream("CONTRIB")
    for i in range(4):
        await bus.publish(names.shard(0).contribution(0, "a"), b"%d" % i, msg_id=f"{i}")
    async with aclosing(bus.follow(names.shard(0).contribution())) as records:
        await take(records, 4)
        waiting = asyncio.ensure_future(take(records, 1))
        await js_api(cluster.url, f"STREAM.DELETE.{stream}")
        await bus.declare(specs(names.run, replicas=3))
        await bus.publish(names.shard(0).contribution(0, "a"), b"new", msg_id="new")
        assert [(r.sequence, r.payload) for r in await waiting] == [(1, b"new")]
