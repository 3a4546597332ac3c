"""Chunks come back bit for bit in any order, and a lying payload never writes out of bounds."""

from __future__ import annotations

import gc
import random
import struct
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.planes import Planes
from skerry.algorithm.quantise_numpy import quantise
from skerry.algorithm.schemes import SCHEMES, raw_bytes
from skerry.errors import (
    Corrupt,
    Truncated,
    WireError,
)
from skerry.protocol import codec
from skerry.protocol.chunks import PlaneAssembler, VectorAssembler, vector_digest
from skerry.protocol.codec import Chunk, pack, unpack
from skerry.protocol.messages import ChunkHeader
from tests.support.learners import encode_vector

F32 = NDArray[np.float32]
SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


def gaussian(blocks: int, sigma: float = 1e-4, seed: int = 0) -> F32:
    values = np.random.default_rng(seed).standard_normal(blocks * BLOCK)
    return (values * sigma).astype(np.float32)


def header_of(chunk: Chunk) -> ChunkHeader:
    return ChunkHeader(
        *("r", 7, 0, 1, "ann", 1, chunk.index, chunk.count, chunk.scheme),
        *(chunk.first_block, chunk.blocks, chunk.raw_bytes),
    )


def chunks_of(scheme: str, x: F32, chunk_bytes: int = 8192) -> list[Chunk]:
    return list(encode_vector(scheme, x, chunk_bytes))


def assert_equal(found: Planes, wanted: Planes) -> None:
    np.testing.assert_array_equal(found.codes, wanted.codes)
    np.testing.assert_array_equal(found.scales, wanted.scales)


INPUTS: dict[str, F32] = {
    "one block": gaussian(1),
    "many": gaussian(100),
    "zeros": np.zeros(40 * BLOCK, np.float32),
    "constant": np.full(40 * BLOCK, 3.5, np.float32),
    "incompressible": np.random.default_rng(1)
    .integers(0x3F00_0000, 0x3F80_0000, 40 * BLOCK, dtype=np.uint32)
    .view(np.float32),
    "subnormal": np.full(2 * BLOCK, 1e-42, np.float32),
    "largest": np.full(2 * BLOCK, np.finfo(np.float32).max, np.float32),
}


@SCHEME
@pytest.mark.parametrize("name", INPUTS)
def test_chunks_come_back_bit_for_bit(scheme: str, name: str) -> None:
    x = INPUTS[name]
    assembler = PlaneAssembler(scheme, x.size // BLOCK)
    arrivals = [assembler.add(header_of(c), c.packed) for c in chunks_of(scheme, x)]

    assert arrivals == [False] * (len(arrivals) - 1) + [True]
    assert_equal(assembler.planes, quantise(scheme, x))


@SCHEME
@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(4096, 40_000), st.randoms(use_true_random=False))
def test_any_order_gives_the_same_planes_and_the_same_vector(
    scheme: str, blocks: int, chunk_bytes: int, shuffle: random.Random
) -> None:
    x = gaussian(blocks)
    chunks = chunks_of(scheme, x, chunk_bytes)
    shuffle.shuffle(chunks)
    planes, vector = PlaneAssembler(scheme, blocks), VectorAssembler(scheme, blocks)
    for chunk in (*chunks[:1], *chunks):  # the first one comes twice
        planes.add(header_of(chunk), chunk.packed)
        vector.add(header_of(chunk), chunk.packed)

    assert_equal(planes.planes, quantise(scheme, x))
    assert max(len(chunk.packed) for chunk in chunks) <= chunk_bytes
    np.testing.assert_array_equal(vector.vector, cpu().dequantise(scheme, planes.planes))
    assert vector.digest == vector_digest(vector.vector)


def test_what_was_put_together_is_free_once_it_is_let_go(three: list[Chunk]) -> None:
    planes, vector = PlaneAssembler("int4", 100), VectorAssembler("int4", 100)
    for chunk in three:
        planes.add(header_of(chunk), chunk.packed)
        vector.add(header_of(chunk), chunk.packed)
    held = [weakref.ref(planes.planes.codes), weakref.ref(vector.vector)]
    gc.disable()
    try:
        del planes, vector
        assert all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_a_vector_with_a_chunk_missing_is_not_given_out(three: list[Chunk]) -> None:
    assembler = VectorAssembler("int4", 100)
    assembler.add(header_of(three[0]), three[0].packed)
    with pytest.raises(Truncated, match="1 of 4 chunks"):
        _ = assembler.vector
    with pytest.raises(Truncated, match="1 of 4 chunks"):
        _ = assembler.digest
    with pytest.raises(Corrupt, match="came twice"):
        assembler.add(header_of(three[0]), three[1].packed)


@SCHEME
def test_a_chunk_decodes_alone(scheme: str) -> None:
    x = gaussian(80)
    chunk = chunks_of(scheme, x, 4096)[1]
    part = x[chunk.first_block * BLOCK :][: chunk.blocks * BLOCK]

    assert_equal(unpack(header_of(chunk), chunk.packed), quantise(scheme, part))


@SCHEME
def test_chunks_are_within_the_size_asked_for_even_if_nothing_shrinks(scheme: str) -> None:
    blocks = codec.blocks_per_chunk(scheme, 50_000)

    with pytest.raises(ValueError, match="does not hold one block"):
        codec.blocks_per_chunk(scheme, 1)
    assert codec.packed_bound(scheme, blocks) <= 50_000 < codec.packed_bound(scheme, blocks + 1)


@pytest.mark.parametrize(
    ("scheme", "sigma", "bits"),
    [
        *(("int4", 1e-4, 3.45), ("int8", 1e-4, 7.55), ("bf16", 0.02, 11.1), ("f32", 0.02, 28.2)),
        *(("e3m0", 1e-4, 3.6), ("int2", 1e-4, 1.62)),
    ],
)
def test_bits_per_parameter(scheme: str, sigma: float, bits: float) -> None:
    x = gaussian(4096, sigma)
    size = sum(len(chunk.packed) for chunk in encode_vector(scheme, x, 512 * 1024))

    assert 8 * size / x.size <= bits


def test_threads_encode_and_decode_side_by_side() -> None:
    vectors = [gaussian(400, seed=seed) for seed in range(8)]

    def there_and_back(x: F32) -> tuple[list[Chunk], Planes]:
        chunks, assembler = chunks_of("int4", x), PlaneAssembler("int4", 400)
        for chunk in chunks:
            assembler.add(header_of(chunk), chunk.packed)
        return chunks, assembler.planes

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(there_and_back, vectors))

    for x, (chunks, planes) in zip(vectors, found, strict=True):
        assert chunks == chunks_of("int4", x)
        assert_equal(planes, quantise("int4", x))


def test_assembling_takes_one_set_of_planes() -> None:
    chunks = [(header_of(c), c.packed) for c in chunks_of("int4", gaussian(8192), 16_384)]
    tracemalloc.start()
    try:
        assembler = PlaneAssembler("int4", 8192)
        for header, packed in chunks:
            assembler.add(header, packed)
        assert tracemalloc.get_traced_memory()[1] < raw_bytes("int4", 8192) + 150_000
    finally:
        tracemalloc.stop()
    assert assembler.complete


@pytest.fixture
def three() -> list[Chunk]:
    """Three int4 chunks of 31 blocks and one of 7."""
    return chunks_of("int4", gaussian(100), 4096)


def test_a_different_chunk_of_the_same_index_is_refused(three: list[Chunk]) -> None:
    other = chunks_of("int4", gaussian(100, seed=1), 4096)
    assembler = PlaneAssembler("int4", 100)
    assembler.add(header_of(three[0]), three[0].packed)
    with pytest.raises(Corrupt, match="came twice"):
        assembler.add(header_of(other[0]), other[0].packed)
    for chunk in three[1:]:
        assembler.add(header_of(chunk), chunk.packed)

    assert_equal(assembler.planes, quantise("int4", gaussian(100)))


@pytest.mark.parametrize(
    "change",
    [
        {"first_block": 30},
        {"first_block": 90},
        {"first_block": 2**63},
        {"scheme": "int8"},
        {"index": 4},
        {"index": 9},
        {"count": 2},
        {"count": 9},
        {"blocks": 32, "raw_bytes": 4160},
        {"blocks": 30, "raw_bytes": 3900},
        {"blocks": 0, "raw_bytes": 0},
    ],
    ids=str,
)
def test_a_chunk_that_does_not_fit_the_others_is_refused(
    three: list[Chunk], change: dict[str, Any]
) -> None:
    assembler = PlaneAssembler("int4", 100)
    assembler.add(header_of(three[0]), three[0].packed)
    with pytest.raises(WireError):
        assembler.add(replace(header_of(three[1]), **change), three[1].packed)
    assembler.add(header_of(three[1]), three[1].packed)


def test_a_chunk_that_reaches_into_a_later_one_is_refused(three: list[Chunk]) -> None:
    assembler = PlaneAssembler("int4", 100)
    assembler.add(header_of(three[1]), three[1].packed)
    with pytest.raises(Corrupt, match="do not fit"):
        assembler.add(replace(header_of(three[0]), first_block=1), three[0].packed)
    for chunk in three:
        assembler.add(header_of(chunk), chunk.packed)

    assert_equal(assembler.planes, quantise("int4", gaussian(100)))


def test_chunks_that_leave_blocks_out_are_refused_with_the_last_one() -> None:
    short = chunks_of("int4", gaussian(90), 4096)
    assembler = PlaneAssembler("int4", 100)
    for chunk in short[:-1]:
        assembler.add(header_of(chunk), chunk.packed)
    with pytest.raises(Corrupt, match="do not cover"):
        assembler.add(header_of(short[-1]), short[-1].packed)


# --- what lies inside of a valid envelope ---


@SCHEME
def test_a_vector_takes_no_damaged_chunk_and_keeps_its_place(scheme: str) -> None:
    (chunk,) = chunks_of(scheme, gaussian(2))
    header, whole = header_of(chunk), chunk.packed
    (length,) = struct.unpack_from("<I", whole)
    shorter = struct.pack("<I", length - 1) + whole[4 : 4 + length - 1] + whole[4 + length :]
    assembler = VectorAssembler(scheme, 2)
    for bad in (shorter, *(whole[:size] for size in range(len(whole))), whole + b"\0"):
        with pytest.raises(WireError):
            assembler.add(header, bad)
        with pytest.raises(Truncated):
            _ = assembler.digest
    assert assembler.add(header, whole)
    assert assembler.digest == vector_digest(cpu().dequantise(scheme, unpack(header, whole)))


@SCHEME
def test_a_last_section_that_is_too_short_is_a_wire_error(scheme: str) -> None:
    (chunk,) = chunks_of(scheme, gaussian(2))
    sections = list[bytes]()
    rest = chunk.packed
    while rest:
        (length,) = struct.unpack_from("<I", rest)
        sections.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    sections[-1] = sections[-1][:-1]
    packed = b"".join(struct.pack("<I", len(data)) + data for data in sections)
    with pytest.raises(WireError):
        VectorAssembler(scheme, 2).add(header_of(chunk), packed)


def test_scales_that_are_not_finite_are_corrupt() -> None:
    planes = quantise("int4", gaussian(2))
    for bits in (0x7F80, 0x7FC0, 0xBF80, 0x7F7F):
        planes.scales[1] = bits
        (chunk,) = pack("int4", planes, 8192)
        with pytest.raises(Corrupt, match="scale"):
            unpack(header_of(chunk), chunk.packed)


@settings(max_examples=200)
@given(st.binary(max_size=400))
def test_arbitrary_payloads_raise_nothing_but_wire_errors(payload: bytes) -> None:
    header = ChunkHeader(*("r", 7, 0, 1, "ann", 1, 0, 1, "int4", 0, 64), raw_bytes("int4", 64))
    with pytest.raises(WireError):
        unpack(header, payload)


def test_the_digest_is_of_little_endian_f32_bytes() -> None:
    x = np.arange(4, dtype=np.float32)

    assert vector_digest(x) == vector_digest(np.arange(8, dtype=np.float32)[:4])
    assert vector_digest(x) != vector_digest(x + 1)
    assert vector_digest(x) == vector_digest(x.astype(">f4"))
