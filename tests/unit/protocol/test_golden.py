"""Bytes that this release and those before it wrote: they are read the same for ever."""
# pyright: basic

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blosc2
import numpy as np
import pytest

from skerry.algorithm.quantise import SCHEMES, dequantise
from skerry.protocol import records
from skerry.protocol.codec import unpack, vector_digest
from skerry.protocol.envelope import unseal

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

GOLDEN = Path(__file__).parents[2] / "golden"
DIGESTS = {
    "f32": 0xF0C2_2C81_8307_BFCC,
    "bf16": 0x76CB_6ADC_DF2A_D45B,
    "int8": 0xBB26_FEC8_8CB2_C265,
    "int4": 0x585D_C194_8B1C_12D0,
    "e3m0": 0xE4A4_AFF4_3231_4F1B,
    "int2": 0xC11A_6D40_6C04_4628,
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
"""What was written before: 1 by blosc2, 2 by zstd without a search for repetitions."""


@pytest.mark.parametrize(
    ("scheme", "file"),
    [
        *((scheme, GOLDEN / f"chunk_{scheme}.bin") for scheme in SCHEMES),
        *((file.name.split(".")[0].removeprefix("chunk_"), file) for file in EARLIER),
    ],
)
def test_golden_bytes_decode(scheme: str, file: Path) -> None:
    header, packed = unseal(file.read_bytes(), run=SAMPLES.RUN, plan=SAMPLES.PLAN)
    vector = dequantise(scheme, unpack(header, packed))

    assert header == SAMPLES.header(scheme)
    assert vector_digest(vector) == DIGESTS[scheme]


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
