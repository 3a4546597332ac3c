"""The frame around every message: enough to refuse bad bytes before anything parses them.

Layout, little-endian, 24 bytes, then ``header_bytes`` of protobuf, then ``payload_bytes`` raw:

====== ===== =======================================================
offset bytes field
====== ===== =======================================================
0      4     magic ``SKRY``
4      1     wire version; these five bytes stay where they are for ever
5      1     kind of message
6      2     reserved, zero
8      4     header_bytes
12     4     payload_bytes
16     8     xxh3-64 of bytes 0 to 16, header and payload
====== ===== =======================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from skerry.errors import Corrupt, Oversized, Truncated, WrongVersion
from skerry.protocol.messages import FrameKind

MAGIC = b"SKRY"
WIRE_VERSION = 2
FIRST_VERSION = 1
"""What Skerry 0.1 wrote."""
MAX_HEADER_BYTES = 1 << 20
"""Also the largest record: a NATS server takes messages up to 1 MiB by default."""
MAX_PAYLOAD_BYTES = 32 << 20
"""JetStream stores no larger record, whatever ``max_payload`` says."""

_START = struct.Struct("<4sBBHII")
_CHECKSUM = struct.Struct("<Q")
PREFIX_BYTES = _START.size + _CHECKSUM.size


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole, undamaged frame; both views point into the received bytes."""

    header: memoryview
    payload: memoryview


def _checksum(start: bytes | memoryview, *parts: bytes | memoryview) -> int:
    digest = xxhash.xxh3_64(start)
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def write(kind: FrameKind, header: bytes, payload: bytes = b"") -> bytes:
    """Return the framed message; Oversized if header or payload is above its cap."""
    _refuse_oversized(len(header), len(payload))
    start = _START.pack(MAGIC, WIRE_VERSION, kind, 0, len(header), len(payload))
    checksum = _CHECKSUM.pack(_checksum(start, header, payload))
    return b"".join((start, checksum, header, payload))


def read(kind: FrameKind, data: bytes | memoryview, *, checked: bool = False) -> Frame:
    """Return the parts of a framed message of this kind, without copying them.

    Checks, in this order, magic, wire version (a later version may lay out the rest differently),
    sizes, checksum and kind. Raises Corrupt, WrongVersion, Truncated or Oversized. With ``checked``
    the checksum is skipped, because the caller has compared one over all of ``data``.
    """
    view = memoryview(data)
    _check_version(view)
    if len(view) < PREFIX_BYTES:
        msg = f"{len(view)} bytes are less than the {PREFIX_BYTES} that every message starts with."
        raise Truncated(msg)
    _, _, found, reserved, header_bytes, payload_bytes = _START.unpack_from(view)
    _refuse_oversized(header_bytes, payload_bytes)
    _check_length(len(view), PREFIX_BYTES + header_bytes + payload_bytes)
    header = view[PREFIX_BYTES : PREFIX_BYTES + header_bytes]
    payload = view[PREFIX_BYTES + header_bytes :]
    (want,) = _CHECKSUM.unpack_from(view, _START.size)
    if not checked and _checksum(view[: _START.size], header, payload) != want:
        msg = "The checksum does not match: the message was damaged in transit or in the store."
        raise Corrupt(msg)
    if found != kind or reserved:
        msg = f"The message is of kind {found}, and a {kind.name} ({kind.value}) was expected."
        raise Corrupt(msg)
    return Frame(header, payload)


def _check_version(view: memoryview) -> None:
    head = bytes(view[: len(MAGIC)])
    if len(view) <= len(MAGIC):
        msg = f"{len(view)} bytes are no message."
        raise Truncated(msg)
    if head != MAGIC:
        msg = f"The message starts with {head!r} and not with {MAGIC!r}: not one of ours."
        raise Corrupt(msg)
    version = view[len(MAGIC)]
    if version == WIRE_VERSION:
        return
    msg = (
        f"The message has wire version {version}, and this release reads {WIRE_VERSION}: "
        "run the same Skerry release everywhere."
    )
    if version == FIRST_VERSION:
        msg = (
            f"The message was written by Skerry 0.1 (wire version {version}), this release reads"
            f" version {WIRE_VERSION}: run the same release everywhere, and carry a run of 0.1 over"
            " from its newest checkpoint with `skerry up --from CHECKPOINT --run NEW`."
        )
    raise WrongVersion(msg)


def _refuse_oversized(header_bytes: int, payload_bytes: int) -> None:
    if header_bytes > MAX_HEADER_BYTES:
        msg = f"A header or record of {header_bytes} bytes is above the cap of {MAX_HEADER_BYTES}."
        raise Oversized(msg)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        msg = f"A payload of {payload_bytes} bytes is above the cap of {MAX_PAYLOAD_BYTES}."
        raise Oversized(msg)


def _check_length(have: int, promised: int) -> None:
    if have < promised:
        msg = f"The message has {have} bytes of the {promised} that its frame promises."
        raise Truncated(msg)
    if have > promised:
        msg = f"The message has {have} bytes, and its frame promises {promised}."
        raise Corrupt(msg)
