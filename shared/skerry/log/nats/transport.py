# pyright: basic
"""nats-py's transport, parser and treatment of cancellations, mended."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import Transport
from nats.protocol.parser import Parser

READ_BYTES = 512 * 1024
"""The most that one read takes from the socket. nats-py's own transport takes 32 KiB, and asyncio's
streams copy all of it twice: half of what it costs a client to take in messages of 512 KiB. It is
copied on from a processor's own cache, if that holds it."""
SHUTDOWN_S = 2.0
"""How long a server that is left may take to say goodbye through TLS; asyncio would wait 30 s."""
DEFAULT_PORT = 4222
LEAST_BYTES = 64 * 1024
"""Nothing is taken from the socket while there is less room than this."""


class Incoming(asyncio.BufferedProtocol):
    """What has come and is not read yet, in the buffer that the socket was read into."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._buffer = bytearray(READ_BYTES)
        self._filled = 0
        self._ended = False
        self._failure: Exception | None = None
        self._paused = False
        self._came = asyncio.Event()
        self._writable = asyncio.Event()
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if READ_BYTES - self._filled < LEAST_BYTES and not self._paused:
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
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def start_tls(self, context: ssl.SSLContext, hostname: str | None) -> None:
        """Go on through TLS; nothing that came before may count as if it had come through it."""
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

    def at_eof(self) -> bool:
        """Whether nothing is left, and nothing more can come."""
        return self._ended and not self._filled

    async def read(self) -> memoryview:
        """Return what has come, once something has; nothing at the end of an orderly connection.

        It is in the buffer that the socket is read into: use it before anything is waited for.
        """
        while not self._filled and not self._ended:
            await self._more()
        if not self._filled and self._failure is not None:
            raise self._failure
        came, self._filled = memoryview(self._buffer)[: self._filled], 0
        self._resume()
        return came

    async def readline(self) -> bytes:
        """Return the next line with its end, or at the end of the connection what there is."""
        while (end := self._buffer.find(b"\n", 0, self._filled)) < 0:
            if self._ended or self._paused:
                return bytes(await self.read())
            await self._more()
        size = end + 1
        line = bytes(memoryview(self._buffer)[:size])
        self._buffer[: self._filled - size] = self._buffer[size : self._filled]
        self._filled -= size
        self._resume()
        return line

    async def drain(self) -> None:
        """Wait until what was written may be followed by more; raises when nobody is there."""
        await self._writable.wait()
        if self._closed.is_set():
            raise self._failure or ConnectionResetError

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def _more(self) -> None:
        self._came.clear()
        await self._came.wait()

    def _resume(self) -> None:
        """Take more from the socket again, from the next turn of the loop on."""
        if self._paused and not self._ended:
            self._paused = False
            self.transport.resume_reading()


class WideTransport(Transport):
    """TCP and TLS for nats-py with few copies and a large read buffer.

    It is true from the start: nats-py would put its own in the place of one that is not.
    """

    def __init__(self) -> None:
        self._incoming: Incoming | None = None

    def __bool__(self) -> bool:
        return True

    async def connect(
        self,
        uri: ParseResult,
        buffer_size: int,  # noqa: ARG002 - nats-py's signature
        connect_timeout: int,
    ) -> None:
        self.abort()  # nats-py drops the connection that never got a greeting
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(connect_timeout):
            _, self._incoming = await loop.create_connection(
                Incoming, uri.hostname or "", uri.port or DEFAULT_PORT
            )

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,  # noqa: ARG002 - nats-py's signature
        connect_timeout: int,
    ) -> None:
        hostname = uri if isinstance(uri, str) else uri.hostname
        incoming = self._open
        try:
            async with asyncio.timeout(connect_timeout):
                await incoming.start_tls(ssl_context, hostname)
        except BaseException as error:
            # asyncio does not tell a protocol whose handshake failed that its connection is lost.
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

    def writelines(self, payload: list[bytes]) -> None:
        self._open.transport.writelines(payload)

    # nats-py only ever copies what it is given, so that a view does.
    async def read(self, buffer_size: int) -> memoryview:  # type: ignore[override]  # noqa: ARG002
        return await self._open.read()

    async def readline(self) -> bytes:
        return await self._open.readline()

    async def drain(self) -> None:
        await self._open.drain()

    async def wait_closed(self) -> None:
        if self._incoming is not None:
            await self._incoming.wait_closed()

    def close(self) -> None:
        # Not twice: a TLS transport that is closed again cannot be aborted any more.
        if self._incoming is not None and not self._incoming.transport.is_closing():
            self._incoming.transport.close()

    def at_eof(self) -> bool:
        return self._open.at_eof()


class Backlog(bytearray):
    """What has come and is not parsed yet; a slice of it is a view, where bytearray's is a copy."""

    def __getitem__(self, key: Any) -> Any:
        return memoryview(self)[key]


class LeanParser(Parser):
    """nats-py's parser, which makes each payload of a slice of its buffer: one copy less."""

    def reset(self) -> None:
        super().reset()
        self.buf = Backlog()


@contextmanager
def cancellable() -> Generator[None]:
    """Cancel the running task after all if a cancellation was dropped inside.

    nats-py drops one that comes while it flushes, and its asyncio.wait_for, on Python 3.11, one
    that comes together with the answer: the caller would run on for ever.
    """
    cancels = _cancels()
    yield
    if _cancels() > cancels:
        raise asyncio.CancelledError


def _cancels() -> int:
    """Return how often the running task has been asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
