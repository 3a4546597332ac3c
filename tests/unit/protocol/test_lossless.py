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
from skerry.protocol.lossless import STORED, compress, decompress

SIZE = 8192
GUARD = 0xA5
NIBBLES: NDArray[np.uint8] = np.random.default_rng(0).binomial(15, 0.5, SIZE).astype(np.uint8)
HONEST = compress(NIBBLES, 1)


def accepts(packed: bytes, typesize: int = 1) -> bool:
    """Decompress into the middle of a guarded buffer; assert that the guard stays as it was."""
    whole = np.full(3 * SIZE, GUARD, np.uint8)
    try:
        decompress(memoryview(packed), typesize, whole[SIZE : 2 * SIZE])
        accepted = True
    except WireError:
        accepted = False
    assert (whole[:SIZE] == GUARD).all()
    assert (whole[2 * SIZE :] == GUARD).all()
    return accepted


def forged(**fields: int) -> bytes:
    """Return an honest buffer with fields of its blosc2 header overwritten."""
    packed = bytearray(HONEST)
    offsets = {"nbytes": 4, "blocksize": 8, "cbytes": 12}
    for name, value in fields.items():
        if name in offsets:
            struct.pack_into("<I", packed, offsets[name], value)
        else:
            packed[int(name.removeprefix("byte"))] = value
    return bytes(packed)


@pytest.mark.parametrize("typesize", [STORED, 1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 64, 1000, 1024, 70_000, 2_500_000])
def test_bytes_come_back(typesize: int, size: int) -> None:
    rng = np.random.default_rng(size)
    for data in (
        np.zeros(size, np.uint8),
        rng.integers(0, 256, size, dtype=np.uint8),
        rng.integers(0, 3, size, dtype=np.uint8),
    ):
        packed = compress(data, typesize)
        out = np.empty(size, np.uint8)
        decompress(memoryview(packed), typesize, out)
        np.testing.assert_array_equal(out, data)
        assert len(packed) <= size


@pytest.mark.parametrize("size", [1000, 1 << 20, (1 << 20) + 1, 3 << 20, 2_500_000])
def test_any_blosc2_reads_what_is_not_shuffled(size: int) -> None:
    """It is laid out by hand, with a block that does not shrink among others that do."""
    rng = np.random.default_rng(size)
    data = rng.integers(0, 3, size, dtype=np.uint8)
    data[1 << 20 : 2 << 20] = rng.integers(0, 256, data[1 << 20 : 2 << 20].size, dtype=np.uint8)
    packed = compress(data, 1)

    assert len(packed) < size
    assert blosc2.get_cbuffer_sizes(packed)[:2] == (size, len(packed))
    assert blosc2.decompress2(packed) == data.tobytes()


def test_what_repeats_by_chance_is_not_referred_to() -> None:
    """A plane of exponents takes its entropy; references would make that a tenth more."""
    words = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype(np.float32).view(np.uint32)
    plane = (words >> 24).astype(np.uint8)
    share = np.bincount(plane) / plane.size
    entropy = -sum(p * np.log2(p) for p in share if p)

    assert len(compress(plane, 1)) < 1.03 * plane.size * entropy / 8


def test_nibbles_are_packed_as_blosc2_packs_them() -> None:
    """There the search finds nothing anyway: what is written is what blosc2 itself would write."""
    nibbles = np.random.default_rng(0).normal(0, 2.5, (2, 1 << 19)).round().clip(-7, 7)
    packed = ((nibbles[0] + 7) * 16 + nibbles[1] + 7).astype(np.uint8)
    theirs = blosc2.compress2(
        packed,
        cparams={
            "typesize": 1,
            "clevel": 1,
            "codec": blosc2.Codec.ZSTD,
            "filters": [blosc2.Filter.NOFILTER] * 6,
            "filters_meta": [0] * 6,
            "splitmode": blosc2.SplitMode.NEVER_SPLIT,
            "blocksize": 1 << 20,
            "nthreads": 1,
        },
    )

    assert compress(packed, 1) == theirs


def test_long_runs_still_shrink_to_nothing() -> None:
    runs = np.repeat(np.arange(256, dtype=np.uint8), 4096)

    assert len(compress(runs, 1)) < runs.size / 500


def test_what_does_not_shrink_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)

    assert compress(noise, 1) == noise.tobytes()


def test_equal_input_gives_equal_bytes() -> None:
    assert compress(NIBBLES.copy(), 1) == HONEST


def test_an_honest_buffer_is_accepted() -> None:
    assert accepts(HONEST)


@pytest.mark.parametrize(
    "fields",
    [
        *({"nbytes": size} for size in (0, 1, 8191, 8193, 1 << 20, 0x7FFF_FFFF, 0xFFFF_FFFF)),
        *({"cbytes": size} for size in (0, 32, 1 << 20, 0xFFFF_FFFF)),
        *({"blocksize": size} for size in (0, 1, 128, 1 << 30, 0xFFFF_FFFF)),
        *({f"byte{index}": 0xFF} for index in (0, 1, 2, 3, *range(16, 32))),
        *({"byte2": flags} for flags in (0x15, 0x35, 0x85, 0x97)),
        *({"byte31": flags} for flags in (0x08, 0x10, 0x20, 0x40)),
    ],
    ids=str,
)
def test_a_forged_header_is_refused(fields: dict[str, int]) -> None:
    assert not accepts(forged(**fields))


def test_blosc2_itself_would_have_believed_it() -> None:
    """The guard is needed: blosc2 reports the header's size, and it would write that much."""
    assert blosc2.get_cbuffer_sizes(forged(nbytes=1 << 20))[0] == 1 << 20


@pytest.mark.parametrize("codec", [blosc2.Codec.LZ4, blosc2.Codec.BLOSCLZ, blosc2.Codec.ZLIB])
def test_another_codec_is_refused(codec: blosc2.Codec) -> None:
    packed = blosc2.compress2(NIBBLES, cparams={"codec": codec, "typesize": 1})
    assert isinstance(packed, bytes)

    assert not accepts(packed)


def test_a_buffer_made_for_another_shuffle_is_refused() -> None:
    assert not accepts(compress(NIBBLES, 2), typesize=1)


def test_a_run_of_zeros_may_not_carry_anything_else() -> None:
    zeros = compress(np.zeros(SIZE, np.uint8), 1)

    assert len(zeros) == 32
    assert accepts(zeros)
    assert not accepts(zeros + b"\0")


@pytest.mark.parametrize("size", [0, 1, 31, 32, 100, SIZE - 1, SIZE + 1])
def test_another_length_is_refused(size: int) -> None:
    assert not accepts((HONEST + bytes(SIZE))[:size])


def test_stored_bytes_are_never_decompressed() -> None:
    out = np.empty(SIZE, np.uint8)
    with pytest.raises(Corrupt, match="cannot be unpacked"):
        decompress(memoryview(HONEST), STORED, out)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(st.integers(32, len(HONEST) - 1), st.integers(0, 255)), min_size=1, max_size=20
    )
)
def test_damage_behind_the_header_never_escapes(edits: list[tuple[int, int]]) -> None:
    packed = bytearray(HONEST)
    for place, value in edits:
        packed[place] = value
    accepts(bytes(packed))


@pytest.mark.parametrize("value", [0, 1, 31, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF])
@pytest.mark.parametrize("place", range(32, 60))
def test_a_forged_offset_or_stream_header_never_escapes(place: int, value: int) -> None:
    packed = bytearray(HONEST)
    struct.pack_into("<I", packed, place, value)
    accepts(bytes(packed))
