"""A link: latency and bandwidth, on the clock of the loop."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from skerry.log.memory import MemoryBus
from skerry.log.streams import specs
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry_tools.lab.link import Pipe
from skerry_tools.virtual import VirtualLoop
from tests.support.virtual_time import broker_of, far_of, simulate

SUBJECTS = Subjects("r")


async def clients(loop: VirtualLoop) -> tuple[MemoryBus, MemoryBus]:
    """Return a client beside the broker of a run and one that is a second away."""
    broker = broker_of(loop)
    near, far = broker.connect(), far_of(broker, 1.0)
    await near.declare(specs("r", replicas=1, window_bytes=2**20, window_s=60.0))
    return near, far


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    async def main(loop: VirtualLoop) -> None:
        await Pipe(0.5, 100.0).carry(200)
        assert loop.time() == pytest.approx(2.5)

    simulate(main)


def test_messages_are_under_way_together() -> None:
    arrived = list[float]()

    async def main(loop: VirtualLoop) -> None:
        pipe = Pipe(1.0, 100.0)

        async def send() -> None:
            await pipe.carry(50)
            arrived.append(loop.time())

        async with TaskGroup() as group:
            for _ in range(3):
                group.create_task(send())

    simulate(main)
    assert arrived == pytest.approx([1.5, 2.0, 2.5])


def test_what_is_followed_comes_at_the_rate_it_was_stored() -> None:
    heard = list[float]()

    async def main(loop: VirtualLoop) -> None:
        near, far = await clients(loop)

        async def listen() -> None:
            async with aclosing(far.follow(SUBJECTS.shard(0).contribution())) as records:
                async for _ in records:
                    heard.append(loop.time())
                    if len(heard) == 4:
                        return

        async with TaskGroup() as group:
            group.create_task(listen())
            for _ in range(4):
                await asyncio.sleep(0.25)
                await near.publish(SUBJECTS.shard(0).contribution(0, "a"), b"x")

    simulate(main)
    assert heard == pytest.approx([1.25, 1.5, 1.75, 2.0])


def test_old_messages_arrive_together_whatever_else_is_under_way_on_a_wide_link() -> None:
    heard = list[float]()

    async def main(loop: VirtualLoop) -> None:
        near, far = await clients(loop)
        for fragment in range(3):
            await near.publish(SUBJECTS.shard(0).contribution(fragment, "a"), b"x")
        asked = asyncio.ensure_future(far.last(SUBJECTS.ledger("run")))
        await asyncio.sleep(0.5)
        async with aclosing(far.follow(SUBJECTS.shard(0).contribution())) as records:
            async for _ in records:
                heard.append(loop.time())
                if len(heard) == 3:
                    break
        await asked

    simulate(main)
    assert heard == pytest.approx([1.5, 1.5, 1.5])


def test_a_request_goes_there_and_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        far = far_of(broker, 0.5)
        await far.last(SUBJECTS.ledger("run"))
        assert loop.time() == pytest.approx(1.0)
        await far.last_each(SUBJECTS.member())
        assert loop.time() == pytest.approx(2.0)

    simulate(main)
