"""What tests do to a nats-server without the bus: its API, and bytes that no library would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlparse

import nats

CONNECT = (
    b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"protocol":1}\r\nSUB raw.ack 1\r\n'
)


class RawPublisher:
    """One connection that speaks the protocol by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def publish(self, subject: bytes, payload: bytes = b"", header: bytes = b"") -> None:
        """Send one message and wait until it is stored; raises what the server says against it."""
        sizes = b"%d" % (len(header) + len(payload))
        verb, sizes = (b"HPUB", b"%d %s" % (len(header), sizes)) if header else (b"PUB", sizes)
        parts = (verb, subject, b"raw.ack", sizes)
        self._writer.write(b"%s\r\n%s%s\r\n" % (b" ".join(parts), header, payload))
        while not (line := await self._reader.readline()).startswith(b"MSG"):
            if not line or line.startswith(b"-ERR"):
                raise ConnectionError(line)
        answer = await self._reader.readline()
        if b'"error"' in answer:
            raise ConnectionError(answer)


@asynccontextmanager
async def raw_publisher(url: str) -> AsyncGenerator[RawPublisher]:
    """Connect to the first of some comma-separated servers."""
    at = urlparse(url.split(",", maxsplit=1)[0])
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        await reader.readline()
        writer.write(CONNECT)
        yield RawPublisher(reader, writer)
    finally:
        writer.close()


async def js_api(url: str, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call the JetStream API of a server."""
    client = await nats.connect(url.split(","))
    try:
        payload = json.dumps(body).encode() if body else b""
        reply: dict[str, Any] = json.loads(
            (await client.request(f"$JS.API.{name}", payload, timeout=10)).data
        )
    finally:
        await client.close()
    assert "error" not in reply, reply
    return reply


async def forget_streams(url: str) -> None:
    """Delete every stream: those that replicate cost CPU for as long as they exist."""
    names: list[str] = (await js_api(url, "STREAM.NAMES"))["streams"] or []
    for name in names:
        await js_api(url, f"STREAM.DELETE.{name}")


async def delete_consumers(url: str, stream: str) -> int:
    """Delete every consumer of a stream; returns how many there were."""
    names: list[str] = (await js_api(url, f"CONSUMER.NAMES.{stream}"))["consumers"] or []
    for name in names:
        await js_api(url, f"CONSUMER.DELETE.{stream}.{name}")
    return len(names)
