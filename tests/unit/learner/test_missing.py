"""Contributions that leave the log unmerged are noticed; others are left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.client.sending import is_lost
from skerry.log import contributions
from skerry.log.memory import MemoryBroker, MemoryBus, MemoryStream
from skerry.log.streams import specs
from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionHeader
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import header, manifest
from tests.support.learners import encode_vector, walk

RUN = "t"
PLAN = plan([LeafSpec("w", (24, 256))], 2)
NAMES = Subjects(RUN)
CHUNK_BYTES = 900
CHECK = MissingCheck("a", 1, 0, 1, 3)


def told(identity: int = 1, learner: str = "a") -> ContributionHeader:
    return header(identity, learner, base_version=2)


async def committed(bus: MemoryBus, version: int, floor: int) -> None:
    record = manifest(version, run=RUN, plan_digest=PLAN.digest, contrib_floor=floor)
    await bus.publish(NAMES.shard(0).manifest(0), encode(record))


async def send(bus: MemoryBus, header: ContributionHeader) -> None:
    chunks = encode_vector("int4", walk(PLAN.fragments[0], "sent"), CHUNK_BYTES)
    await contributions.Sender(bus, RUN, PLAN).send(header, chunks)


async def logged(window_bytes: int = 64 * 1024**2) -> tuple[MemoryBus, MemoryStream]:
    """Return a log in which version 2 is committed and its floor lies behind an older answer."""
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN, window_bytes=window_bytes))
    await send(bus, told(99))
    stream = bus.broker.streams[NAMES.shard(0).stream("CONTRIB")]
    await committed(bus, 2, stream.last_seq)
    return bus, stream


async def test_what_lies_whole_in_the_log_can_still_be_merged() -> None:
    bus, _ = await logged()
    await send(bus, told())
    assert not await is_lost(bus, RUN, PLAN, CHECK)


async def test_window_that_drops_a_contribution_loses_it() -> None:
    bus, stream = await logged(window_bytes=4096)
    await send(bus, told())
    held = stream.last_seq
    for identity in range(1, 8):
        await send(bus, told(identity, "b"))
    assert min(stream.records) > held, "the fault did not fire"
    assert await is_lost(bus, RUN, PLAN, CHECK)


def drop_all_but_last(stream: MemoryStream) -> None:
    for sequence in list(stream.records)[:-1]:
        stream.drop(sequence)


def damage_last(stream: MemoryStream) -> None:
    record = stream.records[stream.last_seq]
    flipped = record.payload[:-1] + bytes([record.payload[-1] ^ 1])
    stream.records[stream.last_seq] = replace(record, payload=flipped)


@pytest.mark.parametrize("harm", [drop_all_but_last, damage_last])
async def test_contribution_of_which_a_chunk_is_gone_is_lost(
    harm: Callable[[MemoryStream], None],
) -> None:
    bus, stream = await logged()
    await send(bus, told())
    harm(stream)
    assert await is_lost(bus, RUN, PLAN, CHECK)


async def test_contribution_to_a_round_that_has_closed_is_not_looked_for() -> None:
    bus, stream = await logged()
    await committed(bus, 3, stream.last_seq)
    assert not await is_lost(bus, RUN, PLAN, CHECK)


async def test_floor_of_another_stream_is_not_believed() -> None:
    bus, _ = await logged()
    await send(bus, told())
    await committed(bus, 2, 1_000_000)
    assert not await is_lost(bus, RUN, PLAN, CHECK)
