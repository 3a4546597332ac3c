"""The proxy that stands between the services of a cluster and its broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from skerry.cli.cluster.place import Place
from skerry.cli.cluster.routes import proxied, routes


async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"INFO")
    await writer.drain()
    writer.close()


async def greeted(url: str) -> bytes:
    host, _, port = url.rpartition("/")[2].rpartition("@")[2].partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = await reader.read(4)
    writer.close()
    return said


@contextlib.asynccontextmanager
async def open_ways(place: Place, url: str) -> AsyncGenerator[dict[str, str]]:
    async with routes(place, url, ["a", "b"], {}) as reach:
        assert not any(held.entering for held in reach.values())
        yield {name: held.url for name, held in reach.items()}


def proxies(mark: Path) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"skerry.cli.cluster.proxy" in command and os.fsencode(mark) in command:
                    found.append(int(entry.name))
    return found


async def test_each_service_gets_an_address_and_a_dead_proxy_comes_back_there(
    tmp_path: Path,
) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    place = Place("r", tmp_path)
    place.folder.mkdir()
    async with asyncio.timeout(60), open_ways(place, f"nats://me:pw@{host}:{port}") as at:
        assert set(at) == {"a", "b"}
        assert at["a"] != at["b"]
        assert at["a"].startswith("nats://me:pw@127.0.0.1:")
        assert await greeted(at["a"]) == b"INFO"
        (pid,) = proxies(tmp_path)
        os.kill(pid, signal.SIGKILL)
        back = b""
        while not back:
            with contextlib.suppress(OSError):
                back = await greeted(at["a"])
            await asyncio.sleep(0.02)  # another process's start sends us no event
        assert back == b"INFO"
    assert proxies(tmp_path) == []
    server.close()


@pytest.mark.parametrize(
    ("url", "possible"),
    [
        ("nats://127.0.0.1:4222", True),
        ("nats://a:1,nats://b:2", False),
        ("tls://broker:4222", False),
        ("wss://broker", False),
    ],
)
def test_only_one_address_in_the_clear_can_be_proxied(url: str, possible: bool) -> None:
    assert proxied(url) == possible
