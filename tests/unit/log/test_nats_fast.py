"""The fast client: its transport brings everything in order, its parser takes any bytes.

With another nats-py than the tested ones its own client is used.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import requires, version
from typing import Any, cast
from urllib.parse import ParseResult, urlparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError
from structlog.testing import capture_logs

from skerry.errors import ConfigError
from skerry.log.client import NoAnswer
from skerry.log.nats import fast
from skerry.log.nats.fast import (
    BUFFER_BYTES,
    READ_BYTES,
    Incoming,
    LeanParser,
    WideTransport,
    headers_in,
)
from skerry.log.nats.session import cancellable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DEADLINE_S = 20.0


@asynccontextmanager
async def listening(serve: Serve) -> AsyncGenerator[ParseResult]:
    """Yield the URL of a server whose every connection is served like that, then closed."""
    ends: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(asyncio.create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(DEADLINE_S):
        yield urlparse(f"nats://127.0.0.1:{port}")
        await asyncio.gather(*ends)


@asynccontextmanager
async def connected(serve: Serve) -> AsyncGenerator[WideTransport]:
    """Yield a transport on a connection whose other end is ``serve``."""
    transport = WideTransport()
    async with listening(serve) as uri:
        await transport.connect(uri, 0, 5)
        try:
            yield transport
        finally:
            transport.abort()
            await transport.wait_closed()


async def everything(transport: WideTransport) -> bytes:
    pieces = bytearray()
    while not transport.at_eof():
        pieces += await transport.read(0)
    return bytes(pieces)


async def test_all_that_is_sent_arrives_in_order_though_the_reader_is_slow() -> None:
    sent = b"".join(i.to_bytes(4, "big") for i in range(3_000_000))

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()

    async with connected(serve) as transport:
        first = bytes(await transport.read(0))
        for _ in range(100):  # until the buffer is full, and the socket is not read any more
            await asyncio.sleep(0.005)
        second = bytes(await transport.read(0))
        assert BUFFER_BYTES - READ_BYTES < len(first + second) <= BUFFER_BYTES
        assert first + second + await everything(transport) == sent


async def test_views_among_lines_are_written_in_their_place() -> None:
    pieces: list[bytes | memoryview] = [b"head", memoryview(bytes(range(250)) * 20_000), b"\r\n"]
    pieces += [b"next", memoryview(b"x")]
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def hear(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        heard.set_result(await reader.readexactly(sum(map(len, pieces))))

    async with connected(hear) as transport:
        transport.writelines(pieces)
        assert await heard == b"".join(pieces)


@given(
    st.dictionaries(st.sampled_from(["Nats-Msg-Id", "traceparent"]), st.text(max_size=20)),
    st.integers(fast.LARGE_BYTES - 1, fast.LARGE_BYTES + 1),
)
async def test_a_message_is_sent_byte_by_byte_as_nats_py_sends_it(
    headers: dict[str, str], size: int
) -> None:
    clients: list[Any] = [Client(), fast.FastClient()]
    for client in clients:
        await client._send_publish("a.b", "back", bytes(size), size, headers or None)
    theirs, ours = clients
    assert b"".join(ours._pending) == b"".join(theirs._pending)
    assert (ours._pending_data_size, ours.stats) == (theirs._pending_data_size, theirs.stats)


async def test_a_large_payload_is_sent_from_where_it_is() -> None:
    client, payload = cast("Any", fast.FastClient()), bytes(fast.LARGE_BYTES)
    await client._send_publish("a.b", "", payload, len(payload), {"Nats-Msg-Id": "1"})
    assert [piece.obj for piece in client._pending if isinstance(piece, memoryview)] == [payload]


async def test_what_was_read_stays_until_the_next_reading_whatever_comes() -> None:
    incoming = Incoming()

    def come(data: bytes) -> None:
        incoming.get_buffer(-1)[: len(data)] = data
        incoming.buffer_updated(len(data))

    come(b"first")
    first = await incoming.read()
    come(b"next")
    assert (bytes(first), bytes(await incoming.read())) == (b"first", b"next")


class Heard:
    """What a client would have heard."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    async def _process_msg(self, *message: object) -> None:
        self.said.append(message)

    async def _process_ping(self) -> None:
        self.said.append("ping")


@given(st.lists(st.integers(1, 80), min_size=1))
@settings(max_examples=60)
async def test_messages_are_parsed_the_same_wherever_the_stream_is_cut(sizes: list[int]) -> None:
    header = b"NATS/1.0\r\nA: b\r\n\r\n"
    body = bytes(range(90))
    stream = b"".join(
        (
            b"MSG some.where 7 90\r\n%s\r\nPING\r\n" % body,
            b"HMSG some.where 8 back %d %d\r\n" % (len(header), len(header) + len(body)),
            b"%s%s\r\n+OK\r\nMSG some.where 7 0\r\n\r\n" % (header, body),
        )
    )
    heard, at, buffer = Heard(), 0, bytearray(80)
    parser = LeanParser(heard)
    for size in itertools.cycle(sizes):
        part = memoryview(buffer)[: len(stream[at : at + size])]
        part[:] = stream[at : at + size]
        await parser.parse(cast("bytes", part))
        at += size
        if at >= len(stream):
            break
    assert heard.said == [
        (7, b"some.where", b"", body, None),
        "ping",
        (8, b"some.where", b"back", body, header),
        (7, b"some.where", b"", b"", None),
    ]
    assert all(isinstance(message[3], bytes) for message in heard.said if message != "ping")


@given(st.lists(st.sampled_from([1, 2, 40, 20_000, 70_000, 300_000]), min_size=1))
@settings(max_examples=25)
async def test_a_large_message_that_comes_in_pieces_is_read_as_it_was_sent(
    sizes: list[int],
) -> None:
    bodies = [bytes(range(250)) * 1_200, b"x" * 16_500, b"small", bytes(range(1, 251)) * 400]
    header = b"NATS/1.0\r\nA: %s\r\n\r\n" % (b"b" * 50)
    sized = [(len(header), len(header) + len(body), header, body) for body in bodies]
    lines = [b"HMSG some.where 7 %d %d\r\n%s%s\r\n" % each for each in sized]
    stream = b"".join([*lines, b"PING\r\n"])

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        at = 0
        for size in itertools.cycle(sizes) if max(sizes) >= 20_000 else [len(stream)]:
            writer.write(stream[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
            at += size
            if at >= len(stream):
                break

    heard, direct = Heard(), list[int]()
    async with connected(serve) as transport:

        async def fill(into: memoryview) -> int:
            direct.append(await transport.fill(into))
            return direct[-1]

        parser = LeanParser(heard, fill)
        while not transport.at_eof():
            await parser.parse(cast("bytes", await transport.read(0)))
    assert heard.said == [*((7, b"some.where", b"", body, header) for body in bodies), "ping"]
    assert sum(direct) > len(stream) // 2


@pytest.mark.parametrize("beyond", range(25))
async def test_no_byte_of_a_header_is_taken_for_the_payload(beyond: int) -> None:
    header, body = b"NATS/1.0\r\nA: b\r\n\r\n", bytes(range(250)) * 400
    sent = b"HMSG a 7 %d %d\r\n%s%s\r\n" % (len(header), len(header + body), header, body)
    heard, at = Heard(), sent.index(b"NATS") + beyond

    async def fill(into: memoryview) -> int:
        nonlocal at
        into[:] = sent[at : at + len(into)]
        at += len(into)
        return len(into)

    parser = LeanParser(heard, fill)
    await parser.parse(sent[:at])
    await parser.parse(sent[at:])
    assert heard.said == [(7, b"a", b"", body, header)]


async def test_a_connection_that_ends_within_a_payload_ends_the_reading() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"MSG some.where 7 900000\r\n" + bytes(400_000))
        await writer.drain()

    heard = Heard()
    async with connected(serve) as transport:
        parser = LeanParser(heard, transport.fill)
        while not transport.at_eof():
            await parser.parse(cast("bytes", await transport.read(0)))
    assert heard.said == []


async def test_what_a_payload_lacks_is_read_into_its_own_memory() -> None:
    incoming, payload = Incoming(), bytearray(100_000)
    filling = asyncio.create_task(incoming.fill(memoryview(payload)))
    await asyncio.sleep(0)
    for size in (60_000, 40_000):
        into = incoming.get_buffer(-1)
        assert into.obj is payload
        into[:size] = bytes([7]) * size
        incoming.buffer_updated(size)
    assert await filling == len(payload)
    assert payload == bytes([7]) * len(payload)
    assert incoming.get_buffer(-1).obj is not payload


@pytest.mark.parametrize("subject", [b"\xff", b"a\x0cb", b"a\x0b", b"HMSG", b"a" * 5_000])
async def test_any_bytes_are_a_subject(subject: bytes) -> None:
    heard = Heard()
    await LeanParser(heard).parse(b"MSG %s 7 back 1\r\nx\r\nPING\r\n" % subject)
    assert heard.said == [(7, subject, b"back", b"x", None), "ping"]


@pytest.mark.parametrize(
    "line",
    [
        *(b"MSG a", b"HMSG a 1 2", b"MSG a b c d", b"MSG a 1 -3", b"MSG a 1 99999999999"),
        *(b"HMSG a 1 3 2", b"nonsense", b"", b"x" * 5000, b"x" * 2**21),
    ],
)
async def test_a_line_that_is_none_is_a_protocol_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await LeanParser(Heard()).parse(line + b"\r\n")


@given(st.binary(max_size=20), st.lists(st.binary(max_size=20), min_size=1))
async def test_any_bytes_are_headers(status: bytes, lines: list[bytes]) -> None:
    found = headers_in(b"\r\n".join([status, *(b"name:" + line for line in lines)]))
    assert found
    assert all(isinstance(x, str) for pair in found.items() for x in pair)


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (b"NATS/1.0\r\nA: b\r\nC:d\r\n\r\n", {"A": "b", "C": "d"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503", "Description": ""}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 7\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Stream": "7"},
        ),
        (b"NATS/1.0\r\nA: \xff\r\n\r\n", {"A": "\ufffd"}),
    ],
)
def test_headers_are_read_as_they_were_sent(block: bytes, found: dict[str, str]) -> None:
    assert headers_in(block) == found


def test_the_pinned_nats_py_is_one_that_was_tested() -> None:
    pinned = [line for line in requires("skerry") or [] if line.startswith("nats-py")]
    assert pinned == [f"nats-py[nkeys]=={fast.TESTED_VERSIONS[-1]}"]
    assert version("nats-py") in fast.TESTED_VERSIONS


async def test_another_nats_py_gets_its_own_client_and_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(fast.new_client(), fast.FastClient)
    monkeypatch.setattr(fast, "version", lambda _: "2.99.0")
    fast._warn.cache_clear()
    with capture_logs() as logs:
        clients = [fast.new_client() for _ in range(2)]
    assert [type(client) for client in clients] == [Client, Client]
    (line,) = logs
    assert (line["event"], line["installed"]) == ("nats_client_untested", "2.99.0")
    assert "pip install nats-py==" in line["hint"]


def test_another_nats_py_is_not_trusted_with_a_login_that_needs_tls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast, "version", lambda _: "2.99.0")
    with pytest.raises(ConfigError, match=r"without the TLS you ask for: pip install nats-py=="):
        fast.new_client(needs_tls=True)


async def test_a_line_ends_where_it_ends() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\nPO")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.write(b"NG\r\nMSG")

    async with connected(serve) as transport:
        assert await transport.readline() == b"INFO {}\r\n"
        assert await transport.readline() == b"PONG\r\n"
        assert await transport.readline() == b"MSG"
        assert await transport.readline() == b""
        assert transport.at_eof()


async def test_a_line_without_end_is_given_out_where_the_buffer_ends() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(2 * BUFFER_BYTES))

    async with connected(serve) as transport:
        line = await transport.readline()
        assert 0 < len(line) <= BUFFER_BYTES


async def test_writing_waits_for_a_peer_that_does_not_read() -> None:
    read = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read.wait()
        while await reader.read(READ_BYTES):
            pass

    async with connected(serve) as transport:
        transport.writelines([bytes(2**20)] * 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await transport.drain()
        read.set()
        await transport.drain()


async def test_a_peer_that_is_gone_ends_reading_and_writing() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with connected(serve) as transport:
        with suppress(ConnectionError):
            assert await transport.read(0) == b""
        await transport.wait_closed()
        assert transport.at_eof()
        await transport.drain()


async def test_a_client_whose_last_words_find_no_server_says_that_it_is_lost() -> None:
    lost = asyncio.Event()

    async def note() -> None:
        lost.set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n")
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")

    async with listening(serve) as uri:
        client = fast.FastClient()
        await client.connect(uri.geturl(), allow_reconnect=False, disconnected_cb=note)
        client._pending.append(b"PING\r\n")
        client._pending_data_size += 6
        client.abort()
        async with asyncio.timeout(5):
            await lost.wait()


async def test_a_second_connection_replaces_the_first() -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        with suppress(ConnectionError):
            await reader.read()
        ended.set()

    transport = WideTransport()
    async with listening(serve) as uri:
        await transport.connect(uri, 0, 5)
        await transport.connect(uri, 0, 5)
        await ended.wait()
        assert await transport.readline() == b"hello\n"
        transport.abort()
        await transport.wait_closed()


async def test_what_came_before_tls_does_not_count_as_if_it_came_through_it() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO {}\r\n+OK\r\n")
        await reader.read()

    async with connected(serve) as transport:
        assert await transport.readline() == b"INFO {}\r\n"
        with pytest.raises(ConnectionError, match="before TLS"):
            await transport.connect_tls("localhost", ssl.create_default_context(), 0, 5)


@pytest.mark.parametrize("answer", ["reset", "silence", "nonsense"])
async def test_a_handshake_that_fails_leaves_nothing_to_wait_for(answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if answer == "reset":
            writer.transport.abort()
        if answer == "nonsense":
            writer.write(b"this is no handshake\r\n")
        with suppress(ConnectionError):
            await reader.read()

    async with connected(serve) as transport:
        with pytest.raises((OSError, TimeoutError)):
            await transport.connect_tls("localhost", ssl.create_default_context(), 0, 1)
        await transport.wait_closed()
        transport.close()


async def deaf(asked: asyncio.Event) -> None:
    """Wait until cancelled, and go on as if nothing had happened."""
    asked.set()
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def run(asked: asyncio.Event, error: Exception | None = None) -> str:
    with cancellable():
        await deaf(asked)
        if error is not None:
            raise error
    return "ran on"


async def test_a_dropped_cancellation_is_heeded() -> None:
    asked = asyncio.Event()
    task = asyncio.ensure_future(run(asked))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [None, NoAnswer("region eu has no link to the hub")])
async def test_a_dropped_timeout_is_a_timeout_whatever_comes_of_it(error: Exception | None) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run(asyncio.Event(), error)


async def test_without_a_cancellation_nothing_happens() -> None:
    with cancellable():
        await asyncio.sleep(0)
