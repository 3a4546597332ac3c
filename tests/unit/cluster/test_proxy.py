"""The proxy between a service and its broker, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from skerry.cli.cluster.proxy import OPEN, RETRANSMIT_S, Proxy, shape_from
from skerry.errors import ConfigError
from tests.support.builders import until

DEADLINE_S = 30.0
MANY = 8 * 1024**2


@dataclass(slots=True)
class Far:
    """A server that answers every byte with the same byte, and keeps what it got."""

    got: bytearray = field(default_factory=bytearray)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.got += data
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def proxied() -> AsyncGenerator[tuple[Proxy, Far]]:
    far = Far()
    server = await asyncio.start_server(far.serve, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    async with asyncio.timeout(DEADLINE_S):
        try:
            async with proxy.serving("ab"):
                yield proxy, far
        finally:
            server.close()


async def dial(proxy: Proxy, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.ports[name])


def shape(proxy: Proxy, name: str, **wanted: object) -> None:
    proxy.set(name, shape_from(wanted))


async def until_stalled(proxy: Proxy, name: str, at_least: int) -> None:
    await until(lambda: proxy.routes[name].counters.stalled_bytes >= at_least)


async def echoed(proxy: Proxy, name: str, data: bytes) -> bytes:
    reader, writer = await dial(proxy, name)
    writer.write(data)
    answer = await reader.readexactly(len(data))
    writer.close()
    return answer


async def test_an_open_route_carries_every_byte_both_ways() -> None:
    data = bytes(range(256)) * (MANY // 256)
    async with proxied() as (proxy, far):
        assert await echoed(proxy, "a", data) == data
        assert far.got == data
        assert (proxy.routes["a"].counters.bytes_up, proxy.routes["a"].counters.bytes_down) == (
            MANY,
            MANY,
        )


async def test_a_delayed_route_carries_the_same_bytes_in_order() -> None:
    data = bytes(range(256)) * 4096
    async with proxied() as (proxy, _):
        shape(proxy, "a", delay_s=0.01)
        assert await echoed(proxy, "a", data) == data
        assert proxy.routes["a"].counters.shaped_bytes == 2 * len(data)


async def test_a_capped_route_sends_no_faster_than_its_rate() -> None:
    data = bytes(200_000)
    async with proxied() as (proxy, _):
        shape(proxy, "a", rate_bytes_s=1e6)
        began = asyncio.get_running_loop().time()
        assert await echoed(proxy, "a", data) == data
        # A lower bound holds on the slowest machine: two directions of 0.2 s that may overlap.
        assert asyncio.get_running_loop().time() - began > 0.19


async def test_a_lossy_route_carries_the_same_bytes_later() -> None:
    data = bytes(range(256)) * 4096
    async with proxied() as (proxy, _):
        shape(proxy, "a", loss=0.3)
        began = asyncio.get_running_loop().time()
        while not proxy.routes["a"].counters.lost_segments:
            assert await echoed(proxy, "a", data) == data
        assert asyncio.get_running_loop().time() - began > RETRANSMIT_S
        assert not proxy.routes["a"].counters.shaped_bytes, "a loss is known by what was lost"


async def test_a_black_hole_lets_nothing_through_and_loses_nothing() -> None:
    async with proxied() as (proxy, far):
        reader, writer = await dial(proxy, "a")
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        shape(proxy, "a", cut="blackhole")
        writer.write(b"during")
        await until_stalled(proxy, "a", 6)
        assert await echoed(proxy, "b", b"others go on") == b"others go on"
        assert b"during" not in far.got
        proxy.open_all()
        assert await reader.readexactly(6) == b"during"
        writer.close()


async def test_a_connection_made_during_a_black_hole_reaches_the_broker_after_it() -> None:
    async with proxied() as (proxy, far):
        shape(proxy, "a", cut="blackhole")
        reader, writer = await dial(proxy, "a")
        writer.write(b"late")
        await until(lambda: proxy.routes["a"].counters.refused)
        assert far.connections == 0
        proxy.open_all()
        assert await reader.readexactly(4) == b"late"
        writer.close()


async def test_a_reset_ends_connections_and_keeps_new_ones_out() -> None:
    async with proxied() as (proxy, _):
        reader, writer = await dial(proxy, "a")
        writer.write(b"x")
        await reader.readexactly(1)
        shape(proxy, "a", cut="reset")
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        late, writer = await dial(proxy, "a")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await late.readexactly(1)
        writer.close()
        route = proxy.routes["a"]
        counters = route.counters
        assert (counters.aborted, counters.refused, len(route.connections)) == (1, 1, 0)
        proxy.open_all()
        assert await echoed(proxy, "a", b"back") == b"back"


async def test_a_broker_that_is_gone_looks_gone() -> None:
    proxy = Proxy(1)
    async with asyncio.timeout(DEADLINE_S), proxy.serving("a"):
        reader, writer = await dial(proxy, "a")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_the_end_of_a_connection_is_passed_on() -> None:
    async with proxied() as (proxy, _):
        reader, writer = await dial(proxy, "a")
        writer.write(b"x")
        await reader.readexactly(1)
        writer.close()
        await until(lambda: not proxy.routes["a"].connections)


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ({"cut": "sideways"}, "cut"),
        ({"delay_s": -1}, "delay_s"),
        ({"rate_bytes_s": math.inf}, "rate_bytes_s"),
        ({"loss": 1.1}, "loss"),
    ],
)
def test_a_shape_that_means_nothing_is_refused(wanted: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        shape_from(wanted)
    assert refused.value.path == path


def test_an_unknown_route_is_refused() -> None:
    with pytest.raises(ConfigError, match="There is no route 'c'"):
        Proxy(1).set("c", OPEN)
