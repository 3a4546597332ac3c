"""What tests of the log share: small streams, and reads that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.log.base import Bus, Record, StreamSpec
from skerry.log.memory import MemoryBroker
from skerry.log.state import read_manifest, read_part
from skerry.log.streams import specs as specs_of_run
from skerry.protocol.messages import Manifest

REAL_LOGS = (
    pytest.param("nats", marks=pytest.mark.nats),
    pytest.param("cluster", marks=(pytest.mark.nats, pytest.mark.drill)),
)
"""The logs of the contract that take bytes from strangers."""
DEADLINE_S = 60.0
WINDOW_BYTES = 64 * 1024**2
"""A stream's bound is taken out of the broker's room when it is created: a small one will do."""


def specs(
    run: str, *, shards: int = 1, window_bytes: int = WINDOW_BYTES, replicas: int = 1
) -> tuple[StreamSpec, ...]:
    """Return the streams of a run, with a window that fits small brokers."""
    return specs_of_run(run, shards=shards, window_bytes=window_bytes, replicas=replicas)


def begin_anew(broker: MemoryBroker, names: Iterable[str] | None = None) -> None:
    """Begin streams anew, or all of them, as a hand would, or a broker that has lost its disk."""
    for name in tuple(broker.streams if names is None else names):
        stream = broker.streams.pop(name)
        broker.declare(stream.spec)
        stream.lost = True
        stream.wake()


async def all_of(records: AsyncGenerator[Record]) -> list[Record]:
    """Return every record of a reading that ends."""
    async with asyncio.timeout(DEADLINE_S), aclosing(records):
        return [record async for record in records]


async def take(records: AsyncGenerator[Record], count: int) -> list[Record]:
    """Return the next records of a follower, which goes on."""
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(records) for _ in range(count)]


async def followed(
    bus: Bus, pattern: str | tuple[str, ...], count: int, **options: Any
) -> list[Record]:
    """Return the first records of a new follower."""
    async with aclosing(bus.follow(pattern, **options)) as records:
        return await take(records, count)


async def newest(bus: Bus, subject: str) -> Record:
    """Return the newest record of a subject that has one."""
    record = await bus.last(subject)
    assert record is not None
    return record


async def stored(bus: Bus, stream: str, sequence: int) -> Record:
    """Return the record of a sequence that is there."""
    record = await bus.get(stream, sequence)
    assert record is not None
    return record


async def newest_parts(
    bus: Bus, run: str, plan: Plan, fragment: int, names: Sequence[str]
) -> tuple[Manifest, Mapping[str, NDArray[np.float32]]]:
    """Return the manifest of a fragment that has one, with the newest of the named parts."""
    manifest = await read_manifest(bus, run, plan, fragment)
    assert manifest is not None
    return manifest, {name: await read_part(bus, run, plan, manifest, name) for name in names}
