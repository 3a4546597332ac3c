# pyright: basic
"""The newest message of many subjects in one request: JetStream's batch get, a page at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from skerry.log.base import Record
from skerry.log.nats.connection import Connection
from skerry.log.nats.errors import NoAnswer
from skerry.log.nats.records import direct_record, status_of
from skerry.log.nats.transport import cancellable

MOST_SUBJECTS = 1024
"""Subjects that one batch get may match; the server refuses more."""
PAGE_BYTES = 16 * 1024**2


async def batch_get(
    connection: Connection, stream: str, subjects: list[str], sequence: int, deadline: float
) -> tuple[list[Record], dict[str, str]]:
    """Return one page of records and the headers of the status message that ends it.

    Raises NoAnswer when there was none in time.
    """
    client = await connection.ready(deadline)
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = client.new_inbox()
    body = {"multi_last": subjects, "batch": MOST_SUBJECTS, "max_bytes": PAGE_BYTES}
    if sequence:
        body["seq"] = sequence
    page: list[Record] = []
    try:
        subscription = await client.subscribe(
            inbox, cb=arrived.put, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            path = f"$JS.API.DIRECT.GET.{stream}"
            with cancellable():
                await client.publish(path, json.dumps(body).encode(), inbox)
            while True:
                async with asyncio.timeout(connection.options.request_timeout_s):
                    msg = await arrived.get()
                if status := status_of(msg):
                    headers = {str(k): v for k, v in (msg.headers or {}).items()}
                    if status == "503":
                        raise NoAnswer(status, sent=False)
                    return page, headers
                page.append(direct_record(msg))
        finally:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()
    except (TimeoutError, NatsError) as e:
        raise NoAnswer(str(e), sent=True) from e
