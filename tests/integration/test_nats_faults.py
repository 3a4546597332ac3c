"""The NATS bus while a real server dies, hangs, restarts and forgets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from skerry.errors import BrokerUnavailable, BusError
from skerry.log.base import Deliver, Expect
from skerry.log.nats import fast
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.jetstream import NO_FOLDER
from skerry.log.nats.login import NatsOptions
from skerry.protocol.subjects import Subjects
from tests.support.log import DEADLINE_S, newest, specs, take
from tests.support.nats_server import NatsServer
from tests.support.raw_nats import delete_consumers

pytestmark = [pytest.mark.nats, pytest.mark.fault]


@pytest.fixture
def names(run_id: str) -> Subjects:
    return Subjects(run_id)


@pytest.fixture
async def bus(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    nats_server: NatsServer,
    run_id: str,
) -> AsyncIterator[NatsBus]:
    """A bus on a server of its own, with the run's streams declared and short deadlines.

    As a parameter: the version of nats-py that is installed as far as it knows.
    """
    if installed := getattr(request, "param", ""):
        monkeypatch.setattr(fast, "version", lambda _: installed)
    async with NatsBus(
        nats_server.url,
        options=NatsOptions(connect_timeout_s=5.0, request_timeout_s=1.0, patience_s=20.0),
    ) as bus:
        client = (await bus._connection.ready(None)).client
        assert type(client) is (Client if installed else fast.FastClient)
        await bus.declare(specs(run_id))
        yield bus


any_client = pytest.mark.parametrize("bus", ["", "2.99.0"], ids=["fast", "stock"], indirect=True)
"""Also with a nats-py that is none of the tested versions, on its own client."""


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "broker")
    yield server
    server.stop()


async def test_a_stream_is_created_whose_folder_the_broker_was_just_removing(
    fresh: NatsServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker tries whether it can write to an account's folder, and removes it afterwards."""
    folder = fresh.store / "jetstream" / "$G"
    folder.mkdir(parents=True)
    (folder / "streams").touch()  # the first refusal removes it
    fresh.start()
    async with NatsBus(fresh.url) as bus:
        refused, request = list[int](), bus._connection.request

        async def ask(subject: str, *args: Any, **options: Any) -> Msg:
            answer = await request(subject, *args, **options)
            error = json.loads(answer.data).get("error", {})
            if ".STREAM.CREATE." in subject and error:
                refused.append(error["err_code"])
            return answer

        monkeypatch.setattr(bus._connection, "request", ask)
        await bus.declare(specs(run_id))
    assert refused == [NO_FOLDER]


async def test_a_broker_that_can_make_no_folder_says_so(fresh: NatsServer, run_id: str) -> None:
    fresh.start()
    folder = fresh.store / "jetstream"
    folder.rmdir()
    folder.touch()
    async with NatsBus(fresh.url) as bus:
        with pytest.raises(BusError, match=f"error {NO_FOLDER}"):
            await bus.declare(specs(run_id))


async def test_a_follower_has_no_gap_and_no_repeat_through_kill_9(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    total, rounds = 240, 3

    async def write() -> None:
        for i in range(total):
            await bus.publish(names.commit(0), b"%d" % i, msg_id=f"0/{i}")
            if i % (total // rounds) == total // rounds - 1:
                nats_server.kill9()
                nats_server.start()

    async with aclosing(bus.follow(names.commit())) as records:
        reading = asyncio.ensure_future(take(records, total))
        async with asyncio.timeout(DEADLINE_S):
            await write()
        found = await reading
    assert [int(record.payload) for record in found] == list(range(total))
    assert [record.sequence for record in found] == list(range(1, total + 1))


@any_client
async def test_a_follower_that_lagged_goes_on_after_a_restart(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    for i in range(40):
        await bus.publish(names.shard(0).contribution(0, "a"), bytes([i]) * 500_000)
    async with aclosing(bus.follow(names.shard(0).contribution())) as records:
        first = await take(records, 1)
        nats_server.restart()
        rest = await take(records, 39)
    assert [r.payload[0] for r in first + rest] == list(range(40))


@any_client
async def test_a_live_follower_leaves_out_what_was_stored_while_it_was_cut_off(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    numbers = itertools.count()
    async with aclosing(bus.follow(names.commit(), deliver=Deliver.LIVE)) as records:

        async def publish_until_heard(payload: bytes) -> set[bytes]:
            heard = {b""}
            while payload not in heard:
                waiting = asyncio.ensure_future(anext(records))
                while not waiting.done():
                    await bus.publish(names.commit(0), payload, msg_id=str(next(numbers)))
                    await asyncio.sleep(0.01)
                heard.add((await waiting).payload)
            return heard

        async with asyncio.timeout(DEADLINE_S):
            await publish_until_heard(b"before")
            nats_server.restart()
            await bus.publish(names.commit(0), b"missed", msg_id="missed")
            assert b"missed" not in await publish_until_heard(b"after")


async def chunks(bus: NatsBus, names: Subjects, count: int, size: int = 400_000) -> list[int]:
    """Publish that many chunks of a fragment and return their sequences."""
    stored = [
        await bus.publish(names.shard(0).chunk(0, "snapshot", 0, i), bytes([i]) * size)
        for i in range(count)
    ]
    return [receipt.sequence for receipt in stored]


async def test_reading_many_messages_survives_kill_9(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    wanted = await chunks(bus, names, 80)
    async with aclosing(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted)) as records:
        found = await take(records, 10)
        nats_server.kill9()
        nats_server.start()
        found += await take(records, 70)
        with pytest.raises(StopAsyncIteration):
            await anext(records)
    assert [record.payload[0] for record in found] == list(range(80))


@any_client
async def test_reading_many_messages_survives_the_loss_of_its_consumer(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    wanted = await chunks(bus, names, 80)
    async with aclosing(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted)) as records:
        found = await take(records, 1)
        assert await delete_consumers(nats_server.url, names.shard(0).stream("STATE")) == 1
        found += await take(records, 79)
    assert [record.payload[0] for record in found] == list(range(80))


async def test_reading_many_messages_asks_for_no_others_and_leaves_no_consumer(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    wanted = await chunks(bus, names, 80)
    stats = (await bus._connection.ready(None)).client.stats
    before = stats["in_bytes"]
    async with aclosing(
        bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted[:40])
    ) as records:
        await take(records, 40)
    await bus.last(names.ledger("run"))  # whatever was sent before is here
    assert 40 <= (stats["in_bytes"] - before) / 400_000 < 41
    assert await delete_consumers(nats_server.url, names.shard(0).stream("STATE")) == 0


async def test_reading_what_has_been_replaced_brings_little_of_what_replaced_it(
    bus: NatsBus, names: Subjects
) -> None:
    wanted = await chunks(bus, names, 80)
    await chunks(bus, names, 80)
    stats = (await bus._connection.ready(None)).client.stats
    before = stats["in_bytes"]
    async with aclosing(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted)) as records:
        with pytest.raises(StopAsyncIteration):
            await anext(records)
    assert (stats["in_bytes"] - before) / 400_000 < 10


async def test_a_consumer_that_is_silent_is_not_tried_again_soon(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    wanted = await chunks(bus, names, 80, 1000)
    nats_server.pause()
    async with aclosing(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted)) as records:
        reading = asyncio.ensure_future(take(records, 80))
        await asyncio.sleep(2.0)  # longer than the consumer's request may take
        nats_server.resume()
        found = await reading
    assert [record.payload[0] for record in found] == list(range(80))

    await delete_consumers(
        nats_server.url, names.shard(0).stream("STATE")
    )  # made after all, and unused
    async with aclosing(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted)) as records:
        await take(records, 1)
        assert await delete_consumers(nats_server.url, names.shard(0).stream("STATE")) == 0


async def test_a_publish_outlasts_a_server_that_hangs_for_3_s(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    nats_server.pause()
    publishing = asyncio.ensure_future(bus.publish(names.commit(0), b"x", msg_id="0/1"))
    await asyncio.sleep(3.0)
    assert not publishing.done()
    nats_server.resume()
    async with asyncio.timeout(DEADLINE_S):
        receipt = await publishing
    assert receipt.sequence == 1
    assert await bus.get(names.stream("LEDGER"), 2) is None


async def test_a_compare_and_set_whose_answer_was_late_is_ours(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    subject = names.shard(0).fence()
    nats_server.pause()
    writing = asyncio.ensure_future(
        bus.publish(subject, b"me", msg_id="me/1", expect=Expect(subject, 0))
    )
    await asyncio.sleep(1.5)
    nats_server.resume()
    async with asyncio.timeout(DEADLINE_S):
        receipt = await writing
    record = await newest(bus, subject)
    assert (record.payload, record.sequence) == (b"me", receipt.sequence)
    assert receipt.duplicate


async def test_a_publish_without_message_id_is_never_sent_twice(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    nats_server.pause()
    with pytest.raises(BrokerUnavailable):
        await bus.publish(names.commit(0), b"x")
    nats_server.resume()
    await bus.publish(names.commit(0), b"y", msg_id="0/2")
    assert await bus.get(names.stream("LEDGER"), 3) is None


@any_client
async def test_calls_wait_for_a_server_that_comes_back(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    await bus.publish(names.commit(0), b"kept", msg_id="0/1")
    nats_server.kill9()
    calls = asyncio.gather(
        bus.last(names.commit(0)),
        bus.last_each(names.commit()),
        bus.get(names.stream("LEDGER"), 1),
        bus.publish(names.commit(1), b"new", msg_id="1/1"),
    )
    await asyncio.sleep(0.2)
    assert not calls.done()
    nats_server.start()
    async with asyncio.timeout(DEADLINE_S):
        last, each, got, receipt = await calls
    assert last is not None
    assert last == got
    assert each[0] == last
    assert receipt.sequence == 2


async def test_a_call_gives_up_at_its_deadline(nats_server: NatsServer, names: Subjects) -> None:
    async with NatsBus(
        nats_server.url, options=NatsOptions(request_timeout_s=0.2, patience_s=0.5)
    ) as bus:
        nats_server.kill9()
        loop = asyncio.get_running_loop()
        started = loop.time()
        with pytest.raises(BrokerUnavailable, match="skerry up"):
            await bus.last(names.ledger("run"))
        assert loop.time() - started < 5.0


async def test_a_deleted_consumer_is_made_again(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    async with aclosing(bus.follow(names.commit())) as records:
        await bus.publish(names.commit(0), b"1")
        await take(records, 1)
        waiting = asyncio.ensure_future(take(records, 1))
        assert await delete_consumers(nats_server.url, names.stream("LEDGER")) == 1
        await bus.publish(names.commit(0), b"2")
        assert [record.payload for record in await waiting] == [b"2"]


async def test_a_missing_heartbeat_makes_a_new_consumer(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    async with aclosing(bus.follow(names.commit())) as records:
        waiting = asyncio.ensure_future(take(records, 1))
        await asyncio.sleep(0.2)
        nats_server.pause()
        await asyncio.sleep(7.0)
        nats_server.resume()
        await bus.publish(names.commit(0), b"x", msg_id="0/1")
        assert [record.payload for record in await waiting] == [b"x"]


async def test_a_memory_stream_that_restarted_is_followed_from_its_start(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    for i in range(5):
        await bus.publish(names.pulse("a"), b"old %d" % i)
    follower = bus.follow((names.pulse(), names.round()), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower) as records:
        assert [r.payload for r in await take(records, 1)] == [b"old 4"]
        waiting = asyncio.ensure_future(take(records, 2))
        nats_server.restart()
        await bus.publish(names.pulse("a"), b"new a", msg_id="a")
        await bus.publish(names.pulse("b"), b"new b", msg_id="b")
        assert [r.payload for r in await waiting] == [b"new a", b"new b"]


async def test_a_memory_stream_that_restarted_and_grew_longer_is_noticed(
    nats_server: NatsServer, bus: NatsBus, names: Subjects
) -> None:
    await bus.publish(names.pulse("a"), b"old")
    async with aclosing(bus.follow(names.pulse())) as records:
        await take(records, 1)
        nats_server.restart()
        for name in "abc":
            await bus.publish(names.pulse(name), name.encode(), msg_id=name)
        assert [r.payload for r in await take(records, 3)] == [b"a", b"b", b"c"]


async def test_a_client_that_gave_up_for_good_is_replaced(bus: NatsBus, names: Subjects) -> None:
    async with aclosing(bus.follow(names.commit())) as records:
        await bus.publish(names.commit(0), b"1")
        await take(records, 1)
        waiting = asyncio.ensure_future(take(records, 1))
        client = (await bus._connection.ready(None)).client
        await client.close()
        await bus.publish(names.commit(0), b"2", msg_id="0/2")
        assert [record.payload for record in await waiting] == [b"2"]


async def test_closing_the_bus_ends_its_followers(nats_server: NatsServer, run_id: str) -> None:
    async with NatsBus(nats_server.url) as bus:
        await bus.declare(specs(run_id))
        waiting = asyncio.ensure_future(anext(bus.follow(Subjects(run_id).commit())))
        await asyncio.sleep(0.1)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(StopAsyncIteration):
            await waiting
