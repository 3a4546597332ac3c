"""JetStream's own formats, written and read: settings, listings, stored messages and errors.

A stored message comes in three formats: a direct get's answer, a leader's JSON and what a consumer
delivers. Its sender cannot make it look like a status: the broker's own marks, a sequence or an
acknowledgement's subject, are looked at first.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nats.aio.msg import Msg

from skerry.errors import BrokerUnfit, BusError, StorageFull
from skerry.log.base import (
    MSG_ID,
    PER_SUBJECT,
    MirrorInfo,
    Record,
    Retention,
    Storage,
    StreamInfo,
    StreamSpec,
)
from skerry.log.client import Extent, Message
from skerry.log.nats.fast import headers_in
from skerry.log.streams import normal

NANOSECONDS = 1_000_000_000
IDLE_CONSUMER_NS = 60 * NANOSECONDS
"""An idle consumer is removed after this time, whatever its client asked for: a stream has room for
a thousand."""
EXPECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECT_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
SEQUENCE = "Nats-Sequence"
"""The header of each message that answers a direct get: the server adds it after the sender's."""
DELIVERED = "$JS.ACK."
"""The beginning of the reply subject of each message that a consumer delivers."""
PLAIN_TOKENS = 9
"""Tokens of ``$JS.ACK.<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>``; with a
domain there are two more before the stream."""

STREAM_NOT_FOUND = 10059
STREAM_NAME_IN_USE = 10058
NOT_THERE = frozenset({10037, STREAM_NOT_FOUND})
WRONG_SEQUENCE = 10071
IN_PROCESS = 10164
"""A replicated stream has a write under way whose expectation names the same subject: whether this
one's holds is not known yet, although the server calls it a wrong last sequence."""
NO_PEERS = 10005
NO_ROOM = frozenset({10002, NO_PEERS, 10023, 10028, 10047, 10077, 10110, 10120})
"""Account, server, memory and file limits, a stream's own bounds, and a store that failed."""
TRANSIENT = frozenset(
    {10004, NO_PEERS, 10008, 10009, 10013, 10118, 10158, 10163, IN_PROCESS, 10167, 10194}
)
"""A cluster without a leader or without enough nodes, a stream that is offline, a check that is not
ready yet, our own first attempt still under way, a queue that is full for a moment."""
NO_FOLDER = 10049
"""A stream's folder could not be made; the first time a broker may just be removing its parent.

It does so once for an account, after it has tried to write there.
"""
NOT_CLUSTERED = 10074


def nanoseconds(stamp: str) -> int:
    """Return an RFC 3339 UTC time with up to nine decimals as nanoseconds since the epoch."""
    whole, _, rest = stamp.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * NANOSECONDS + int(rest.ljust(9, "0")[:9] or 0)


def sent_headers(message: Message) -> dict[str, str]:
    """Return the headers of a publish, with its id and its expectation."""
    headers = dict(message.headers)
    if message.msg_id is not None:
        headers[MSG_ID] = message.msg_id
    if message.expect is not None:
        headers[EXPECT_SEQUENCE] = str(message.expect.sequence)
        if message.expect.subject != message.subject:
            headers[EXPECT_SUBJECT] = message.expect.subject
    return headers


def status_of(msg: Msg) -> str:
    """Return the broker's status code if that is all the message is, or ''."""
    headers = msg.headers
    if msg.data or not headers or SEQUENCE in headers or msg.reply.startswith(DELIVERED):
        return ""
    return headers.get("Status", "")


def direct_record(msg: Msg) -> Record:
    """Read the answer to a direct get."""
    headers = msg.headers or {}
    return Record(
        subject=headers["Nats-Subject"],
        sequence=int(headers[SEQUENCE]),
        time_ns=nanoseconds(headers["Nats-Time-Stamp"]),
        payload=msg.data,
        headers=_own(headers),
    )


def leader_record(message: Mapping[str, Any]) -> Record:
    """Read the message in a leader's answer, which is JSON with everything in base64."""
    return Record(
        subject=message["subject"],
        sequence=message["seq"],
        time_ns=nanoseconds(message["time"]),
        payload=base64.b64decode(message.get("data", "")),
        headers=_own(headers_in(base64.b64decode(message.get("hdrs", "")))),
    )


def delivery_of(msg: Msg) -> tuple[int, Record]:
    """Return the number that a consumer gave to a delivered message, and the message."""
    tokens = msg.reply.split(".")
    at = 5 if len(tokens) == PLAIN_TOKENS else 7
    sequence, number, time_ns = (int(token) for token in tokens[at : at + 3])
    return number, Record(msg.subject, sequence, time_ns, msg.data, _own(msg.headers))


def _own(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a message's headers without the broker's, except its message id."""
    if not headers:
        return {}
    return {k: v for k, v in headers.items() if k == MSG_ID or not k.startswith("Nats-")}


def config_of(spec: StreamSpec) -> dict[str, Any]:
    """Return the stream's settings as JetStream wants them.

    Only a window drops its oldest messages: elsewhere a bound refuses new ones. What is kept for
    ever cannot be deleted or purged message by message. Its small records repeat each other's names
    and so take a third of the room compressed (when a block is full); payloads are packed already.
    """
    for_ever, spec = spec.retention is Retention.EVERYTHING, normal(spec)
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "limits",
        "storage": spec.storage.value,
        "discard": "old" if spec.retention is Retention.WINDOW else "new",
        "max_msgs_per_subject": PER_SUBJECT.get(spec.retention, -1),
        "max_bytes": spec.max_bytes,
        "max_msg_size": spec.max_message_bytes,
        "max_age": int(spec.max_age_s * NANOSECONDS),
        "num_replicas": spec.replicas,
        "duplicate_window": int(spec.duplicate_window_s * NANOSECONDS),
        "allow_direct": True,
        "deny_delete": for_ever,
        "deny_purge": for_ever,
        "compression": "s2" if for_ever else "none",
        "consumer_limits": {"inactive_threshold": IDLE_CONSUMER_NS},
    }


def spec_of(config: Mapping[str, Any]) -> StreamSpec:
    """Return the spec that a stream's settings in JetStream stand for."""
    per_subject = {most: retention for retention, most in PER_SUBJECT.items()}
    retention = Retention.EVERYTHING if config.get("discard") == "new" else Retention.WINDOW
    retention = per_subject.get(config.get("max_msgs_per_subject", -1), retention)
    return StreamSpec(
        name=config["name"],
        subjects=tuple(config.get("subjects", ())),
        retention=retention,
        storage=Storage(config["storage"]),
        max_bytes=config.get("max_bytes", -1),
        max_message_bytes=config.get("max_msg_size", -1),
        max_age_s=config.get("max_age", 0) / NANOSECONDS,
        replicas=config.get("num_replicas", 1),
        duplicate_window_s=config.get("duplicate_window", 0) / NANOSECONDS,
    )


def hidden_changes(spec: StreamSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences in settings that a StreamSpec does not have."""
    wanted = config_of(spec)
    return tuple(
        f"stream {spec.name}: {name} is {config.get(name)}, should be {wanted[name]}; changed"
        for name in ("allow_direct", "deny_delete", "deny_purge", "consumer_limits")
        if wanted[name] and wanted[name] != config.get(name)
    )


def info_of(reply: Mapping[str, Any]) -> StreamInfo:
    """Read one entry of a stream listing."""
    state = reply["state"]
    return StreamInfo(
        name=reply["config"]["name"],
        messages=state["messages"],
        bytes=state["bytes"],
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        spec=spec_of(reply["config"]),
    )


def mirror_of(reply: Mapping[str, Any]) -> MirrorInfo:
    """Read the state of a mirror."""
    state, mirror = reply["state"], reply.get("mirror", {})
    silent_ns = mirror.get("active", -1)
    silent_s = silent_ns / NANOSECONDS if silent_ns >= 0 else None
    return MirrorInfo(state["messages"], state["bytes"], mirror.get("lag", 0), silent_s)


def extent_of(state: Mapping[str, Any]) -> Extent:
    """Read where a stream begins and ends; an empty one has no times."""
    first, last = state["first_seq"], state["last_seq"]
    if not state["messages"]:
        return Extent(first, 0, last, 0)
    return Extent(first, nanoseconds(state["first_ts"]), last, nanoseconds(state["last_ts"]))


def is_transient(error: Mapping[str, Any]) -> bool:
    """Return True for an error after which to ask again: nodes may come back, room may not."""
    code = error.get("err_code", 0)
    return code in TRANSIENT and not (
        code == NO_PEERS and "storage" in error.get("description", "")
    )


def error_of(error: Mapping[str, Any], about: str) -> BusError:
    """Return the error to raise for one that JetStream answered with."""
    code, text = error.get("err_code", 0), error.get("description", "")
    if code in NO_ROOM:
        return StorageFull(
            f"The broker has no room for {about} ({text}): free its disk, lower log.window_bytes"
            " (reserved when a run is created), or raise max_file_store or max_memory_store in the"
            " jetstream block of its config file. What was acknowledged is kept."
        )
    if code == NOT_CLUSTERED:
        return BrokerUnfit(
            f"{about}: {text}. Set log.replicas to 1, or run the broker as a cluster."
        )
    return BusError(f"The broker refused {about}: {text} (error {code}).")
