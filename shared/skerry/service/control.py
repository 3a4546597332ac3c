"""Commands to a running process over a unix socket in its run folder: one JSON per line.

The request is ``{"op": ...}``, the answer ``{"ok": true, ...}`` or ``{"ok": false, "error":
"..."}``. Only the user who owns the socket may connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, cast

from skerry.errors import SkerryError

CONTROL = "control.sock"
"""The socket of the command that keeps a cluster running."""

LONGEST_PATH = 100
"""Bytes; the kernel takes 107."""

Message = dict[str, Any]
Answer = Callable[[Message], Awaitable[Message]]


class ControlError(SkerryError):
    """A command was not carried out; the message says why."""


@contextlib.asynccontextmanager
async def listening(path: Path, answer: Answer) -> AsyncGenerator[None]:
    """Answer commands on this socket for as long as the context lasts.

    A SkerryError that ``answer`` raises is sent as the answer.
    """
    _remove(path)
    talks: set[asyncio.Task[None]] = set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            talks.add(task)
            task.add_done_callback(talks.discard)
        ends = (ConnectionError, asyncio.CancelledError)  # else asyncio logs it before Python 3.12
        with contextlib.closing(writer), contextlib.suppress(*ends):
            while line := await reader.readline():
                try:
                    reply = {"ok": True, **await answer(cast("Message", json.loads(line)))}
                except (SkerryError, ValueError, KeyError, TypeError) as error:
                    reply = {"ok": False, "error": str(error) or type(error).__name__}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()

    with _address(path) as address:
        server = await asyncio.start_unix_server(talk, address)
    try:
        yield
    finally:
        server.close()
        for task in tuple(talks):
            task.cancel()
        await asyncio.gather(*talks, return_exceptions=True)
        _remove(path)


async def ask(path: Path, request: Message, timeout_s: float = 10.0) -> Message:
    """Send one command and return its answer.

    Raises ControlError when no process answers there, or when the answer is a refusal.
    """
    try:
        async with asyncio.timeout(timeout_s):
            with _address(path) as address:
                reader, writer = await asyncio.open_unix_connection(address)
            with contextlib.closing(writer):
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                reply = cast("Message", json.loads(await reader.readline()))
    except (OSError, ValueError, TimeoutError) as error:
        msg = f"No cluster answers at {path} ({str(error) or 'too late'}): is it still running?"
        raise ControlError(msg) from error
    if not reply.get("ok"):
        raise ControlError(str(reply.get("error", "It was refused without a reason.")))
    return reply


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _address(path: Path) -> Generator[str]:
    """Yield a name of the socket that is short enough for the kernel, however deep it lies."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
