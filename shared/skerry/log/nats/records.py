# pyright: basic
"""Stored messages as NATS hands them out, in two shapes: direct get and consumer delivery."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from skerry.log.base import MSG_ID, Record

PLAIN_TOKENS = 9
"""Tokens of ``$JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>``; with a
domain there are two more before the stream."""


class Delivery(NamedTuple):
    """Where a delivered message stands: in its stream, in its consumer, in time."""

    stream_seq: int
    consumer_seq: int
    time_ns: int


def nanoseconds(stamp: str) -> int:
    """Return an RFC 3339 UTC time with up to nine decimals as nanoseconds since the epoch."""
    whole, _, rest = stamp.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * 1_000_000_000 + int(rest.ljust(9, "0")[:9] or 0)


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a message's headers without the broker's, except its message id."""
    if not headers:
        return {}
    return {k: v for k, v in headers.items() if k == MSG_ID or not k.startswith("Nats-")}


def status_of(msg: Msg) -> str:
    """Return the status code of a message that carries one and nothing else, or ''."""
    if msg.data or not msg.headers:
        return ""
    return msg.headers.get("Status", "")


def direct_record(msg: Msg) -> Record:
    """Read the answer to a direct get."""
    headers = msg.headers or {}
    return Record(
        subject=headers["Nats-Subject"],
        sequence=int(headers["Nats-Sequence"]),
        time_ns=nanoseconds(headers["Nats-Time-Stamp"]),
        payload=msg.data,
        headers=own_headers(headers),
    )


def leader_record(message: Mapping[str, Any]) -> Record:
    """Read the message in a leader's answer, which is JSON with everything in base64."""
    lines = base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return Record(
        subject=message["subject"],
        sequence=message["seq"],
        time_ns=nanoseconds(message["time"]),
        payload=base64.b64decode(message.get("data", "")),
        headers=own_headers({name: value.strip() for name, _, value in pairs}),
    )


def delivery_of(msg: Msg) -> Delivery:
    """Read the sequences and the time out of a delivered message's reply subject."""
    tokens = msg.reply.split(".")
    at = 5 if len(tokens) == PLAIN_TOKENS else 7
    return Delivery(int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 2]))


def delivered_record(msg: Msg, delivery: Delivery) -> Record:
    """Read a message that a consumer delivered."""
    return Record(
        msg.subject, delivery.stream_seq, delivery.time_ns, msg.data, own_headers(msg.headers)
    )
