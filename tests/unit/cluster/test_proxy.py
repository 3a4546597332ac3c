"""The proxy between a service and its broker, with real sockets on both sides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skerry.cli.cluster.proxy import Proxy
from skerry.errors import ConfigError
from skerry.service.control import ControlError, ask, listening

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
    host, port = server.sockets[0].getsockname()
    proxy = Proxy(host, port)
    async with asyncio.timeout(DEADLINE_S):
        try:
            async with proxy.serving({"a": ("127.0.0.1", 0), "b": ("127.0.0.1", 0)}):
                yield proxy, far
        finally:
            server.close()


async def dial(proxy: Proxy, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.ports[name])


async def until_stalled(proxy: Proxy, name: str, at_least: int) -> None:
    while proxy.routes[name].stalled_bytes < at_least:  # noqa: ASYNC110 - counters send no event
        await asyncio.sleep(0.001)


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
        assert (proxy.routes["a"].bytes_up, proxy.routes["a"].bytes_down) == (MANY, MANY)


async def test_a_delayed_route_carries_the_same_bytes_in_order() -> None:
    data = bytes(range(256)) * 4096
    async with proxied() as (proxy, _):
        await proxy.answer({"op": "set", "route": "a", "delay_s": 0.01})
        assert await echoed(proxy, "a", data) == data
        assert proxy.routes["a"].shaped_bytes == 2 * len(data)


async def test_a_capped_route_sends_no_faster_than_its_rate() -> None:
    data = bytes(200_000)
    async with proxied() as (proxy, _):
        await proxy.answer({"op": "set", "route": "a", "rate_bytes_s": 1e6})
        began = asyncio.get_running_loop().time()
        assert await echoed(proxy, "a", data) == data
        # A lower bound holds on the slowest machine: two directions of 0.2 s that may overlap.
        assert asyncio.get_running_loop().time() - began > 0.19


async def test_a_black_hole_lets_nothing_through_and_loses_nothing() -> None:
    async with proxied() as (proxy, far):
        reader, writer = await dial(proxy, "a")
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        await proxy.answer({"op": "set", "route": "a", "cut": "blackhole"})
        writer.write(b"during")
        await until_stalled(proxy, "a", 6)
        assert await echoed(proxy, "b", b"others go on") == b"others go on"
        assert b"during" not in far.got
        await proxy.answer({"op": "heal"})
        assert await reader.readexactly(6) == b"during"
        writer.close()


async def test_a_black_hole_may_swallow_one_direction_only() -> None:
    async with proxied() as (proxy, far):
        reader, writer = await dial(proxy, "a")
        await proxy.answer({"op": "set", "route": "a", "cut": "blackhole", "ways": ["down"]})
        # What was dialled during the cut waits with all it has; what was open before it goes on.
        await proxy.answer({"op": "heal"})
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        await proxy.answer({"op": "set", "route": "a", "cut": "blackhole", "ways": ["down"]})
        writer.write(b"up only")
        await until_stalled(proxy, "a", 7)
        assert far.got.endswith(b"up only")
        writer.close()


async def test_a_connection_made_during_a_black_hole_reaches_the_broker_after_it() -> None:
    async with proxied() as (proxy, far):
        await proxy.answer({"op": "set", "route": "a", "cut": "blackhole"})
        reader, writer = await dial(proxy, "a")
        writer.write(b"late")
        while not proxy.routes["a"].refused:  # noqa: ASYNC110 - counters send no event
            await asyncio.sleep(0.001)
        assert far.connections == 0
        await proxy.answer({"op": "heal"})
        assert await reader.readexactly(4) == b"late"
        writer.close()


async def test_a_reset_ends_connections_and_keeps_new_ones_out() -> None:
    async with proxied() as (proxy, _):
        reader, writer = await dial(proxy, "a")
        writer.write(b"x")
        await reader.readexactly(1)
        await proxy.answer({"op": "set", "route": "a", "cut": "reset"})
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()
        late, writer = await dial(proxy, "a")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await late.readexactly(1)
        writer.close()
        route = proxy.routes["a"]
        assert (route.aborted, route.refused, len(route.links)) == (1, 1, 0)
        await proxy.answer({"op": "heal"})
        assert await echoed(proxy, "a", b"back") == b"back"


async def test_a_broker_that_is_gone_looks_gone() -> None:
    proxy = Proxy("127.0.0.1", 1)
    async with asyncio.timeout(DEADLINE_S), proxy.serving({"a": ("127.0.0.1", 0)}):
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
        while proxy.routes["a"].links:  # noqa: ASYNC110 - counters send no event
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        ({"op": "blow up"}, "op"),
        ({"op": "set", "route": "nobody"}, "route"),
        ({"op": "set", "route": "a", "cut": "sideways"}, "cut"),
        ({"op": "set", "route": "a", "delay_s": -1}, "delay_s"),
        ({"op": "set", "route": "a", "rate_bytes_s": float("inf")}, "rate_bytes_s"),
    ],
)
async def test_a_command_that_means_nothing_is_refused(
    request_: dict[str, object], path: str
) -> None:
    async with proxied() as (proxy, _):
        with pytest.raises(ConfigError) as refused:
            await proxy.answer(request_)
        assert refused.value.path == path


async def test_commands_come_over_a_socket_however_deep_it_lies(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / "run"
    deep.mkdir(parents=True)
    async with proxied() as (proxy, _), listening(deep / "proxy.sock", proxy.answer):
        told = await ask(deep / "proxy.sock", {"op": "set", "route": "a", "cut": "blackhole"})
        assert told["cut"] == "blackhole"
        with pytest.raises(ControlError, match="There is no route 'nobody'"):
            await ask(deep / "proxy.sock", {"op": "set", "route": "nobody"})
    with pytest.raises(ControlError, match="Nobody answers"):
        await ask(deep / "proxy.sock", {"op": "show"})
