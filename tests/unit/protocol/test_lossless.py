# pyright: basic
"""blosc2 is handed nothing that could make it write outside of the destination."""

from __future__ import annotations

import struct

import blosc2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.errors import Corrupt, WireError
from skerry.protocol.lossless import Packing, compress, decompress

SIZE = 8192
GUARD = 0xA5
NIBBLES: NDArray[np.uint8] = np.random.default_rng(0).binomial(15, 0.5, SIZE).astype(np.uint8)
PACKINGS = [packing for packing in Packing if packing is not Packing.STORED]
HONEST = {packing: compress(NIBBLES, packing) for packing in PACKINGS}
EACH = pytest.mark.parametrize("packing", PACKINGS)


def accepts(packed: bytes) -> bool:
    """Decompress into the middle of a guarded buffer; assert that the guard stays as it was."""
    whole = np.full(3 * SIZE, GUARD, np.uint8)
    try:
        decompress(memoryview(packed), Packing.ENTROPY, whole[SIZE : 2 * SIZE])
        accepted = True
    except WireError:
        accepted = False
    assert (whole[:SIZE] == GUARD).all()
    assert (whole[2 * SIZE :] == GUARD).all()
    return accepted


def forged(packing: Packing, **fields: int) -> bytes:
    """Return an honest buffer with fields of its blosc2 header overwritten."""
    packed = bytearray(HONEST[packing])
    offsets = {"nbytes": 4, "blocksize": 8, "cbytes": 12}
    for name, value in fields.items():
        if name in offsets:
            struct.pack_into("<I", packed, offsets[name], value)
        else:
            packed[int(name.removeprefix("byte"))] = value
    return bytes(packed)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 64, 1000, 1022, 70_000, 2_500_006])
def test_bytes_come_back(packing: Packing, size: int) -> None:
    rng = np.random.default_rng(size)
    for most in (1, 256, 3):
        data = rng.integers(0, most, size, dtype=np.uint8)
        packed, out = compress(data, packing), np.empty(size, np.uint8)
        decompress(memoryview(packed), packing, out)
        np.testing.assert_array_equal(out, data)
        assert len(packed) <= size


@EACH
def test_blosc2_alone_reads_what_is_written(packing: Packing) -> None:
    assert len(HONEST[packing]) < SIZE
    assert blosc2.get_cbuffer_sizes(HONEST[packing])[:2] == (SIZE, len(HONEST[packing]))
    assert blosc2.decompress2(HONEST[packing]) == NIBBLES.tobytes()


@EACH
def test_what_does_not_shrink_is_stored_as_it_is(packing: Packing) -> None:
    noise = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)

    assert compress(noise, packing) == noise.tobytes()


@EACH
def test_equal_input_gives_equal_bytes_that_are_accepted(packing: Packing) -> None:
    runs = np.repeat(np.arange(256, dtype=np.uint8), 4096)
    assert len(compress(runs, packing)) < runs.size / 20
    assert compress(NIBBLES.copy(), packing) == HONEST[packing]
    assert accepts(HONEST[packing])


@EACH
@pytest.mark.parametrize(
    "fields",
    [
        *({"nbytes": size} for size in (0, 1, 8191, 8193, 1 << 20, 0x7FFF_FFFF, 0xFFFF_FFFF)),
        *({"cbytes": size} for size in (0, 32, 1 << 20, 0xFFFF_FFFF)),
        *({"blocksize": size} for size in (0, 1, 128, 1 << 30, 0xFFFF_FFFF)),
        *({f"byte{index}": 0xFF} for index in (0, 1, 2, 3, *range(16, 32))),
        *({"byte2": flags} for flags in (0x15, 0x55, 0x85, 0x97)),
        *({"byte31": flags} for flags in (0x08, 0x10, 0x20, 0x40)),
    ],
    ids=str,
)
def test_a_forged_header_is_refused(packing: Packing, fields: dict[str, int]) -> None:
    assert not accepts(forged(packing, **fields))


@pytest.mark.parametrize("codec", [blosc2.Codec.LZ4, blosc2.Codec.BLOSCLZ, blosc2.Codec.ZLIB])
def test_another_codec_is_refused(codec: blosc2.Codec) -> None:
    packed = blosc2.compress2(NIBBLES, cparams={"codec": codec, "typesize": 1})
    assert isinstance(packed, bytes)

    assert not accepts(packed)


@EACH
def test_a_run_of_zeros_may_not_carry_anything_else(packing: Packing) -> None:
    zeros = compress(np.zeros(SIZE, np.uint8), packing)

    assert len(zeros) == 32
    assert accepts(zeros)
    assert not accepts(zeros + b"\0")


@EACH
@pytest.mark.parametrize("size", [0, 1, 31, 32, 100, SIZE - 1, SIZE + 1])
def test_another_length_is_refused(packing: Packing, size: int) -> None:
    assert not accepts((HONEST[packing] + bytes(SIZE))[:size])


def test_stored_bytes_are_never_decompressed() -> None:
    out = np.empty(SIZE, np.uint8)
    with pytest.raises(Corrupt, match="cannot be unpacked"):
        decompress(memoryview(HONEST[Packing.ENTROPY]), Packing.STORED, out)


@settings(max_examples=800)
@given(
    st.sampled_from(PACKINGS),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1),
)
def test_damage_after_the_header_never_escapes(
    packing: Packing, edits: list[tuple[float, int]]
) -> None:
    packed = bytearray(HONEST[packing])
    for place, value in edits:
        packed[32 + int(place * (len(packed) - 32))] = value
    accepts(bytes(packed))


@EACH
@pytest.mark.parametrize("value", [0, 1, 31, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF])
def test_a_forged_offset_or_stream_header_never_escapes(packing: Packing, value: int) -> None:
    for place in range(32, 60):
        packed = bytearray(HONEST[packing])
        struct.pack_into("<I", packed, place, value)
        accepts(bytes(packed))
