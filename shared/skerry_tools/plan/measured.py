"""What this repository measured of itself, on which plans are built.

Speeds and bytes come from docs/results: one x86 core of a shared machine, Gaussian data. Other
machines differ; ratios hold longer than figures. Rates are f32 bytes a second. What M costs in loss
comes from docs/quality.md, and from a published law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import AUTO, SCHEMES, raw_bytes

NEAR = {"e3m0": "int4", "int2": "int4", AUTO: "int5"}
"""What other schemes cost about."""
RAW_BITS = {scheme: 8 * raw_bytes(scheme, 1) / BLOCK for scheme in SCHEMES}
RAW_BITS[AUTO] = RAW_BITS["int8"]
"""Bits per parameter before compression: no message exceeds them, headers aside."""
WIRE_BITS = {
    "int2": 1.58,
    "int4": 3.33,
    "e3m0": 3.52,
    "int5": 4.43,
    "int6": 5.47,
    "int8": 7.50,
    "bf16": 11.07,
    "f32": 28.09,
    AUTO: 3.6,  # where no model or rate is known: what training sent at the usual one
}
"""Bits per parameter of a whole message, compression and headers included."""

MERGE_CHECKED = range(2, 9)
"""How many contributions merge at about the speed of the 4 and 8 that were measured."""
STATE_COPIES = 2.2
"""Disk of the state stream, in live states: two slots, and what is not yet swept."""
BROKER_WRITE_B_S = 0.48 * 1024**3
"""What one broker stored in files on two shared cores."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one core does: f32 bytes a second by scheme, checksum and compression included.

    Merging takes ``merge_base`` seconds an f32 byte, and ``merge_each`` for each contribution.
    ``beside_s`` are CPU seconds a parameter that a commit takes beside that, without and with outer
    momentum: receive, hash, send, and at times store it whole; ``round_s`` are those of a
    fragment's round, whatever its size.
    """

    encode: Mapping[str, float]
    decode: Mapping[str, float]
    merge_base: float
    merge_each: Mapping[str, float]
    beside_s: tuple[float, float]
    round_s: float

    def encode_s(self, scheme: str, params: float, cores: int) -> float:
        """Return seconds to turn ``params`` f32 into a message; unmeasured schemes as the worst."""
        return 4 * params / _of(self.encode, scheme, min) / cores

    def decode_s(self, scheme: str, params: float, cores: int) -> float:
        """Return seconds to turn a message of ``params`` back into f32."""
        return 4 * params / _of(self.decode, scheme, min) / cores

    def merge_s(self, scheme: str, params: float, contributions: int) -> float:
        """Return seconds of one core to merge and take the outer step."""
        return 4 * params * (self.merge_base + contributions * _of(self.merge_each, scheme, max))

    def work_s(self, up: str, down: str, params: float, decoded: int, cores: int) -> float:
        """Return seconds to decode, merge as many as are decoded, and encode."""
        merged = self.merge_s(up, params, decoded) + self.encode_s(down, params, cores)
        return decoded * self.decode_s(up, params, cores) + merged


def _of(known: Mapping[str, float], scheme: str, worst: Callable[..., float]) -> float:
    return known.get(NEAR.get(scheme, scheme)) or worst(known.values())


_MEMCPY_B_S = 15.4e9
"""What encode and decode were compared with, on the same core."""
_EACH = (1 / 2.15e9 - 1 / 3.87e9) / 4
_BASE = 1 / 3.87e9 - 4 * _EACH
"""Through M = 4 at 3.87 GB/s and M = 8 at 2.15 GB/s, both int4."""
DEFAULT = Speeds(
    encode={"int4": 4.8e9, "int5": 4.4e9, "int8": 3.9e9, "bf16": 0.11 * _MEMCPY_B_S},
    decode={"int4": 6.5e9, "int5": 5.1e9, "int8": 3.8e9, "bf16": 0.14 * _MEMCPY_B_S},
    merge_base=_BASE,
    merge_each={"int4": _EACH, "int8": (1 / 2.15e9 - _BASE) / 4},  # four at 2.15 GB/s
    beside_s=(2.0e-9, 2.9e-9),
    round_s=0.011,
)
LAW = {2: (18.768, 0.0969), 4: (19.762, 0.0992), 8: (21.051, 0.1018)}
LAW_IN_STEP, LAW_SIZES = (18.129, 0.0953), (35e6, 10e9)
"""Loss of M learners and of data-parallel, A N^-a for N parameters and 20 tokens a parameter, each
at its best rates; the smallest and largest N checked (Charles et al. 2025, arXiv 2503.09799)."""
GAPS: Mapping[str, Mapping[int, Mapping[float, float]]] = {
    "adamw": {2: {117e3: 4.6}, 4: {117e3: 10.6, 246e3: 5.2}, 8: {117e3: 16.9}},
    "muon": {
        2: {117e3: 2.3, 1.03e6: 0.5},
        4: {117e3: 6.6, 246e3: 3.9, 1.03e6: 1.3},
        8: {117e3: 15.2, 1.03e6: 3.6},
    },
}
"""How far M learners end above data-parallel, in per cent of the loss, by parameters; H = 24."""
LOSS_BY_H = {"adamw": {24: 0.9, 64: 3.0}, "muon": {24: 2.4, 64: 5.6}}
"""How far four learners with a larger H end above H = 8, in per cent of the loss."""


def auto_bits(change: float) -> float:
    """Return what deltas of ``auto`` take, in bits a parameter, mean over a run from scratch.

    ``change`` is the learning rate times H and the square root of the model's width: int4 is enough
    for small changes, int8 for any (docs/results/deltas.md).
    """
    least, most = WIRE_BITS["int4"], WIRE_BITS["int8"]
    return most - (most - least) * math.exp(-change / 8)


def measured_with(learners: int) -> int:
    """Return the M whose figures count for so many learners: the next one up, or the largest."""
    return next((m for m in LAW if m >= learners), max(LAW))


def gap_by_law(learners: int, parameters: float) -> float:
    """Return how far AdamW with H = 30 ends above data-parallel by the law, in per cent."""
    (together, decay), (factor, power) = LAW_IN_STEP, LAW[measured_with(learners)]
    size = min(parameters, LAW_SIZES[1])
    return 100 * (factor / together * math.pow(size, decay - power) - 1)


def gap_by_own_fit(inner: str, learners: int, parameters: float) -> tuple[float, float]:
    """Return how far our own runs end above data-parallel, in per cent, and for which size.

    Between the sizes that were trained it is a power law; beyond them, the nearest size's figure.
    """
    known = sorted(GAPS[inner][measured_with(learners)].items())
    size = max(min(parameters, known[-1][0]), known[0][0])
    for (less, gap), (more, next_gap) in pairwise(known):
        if less <= size <= more:
            share = math.log(size / less) / math.log(more / less)
            return gap * math.pow(next_gap / gap, share), size
    return known[0][1], size
