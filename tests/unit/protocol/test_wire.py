"""Every damaged message is refused with its own error, before anything parses or allocates."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import Corrupt, Oversized, Truncated, WireError, WrongVersion
from skerry.protocol import wire
from skerry.protocol.messages import FrameKind


def forged(**changes: int) -> bytes:
    """Return a message with a valid checksum and any field of the frame as an attacker likes."""
    body = b"headpayload"
    fields = {"version": 2, "kind": 1, "reserved": 0, "header": 4, "payload": 7} | changes
    start = struct.pack("<4sBBHII", b"SKRY", *fields.values())
    return start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + body)) + body


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_what_is_written_is_read(header: bytes, payload: bytes) -> None:
    found = wire.read(FrameKind.CHUNK, wire.write(FrameKind.CHUNK, header, payload))

    assert (bytes(found.header), bytes(found.payload)) == (header, payload)


def test_every_bit_flip_is_refused() -> None:
    message = wire.write(FrameKind.PULSE, b"header" * 5, b"payload" * 9)
    for bit in range(8 * len(message)):
        damaged = bytearray(message)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.read(FrameKind.PULSE, bytes(damaged))


def test_every_truncation_is_refused_as_truncated() -> None:
    message = wire.write(FrameKind.PULSE, b"header", b"payload")
    for size in range(len(message)):
        with pytest.raises(Truncated):
            wire.read(FrameKind.PULSE, message[:size])


@given(st.sampled_from([b"", b"SKRY\x02\x01"]), st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_wire_errors(start: bytes, data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read(FrameKind.CHUNK, start + data)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"SKRY\x03", WrongVersion, "wire version 3"),
        (forged(version=0), WrongVersion, "wire version 0"),
        (b"PK\x03\x04" + bytes(40), Corrupt, "not one of ours"),
        (forged() + b"x", Corrupt, "promises"),
        (forged(kind=4), Corrupt, "a CHUNK"),
        (forged(reserved=1), Corrupt, "of kind 1"),
    ],
)
def test_what_is_no_frame_of_this_kind_is_named(
    data: bytes, error: type[WireError], said: str
) -> None:
    assert wire.read(FrameKind.CHUNK, forged()).payload == b"payload"
    with pytest.raises(error, match=said):
        wire.read(FrameKind.CHUNK, data)


@pytest.mark.parametrize("field", ["header", "payload"])
def test_a_huge_promise_is_oversized_and_allocates_nothing(field: str) -> None:
    message = forged(**{field: 0xFFFF_FFFF})
    tracemalloc.start()
    try:
        with pytest.raises(Oversized):
            wire.read(FrameKind.CHUNK, message)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_nothing_oversized_is_written() -> None:
    with pytest.raises(Oversized):
        wire.write(FrameKind.RUN, bytes(wire.MAX_HEADER_BYTES + 1))
