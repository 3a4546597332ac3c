"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from skerry.errors import BrokerUnavailable
from skerry.log.client import merged


class Streams:
    """Streams of (name, number); ``closed`` are those that were closed.

    All are held here: one that nothing holds is closed when it is collected.
    """

    def __init__(self) -> None:
        self.closed: set[str] = set()
        self._held: list[AsyncGenerator[tuple[str, int]]] = []

    def stream(
        self, name: str, count: int, error: Exception | None = None, *, ends: bool = True
    ) -> AsyncGenerator[tuple[str, int]]:
        self._held.append(self._stream(name, count, error, ends=ends))
        return self._held[-1]

    async def _stream(
        self, name: str, count: int, error: Exception | None, *, ends: bool
    ) -> AsyncGenerator[tuple[str, int]]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield name, number
            if error is not None:
                raise error
            if not ends:
                await asyncio.Event().wait()
        finally:
            self.closed.add(name)


async def test_each_stream_comes_whole_and_in_its_own_order() -> None:
    streams = Streams()
    taken = [item async for item in merged([streams.stream("a", 3), streams.stream("b", 90)])]
    for name, count in (("a", 3), ("b", 90)):
        assert [item for item in taken if item[0] == name] == [(name, n) for n in range(count)]


async def test_what_one_stream_raises_comes_after_what_it_yielded_and_closes_the_others() -> None:
    streams = Streams()
    failing = streams.stream("a", 2, BrokerUnavailable("away"))
    both = merged([failing, streams.stream("b", 0, ends=False)])
    assert [await anext(both), await anext(both)] == [("a", 0), ("a", 1)]
    with pytest.raises(BrokerUnavailable, match="away"):
        await anext(both)
    assert streams.closed == {"a", "b"}


async def test_streams_are_closed_when_the_reader_leaves() -> None:
    streams = Streams()
    both = merged([streams.stream("a", 1, ends=False), streams.stream("b", 9)])
    await anext(both)
    for _ in range(9):  # what is read ahead waits to be taken
        await asyncio.sleep(0)
    await both.aclose()
    assert streams.closed == {"a", "b"}
