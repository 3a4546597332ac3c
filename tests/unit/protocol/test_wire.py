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


def test_an_unforged_frame_is_accepted() -> None:
    assert bytes(wire.read(FrameKind.CHUNK, forged()).payload) == b"payload"


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


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read(FrameKind.CHUNK, data)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_after_a_good_start_raise_nothing_but_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.read(FrameKind.CHUNK, b"SKRY\x02\x01" + data)


def test_another_version_is_named_even_if_nothing_else_fits() -> None:
    with pytest.raises(WrongVersion, match="wire version 3"):
        wire.read(FrameKind.CHUNK, b"SKRY\x03")
    with pytest.raises(WrongVersion, match="wire version 0"):
        wire.read(FrameKind.CHUNK, forged(version=0))


def test_bytes_of_someone_else_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="not one of ours"):
        wire.read(FrameKind.CHUNK, b"PK\x03\x04" + bytes(40))


def test_trailing_bytes_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="promises"):
        wire.read(FrameKind.CHUNK, forged() + b"x")


def test_another_kind_of_message_is_corrupt() -> None:
    with pytest.raises(Corrupt, match="a PULSE"):
        wire.read(FrameKind.PULSE, forged())


def test_reserved_bytes_must_be_zero() -> None:
    with pytest.raises(Corrupt):
        wire.read(FrameKind.CHUNK, forged(reserved=1))


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
