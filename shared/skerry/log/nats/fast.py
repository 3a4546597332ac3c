# pyright: basic
"""A client in place of nats-py's own, which takes in large messages with few copies.

It also survives any bytes in a stored message. It relies on private names of nats-py, so it is used
only with the versions that it was tested with; with any other nats-py's own client is used.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.metadata import version
from io import BytesIO
from itertools import groupby
from typing import Any, NamedTuple, cast
from urllib.parse import ParseResult

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import Transport
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from skerry.errors import ConfigError

log = structlog.get_logger()

TESTED_VERSIONS = ("2.16.0",)
"""The versions of nats-py whose private names this file knows; pyproject.toml pins one of them."""
READ_BYTES = 64 * 1024
"""The most that one read takes from the socket, except for the rest of a payload, which is read
into the payload itself. nats-py's own transport takes 32 KiB, and asyncio's streams copy all of it
twice: half of what it costs a client to take in messages of 512 KiB."""
BUFFER_BYTES = 2 * READ_BYTES
"""The socket is not read while less than READ_BYTES of this is free."""
DIRECT_BYTES = 16 * 1024
"""A shorter rest of a payload is copied."""
LONGEST_LINE = 1024**2
"""No line of the protocol is longer; the longest is INFO with the addresses of a cluster."""
LINE_BYTES = 1024
"""Bytes that are searched at a time for the end of a line; most lines are shorter."""
LONGEST_MESSAGE = 64 * 1024**2
"""The most that a server can be set to take as one message."""
LARGE_BYTES = 64 * 1024
"""A payload of this many bytes or more is sent without a copy: below, a copy costs less than a
send of its own."""
SPACES = str.maketrans("\r\n", "  ")
SHUTDOWN_S = 2.0
"""How long a server that is left may take to say goodbye through TLS; asyncio would wait 30 s."""
DEFAULT_PORT = 4222


class Incoming(asyncio.BufferedProtocol):
    """Bytes that have come and are not read yet, in the buffer that the socket was read into."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._buffer = bytearray(BUFFER_BYTES)
        self._filled = self._given = 0
        self._into = memoryview(b"")
        self._ended = False
        self._failure: Exception | None = None
        self._paused = False
        self._came, self._writable, self.closed = (asyncio.Event() for _ in range(3))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._into or memoryview(self._buffer)[self._filled : self._filled + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._into:
            self._into = self._into[nbytes:]
            if self._into:
                return
        else:
            self._filled += nbytes
            if BUFFER_BYTES - self._filled < READ_BYTES and not self._paused:
                self._paused = True
                self.transport.pause_reading()
        self._came.set()

    def eof_received(self) -> None:
        self._ended = True
        self._came.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._failure = exc
        self.eof_received()
        self._writable.set()
        self.closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def start_tls(self, context: ssl.SSLContext, hostname: str | None) -> None:
        """Switch to TLS; nothing that came before may count as if it had come through TLS."""
        if self._filled:
            msg = "The server sent more than its greeting before TLS began."
            raise ConnectionError(msg)
        secured = await asyncio.get_running_loop().start_tls(
            self.transport,
            self,
            context,
            server_hostname=hostname,
            ssl_shutdown_timeout=SHUTDOWN_S,
        )
        if secured is None:
            msg = "The connection was lost while TLS began."
            raise ConnectionError(msg)
        self.transport = secured

    @property
    def at_eof(self) -> bool:
        """Whether nothing is left, and nothing more can come."""
        return self._ended and self._filled == self._given

    async def read(self) -> memoryview:
        """Return what has come, once something has; nothing at the end of an orderly connection.

        It is in the buffer that the socket is read into, and stays until the next call.
        """
        self._drop(self._given)
        while not self._filled and not self._ended:
            await self._more()
        if not self._filled and self._failure is not None:
            raise self._failure
        self._given = self._filled
        return memoryview(self._buffer)[: self._filled]

    async def fill(self, into: memoryview) -> int:
        """Read what comes next into memory, until it is full or nothing more can come.

        Returns how many bytes came. What was read before counts as used.
        """
        self._drop(self._given)
        size = min(self._filled, len(into))
        into[:size] = memoryview(self._buffer)[:size]
        self._drop(size)
        self._into = into[size:]
        try:
            while self._into and not self._ended:
                await self._more()
            return len(into) - len(self._into)
        finally:
            self._into = memoryview(b"")

    async def readline(self) -> bytes:
        """Return the next line with its end, or at the end of the connection what there is."""
        self._drop(self._given)
        while (end := self._buffer.find(b"\n", 0, self._filled)) < 0:
            if self._ended or self._paused:
                return bytes(await self.read())
            await self._more()
        line = bytes(memoryview(self._buffer)[: end + 1])
        self._drop(end + 1)
        return line

    def _drop(self, size: int) -> None:
        """Forget the first bytes; there is room for others."""
        if 0 < size < self._filled:
            self._buffer[: self._filled - size] = self._buffer[size : self._filled]
        self._filled, self._given = self._filled - size, 0
        if self._paused and not self._ended:
            self._paused = False
            self.transport.resume_reading()  # from the next turn of the loop on

    async def drain(self) -> None:
        """Wait until more may be written, or the peer is gone.

        Reading reports a lost peer. An error from here would end nats-py's ``close`` half way.
        """
        await self._writable.wait()

    async def _more(self) -> None:
        self._came.clear()
        await self._came.wait()


class WideTransport(Transport):
    """TCP and TLS for nats-py with few copies and a large read buffer.

    It is true from the start, because nats-py would replace a transport that is false by its own.
    """

    def __init__(self) -> None:
        self._incoming: Incoming | None = None

    def __bool__(self) -> bool:
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:  # noqa: ARG002 - nats-py's signature
        self.abort()  # nats-py drops the connection that never got a greeting
        async with asyncio.timeout(connect_timeout):
            _, self._incoming = await asyncio.get_running_loop().create_connection(
                Incoming, uri.hostname or "", uri.port or DEFAULT_PORT
            )

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,  # noqa: ARG002 - nats-py's signature
        connect_timeout: int,
    ) -> None:
        incoming = self._open
        try:
            async with asyncio.timeout(connect_timeout):
                await incoming.start_tls(ssl_context, uri if isinstance(uri, str) else uri.hostname)
        except BaseException as error:
            # asyncio leaves a protocol whose handshake failed in the belief that it is connected.
            incoming.transport.abort()
            incoming.connection_lost(error if isinstance(error, Exception) else None)
            raise

    def abort(self) -> None:
        """Cut the connection without waiting for what is still to be sent."""
        if self._incoming is not None:
            self._incoming.transport.abort()

    @property
    def _open(self) -> Incoming:
        if self._incoming is None:
            msg = "There is no connection yet."
            raise ConnectionError(msg)
        return self._incoming

    def write(self, payload: bytes) -> None:
        self._open.transport.write(payload)

    def writelines(self, payload: list[bytes | memoryview]) -> None:  # type: ignore[override] # views
        """Write pieces one after the other; what the socket takes of a view is not copied."""
        for is_view, pieces in groupby(payload, lambda piece: isinstance(piece, memoryview)):
            for piece in pieces if is_view else [b"".join(pieces)]:
                self._open.transport.write(piece)

    # A view is enough: the parser copies what it keeps.
    async def read(self, buffer_size: int) -> memoryview:  # type: ignore[override] # noqa: ARG002 - for bytes
        return await self._open.read()

    async def fill(self, into: memoryview) -> int:
        return await self._open.fill(into)

    async def readline(self) -> bytes:
        return await self._open.readline()

    async def drain(self) -> None:
        await self._open.drain()

    async def wait_closed(self) -> None:
        if self._incoming is not None:
            await self._incoming.closed.wait()

    def close(self) -> None:
        # Not twice: a TLS transport that is closed again cannot be aborted any more.
        if self._incoming is not None and not self._incoming.transport.is_closing():
            self._incoming.transport.close()

    def at_eof(self) -> bool:
        return self._open.at_eof


Fill = Callable[[memoryview], Awaitable[int]]
"""Reads what comes next into memory, and returns how many bytes came: fewer at the end."""


class Announced(NamedTuple):
    """The contents of the line before a message; ``size`` is in bytes, its header included."""

    sid: int
    subject: bytes
    reply: bytes
    size: int
    header_size: int


def announced_by(line: bytes) -> Announced:
    """Read the line before a message; ValueError if it is none, or no message can be that long."""
    kind, subject, sid, *reply, last = line[:-2].split(b" ")
    size, header_size = int(last), int(reply.pop()) if kind == b"HMSG" else 0
    if not 0 <= header_size <= size <= LONGEST_MESSAGE:
        raise ValueError
    return Announced(int(sid), subject, b"".join(reply[:1]), size, header_size)


class Filling(BytesIO):
    """``size`` bytes that come in pieces; ``getvalue`` gives out the memory that they came into."""

    def __init__(self, size: int) -> None:
        super().__init__(b"")
        self.left = size
        if size:  # all of it at once: what grows is copied
            self.seek(size - 1)
            self.write(b"\0")
            self.seek(0)

    def take(self, data: memoryview) -> memoryview:
        """Take as much of ``data`` as there is room for; returns the rest."""
        taken = self.write(data[: self.left])
        self.left -= taken
        return data[taken:]

    async def take_from(self, fill: Fill) -> None:
        """Take what is missing, or as much of it as comes."""
        with self.getbuffer() as whole:
            self.left -= await fill(whole[len(whole) - self.left :])


class LeanParser(Parser):
    """A parser that copies little of a large payload, and takes any bytes for a subject.

    nats-py's own parser takes a form feed for the end of a subject, and calls that a protocol
    error. Here it still reads whatever is not a message.
    """

    def __init__(self, client: object, fill: Fill | None = None) -> None:
        super().__init__(client)
        self._fill = fill

    def reset(self) -> None:
        self.buf = bytearray()
        """A line that is not all there."""
        self._announced: Announced | None = None
        """The message whose bytes come next."""
        self._parts: list[Filling] = []
        """Header, payload and end of that message, where it comes in pieces."""
        self._others = Parser(self.nc)

    async def parse(self, data: bytes | memoryview = b"") -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = await (self._message if self._announced else self._line)(rest)
        except (ValueError, IndexError) as error:
            msg = "nats: unknown protocol"
            raise ProtocolError(msg) from error

    async def _line(self, data: memoryview) -> memoryview:
        """Read a line, if all of it is there; returns what follows. ValueError if it is none."""
        buf, before = self.buf, len(self.buf)
        buf += data[:LINE_BYTES]  # and not all of what may follow
        if (end := buf.find(b"\r\n", max(0, before - 1)) + 2) < 2:
            if len(buf) < LONGEST_LINE:
                return data[LINE_BYTES:]
            raise ValueError
        line = bytes(buf[:end])
        buf.clear()
        if line.startswith((b"MSG ", b"HMSG ")):
            self._announced = announced_by(line)
        else:
            await self._others.parse(line)
            if self._others.buf:
                raise ValueError
        return data[end - before :]

    async def _message(self, data: memoryview) -> memoryview:
        """Read what a line announced, if all of it is there; returns what follows."""
        sid, subject, reply, size, header_size = cast("Announced", self._announced)
        if not self._parts and len(data) >= size + 2:
            header, payload = bytes(data[:header_size]), bytes(data[header_size:size])
            data = data[size + 2 :]
        else:
            self._parts = self._parts or [Filling(n) for n in (header_size, size - header_size, 2)]
            for part in self._parts:
                data = part.take(data)
                if part.left >= DIRECT_BYTES and self._fill is not None:
                    await part.take_from(self._fill)
                if part.left:  # the next bytes belong to this part
                    return data
            header, payload, _ = (part.getvalue() for part in self._parts)
        self._announced, self._parts = None, []
        client: Any = self.nc
        await client._process_msg(sid, subject, reply, payload, header or None)  # noqa: SLF001 - as its parser does
        return data


def headers_in(block: bytes) -> dict[str, str]:
    """Read a header block, status line included, whatever bytes it has."""
    first, *lines = block.split(b"\r\n")
    found: dict[str, str] = {}
    code, _, description = first[len(b"NATS/1.0") :].strip().partition(b" ")
    if code.isdigit():
        found |= {"Status": code.decode(), "Description": description.decode(errors="replace")}
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode(errors="replace")] = value.strip().decode(errors="replace")
    return found


def header_block(headers: Mapping[str, str]) -> bytes:
    """Return the header block of a message, as nats-py writes it: no value begins another line."""
    lines = (f"{name}: {value.strip().translate(SPACES)}" for name, value in headers.items())
    return "\r\n".join(("NATS/1.0", *lines, "", "")).encode()


class FastClient(Client):
    """nats-py's client on our transport and parser; no bytes of a message end its reading."""

    def __init__(self, *, needs_tls: bool = False) -> None:
        super().__init__()
        self._needs_tls = needs_tls
        self._transport = WideTransport()
        self._ps = LeanParser(self, self._transport.fill)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 - nats-py's signature
        # Checked before anything is sent: somebody in between could have taken the offer away.
        offers = info.get("tls_required") or self.options["tls_handshake_first"]
        if initial_connection and self._needs_tls and not offers:
            msg = "the server does not speak TLS, which the settings ask for"
            raise ConnectionError(msg)
        await super()._process_info(info, initial_connection)

    async def _send_publish(
        self,
        subject: str,
        reply: str,
        payload: bytes,
        payload_size: int,
        headers: dict[str, Any] | None,
    ) -> None:
        if payload_size < LARGE_BYTES or not headers:
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        # nats-py copies a payload three times before the socket takes it.
        block = header_block(headers)
        line = f"HPUB {subject} {reply} {len(block)} {len(block) + payload_size}\r\n"
        before = line.encode() + block
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        pending: list[Any] = self._pending
        pending += (before, memoryview(payload))
        self._pending_data_size += len(before) + payload_size
        await self._send_command(b"\r\n")  # which adds it before anybody else can add theirs
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        # nats-py would queue it for a task that calls back. All our subscriptions have a callback.
        subscription = self._subs.get(sid)
        if subscription is None or (arrive := subscription._cb) is None:  # noqa: SLF001 - see above
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        found = (headers_in(headers) or None) if headers else None
        await arrive(self._build_message(sid, subject, reply, data, found))

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        names = subject.decode(errors="replace"), reply.decode(errors="replace")
        return Msg(self, *names, data=data, headers=headers, _sid=sid)

    def abort(self) -> None:
        """Cut the connection to a server that hangs, without waiting for what is unsent."""
        if isinstance(self._transport, WideTransport):
            self._transport.abort()


def server_info(client: Client) -> dict[str, Any]:
    """Return what the server that a client has reached says of itself."""
    return client._server_info  # noqa: SLF001 - nowhere else


def new_client(*, needs_tls: bool = False) -> Client:
    """Return a client that is not connected yet; with ``needs_tls`` it sends nothing without TLS.

    nats-py's own client goes on in clear text where the server offers no TLS: raises ConfigError
    rather than take that one.
    """
    installed = version("nats-py")
    if installed in TESTED_VERSIONS:
        return FastClient(needs_tls=needs_tls)
    if needs_tls:
        known = TESTED_VERSIONS[-1]
        why = f"nats-py {installed} is not tested, and could log in without the TLS you ask for"
        msg = f"{why}: pip install nats-py=={known}"
        raise ConfigError(msg)
    _warn(installed)
    return Client()


@cache
def _warn(installed: str) -> None:
    """Log once that nats-py's own client is used."""
    known = TESTED_VERSIONS[-1]
    hint = f"reading is slower, and bad bytes can stop it: pip install nats-py=={known}"
    log.warning("nats_client_untested", installed=installed, tested=known, hint=hint)
