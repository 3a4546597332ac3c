"""Bytes that this release and those before it wrote: they are read the same for ever."""
# pyright: basic

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import blosc2
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm.quantise_numpy import dequantise
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import WrongVersion
from skerry.protocol import records, wire
from skerry.protocol.chunks import unseal, vector_digest
from skerry.protocol.codec import unpack
from skerry.protocol.messages import ChunkHeader, RunRecord

GOLDEN = Path(__file__).parents[2] / "golden"
DIGESTS = {
    "f32": 0xF0C2_2C81_8307_BFCC,
    "bf16": 0x76CB_6ADC_DF2A_D45B,
    "int8": 0xBB26_FEC8_8CB2_C265,
    "int4": 0x585D_C194_8B1C_12D0,
    "e3m0": 0xE4A4_AFF4_3231_4F1B,
    "int2": 0xC11A_6D40_6C04_4628,
    "int5": 0x1AB0_3294_A630_1BC4,
    "int6": 0x318F_AF2D_458F_14A0,
}
"""xxh3-64 of the vector that each chunk decodes to."""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_samples", GOLDEN / "regenerate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SAMPLES: Any = load()


@pytest.mark.parametrize("name", sorted(SAMPLES.samples()))
def test_this_release_writes_the_golden_bytes(name: str) -> None:
    codec = blosc2.clib_info(blosc2.Codec.ZSTD)[1].decode()
    if name.startswith("chunk") and not codec.startswith("1.5."):
        pytest.skip(f"written with zstd 1.5, and {codec} may pack otherwise")
    assert SAMPLES.samples()[name] == (GOLDEN / name).read_bytes()


EARLIER = sorted((GOLDEN / "earlier").glob("chunk_*.bin"))
"""Written before, in frames of wire version 1: 1 by blosc2, 2 by zstd without a search."""
FRAMED = struct.Struct("<4sBBHIIQ")


def parts(file: Path) -> tuple[bytes, bytes]:
    """Return header and payload of a framed message, whatever its wire version."""
    data = file.read_bytes()
    *_, header_bytes, payload_bytes, _ = FRAMED.unpack_from(data)
    assert len(data) == FRAMED.size + header_bytes + payload_bytes
    return data[FRAMED.size : -payload_bytes], data[-payload_bytes:]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_golden_chunks_decode(scheme: str) -> None:
    data = (GOLDEN / f"chunk_{scheme}.bin").read_bytes()
    header, packed = unseal(data, run=SAMPLES.RUN, plan=SAMPLES.PLAN)

    assert header == SAMPLES.header(scheme)
    assert vector_digest(dequantise(scheme, unpack(header, packed))) == DIGESTS[scheme]


@pytest.mark.parametrize("file", EARLIER, ids=lambda file: file.stem)
def test_earlier_payloads_decode(file: Path) -> None:
    scheme = file.name.split(".")[0].removeprefix("chunk_")
    head, packed = parts(file)
    header = wire.decode(ChunkHeader, head)

    assert header == SAMPLES.header(scheme)
    assert vector_digest(dequantise(scheme, unpack(header, packed))) == DIGESTS[scheme]


def test_a_log_of_0_1_is_refused_with_the_way_out() -> None:
    data = (GOLDEN / "earlier" / "RunRecord.1.bin").read_bytes()
    with pytest.raises(WrongVersion, match=r"Skerry 0\.1 .*end a run of 0\.1 with 0\.1"):
        records.decode(RunRecord, data, run=SAMPLES.RUN)


@pytest.mark.parametrize("record", SAMPLES.examples(), ids=lambda record: type(record).__name__)
def test_golden_records_decode(record: records.Record) -> None:
    data = (GOLDEN / f"{type(record).__name__}.bin").read_bytes()

    assert records.decode(type(record), data, run=SAMPLES.RUN) == record


def test_the_golden_vector_has_not_moved() -> None:
    x: NDArray[np.float32] = SAMPLES.vector()

    assert vector_digest(x) == DIGESTS["f32"]
    assert 2.5 < float((x[:2048] ** 4).mean() / (x[:2048] ** 2).mean() ** 2) < 3.2


def test_there_are_no_other_golden_files() -> None:
    assert [file.name for file in EARLIER] == [
        f"chunk_{scheme}.{number}.bin" for scheme in ("bf16", "f32") for number in (1, 2)
    ]
    assert sorted(path.name for path in GOLDEN.glob("*.bin")) == sorted(SAMPLES.samples())
