"""Contributions leave one behind the other and do not wait for each other's acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.schemes import CHUNK_BYTES
from skerry.errors import BrokerUnavailable
from skerry.log import contributions
from skerry.log.base import Receipt, Record
from skerry.log.client import one_by_one
from skerry.log.contributions import Sender, SendWindow
from skerry.log.memory import MemoryBus
from skerry.log.streams import SEND_MOST
from skerry.protocol.codec import Chunk
from skerry.settings.local import NatsSettings
from skerry.tasks import now_s
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import header, until
from tests.support.learners import encode_vector, walk
from tests.support.virtual_time import simulate

RUN = "t"
PLAN = plan([LeafSpec("w", (64, 256))], 2)


def chunks(fragment: int) -> list[Chunk]:
    return list(encode_vector("int4", walk(PLAN.fragments[fragment], fragment), 2560))


@dataclass
class Held:
    """A broker far away: it keeps its acknowledgements until it is told to let some go.

    ``most`` messages were on their way at once.
    """

    bus: MemoryBus
    begun: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    answers: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    most: int = 0

    async def publish(self, subject: str, payload: bytes, **options: Any) -> object:
        name = options["msg_id"]
        self.begun.append(name)
        self.sizes[name] = len(payload)
        self.answers[name] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, self.flying)
        await self.answers[name]
        return await MemoryBus.publish(self.bus, subject, payload, **options)

    @property
    def flying(self) -> int:
        """How many messages are on their way."""
        return sum(not self.answers[name].done() for name in self.begun)

    async def begins(self, count: int) -> None:
        """Wait until so many messages are on their way or were."""
        await until(lambda: len(self.begun) >= count, 60)


@pytest.fixture
async def held(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> Held:
    found = Held(bus)
    monkeypatch.setattr(bus, "publish", found.publish)
    return found


@asynccontextmanager
async def sending(sender: Sender, fragments: Sequence[int]) -> AsyncGenerator[asyncio.Future[Any]]:
    tasks = [sender.send(header(fragment=f), chunks(f)) for f in fragments]
    everything = asyncio.gather(*tasks, return_exceptions=True)
    try:
        yield everything
    finally:
        everything.cancel()


def names(fragment: int) -> list[str]:
    return [f"a/1/{fragment}/1/{chunk.index}" for chunk in chunks(fragment)]


async def test_the_next_one_leaves_before_the_log_has_the_one_before(held: Held) -> None:
    everything = names(0) + names(1)
    assert len(everything) == contributions.SEND_LEAST
    async with sending(Sender(held.bus, RUN, PLAN), [0, 1]) as ended:
        await held.begins(len(everything))
        assert held.begun == everything
        assert not ended.done()
        for answer in held.answers.values():
            answer.set_result(None)
        assert await ended == [
            sum(held.sizes[name] for name in names(0)),
            sum(held.sizes[name] for name in names(1)),
        ]


async def test_no_more_than_the_window_is_on_its_way(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "SEND_LEAST", 2)
    monkeypatch.setattr(contributions, "SEND_MOST", 2)
    everything = names(0) + names(1)
    async with sending(Sender(held.bus, RUN, PLAN), [0, 1]) as ended:
        for position, name in enumerate(everything):
            await held.begins(min(position + 2, len(everything)))
            held.answers[name].set_result(None)
        assert min(await ended) > 0
    assert held.most == 2


async def test_one_that_fails_after_it_has_left_leaves_the_window_to_the_others(held: Held) -> None:
    sender = Sender(held.bus, RUN, PLAN)
    async with sending(sender, [0, 1]) as ended:
        await held.begins(len(names(0) + names(1)))
        held.answers[names(0)[1]].set_exception(BrokerUnavailable("away"))
        for name in names(1):
            held.answers[name].set_result(None)
        failed, sent = await ended
    assert isinstance(failed, BrokerUnavailable)
    assert sent > 0
    assert (sender.window.size, sender.window.flying) == (contributions.SEND_LEAST, 0)


async def test_one_that_fails_while_it_leaves_makes_way_for_the_next(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "SEND_LEAST", 1)
    async with sending(Sender(held.bus, RUN, PLAN), [0, 1]) as ended:
        await held.begins(1)
        held.answers[names(0)[0]].set_exception(BrokerUnavailable("away"))
        for position, name in enumerate(names(1), 2):
            await held.begins(position)
            held.answers[name].set_result(None)
        failed, sent = await ended
    assert held.begun == [names(0)[0], *names(1)]
    assert isinstance(failed, BrokerUnavailable)
    assert sent > 0


async def test_one_that_is_given_up_while_it_leaves_makes_way_for_the_next(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "SEND_LEAST", 1)
    sender = Sender(held.bus, RUN, PLAN)
    first = asyncio.ensure_future(sender.send(header(fragment=0), chunks(0)))
    await held.begins(1)
    async with sending(sender, [1]) as ended:
        first.cancel()
        for position, name in enumerate(names(1), 2):
            await held.begins(position)
            held.answers[name].set_result(None)
        assert min(await ended) > 0
    assert first.cancelled()


async def flown(
    window: SendWindow, round_trip_s: float, chunk_s: float, chunks: int, size: int = 400_000
) -> float:
    """Send chunks over a link that carries one in ``chunk_s``; return how long they took."""
    now_s = free_s = 0.0
    out: list[tuple[float, float, int]] = []
    for _ in range(chunks):
        while len(out) >= window.size:
            left_s, now_s, ahead = out.pop(0)
            window.landed(now_s - left_s, size, ahead)
        await window.take(size)
        free_s = max(now_s, free_s) + chunk_s
        out.append((now_s, free_s + round_trip_s, window.flying))
    for left_s, lands_s, ahead in out:
        window.landed(lands_s - left_s, size, ahead)
    return out[-1][1]


async def test_a_far_link_is_used_for_the_most_part_and_a_near_one_is_not_flooded() -> None:
    for round_trip_s in (0.02, 0.05, 0.1):
        chunk_s = round_trip_s / 40
        took_s = await flown(SendWindow(), round_trip_s, chunk_s, 2000)
        assert took_s < 1.5 * 2000 * chunk_s
    near = SendWindow()
    await flown(near, 0.001, 0.05, 500)
    assert near.size <= contributions.SEND_LEAST + 1


async def test_a_window_closes_again_when_the_link_gets_slower_and_holds_few_bytes() -> None:
    window = SendWindow()
    await flown(window, 0.05, 0.0001, 500)
    assert window.size == SEND_MOST < NatsSettings().publish_window
    for size in (400_000, 2**30):
        for _ in range(SEND_MOST):
            await window.take(size)
            window.landed(1.0, size, SEND_MOST)
        assert window.size == contributions.SEND_LEAST


async def test_a_long_way_alone_takes_no_small_chunk_away() -> None:
    """As messages that take some steps of a lab's learner."""
    window = SendWindow()
    await flown(window, 20.0, 0.001, 100, size=10_000)
    assert window.size >= contributions.SEND_LEAST


@dataclass
class Narrow:
    """A broker behind a link of so many bytes a second, which carries one message after another."""

    rate: float
    longest_s: float = 0.0
    free_s: float = 0.0

    async def _carry(self, size: int) -> None:
        began_s = now_s()
        self.free_s = max(began_s, self.free_s) + size / self.rate
        await asyncio.sleep(self.free_s - began_s)
        self.longest_s = max(self.longest_s, now_s() - began_s)

    async def publish(self, subject: str, payload: bytes, **_: object) -> Receipt:
        await self._carry(len(payload))
        return Receipt(1)

    async def get(self, stream: str, sequence: int) -> Record:
        await self._carry(CHUNK_BYTES)
        return Record(stream, sequence, 0, bytes(CHUNK_BYTES))


@pytest.mark.parametrize("mbit", [1.5, 2.5, 4.0, 5.0, 8.0, 16.0, 100.0])
def test_no_chunk_waits_behind_so_many_that_it_is_sent_or_asked_for_again(mbit: float) -> None:
    count, rate = 40, mbit * 1e6 / 8
    most_s = NatsSettings().request_timeout_s

    async def send(_: VirtualLoop) -> None:
        link: Any = Narrow(rate)
        made = [Chunk(n, count, n, 1, "int4", 130, bytes(CHUNK_BYTES)) for n in range(count)]
        await Sender(link, RUN, PLAN).send(header(fragment=0), made)
        assert link.longest_s < most_s
        assert now_s() < 1.1 * count * CHUNK_BYTES / rate

    async def read(_: VirtualLoop) -> None:
        link = Narrow(rate)
        read = [record async for record in one_by_one(link.get, "s", range(count))]
        assert [record.sequence for record in read] == [*range(count)]
        assert link.longest_s < most_s
        assert now_s() < 1.1 * count * CHUNK_BYTES / rate

    simulate(send)
    simulate(read)
