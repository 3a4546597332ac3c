"""What this repository measured of itself, on which plans are built.

All of it comes from docs/results: one x86 core of a shared machine, Gaussian
data. Other machines differ; ratios hold longer than figures. Rates are f32 bytes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import AUTO, SCHEMES, raw_bytes

NEAR = {"e3m0": "int4", "int2": "int4", AUTO: "int5"}
"""What other schemes cost about."""
RAW_BITS = {scheme: 8 * raw_bytes(scheme, 1) / BLOCK for scheme in SCHEMES}
RAW_BITS[AUTO] = RAW_BITS[NEAR[AUTO]]
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
    AUTO: 3.6,  # what training sent at the usual rate (docs/results/exchange.md)
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
LARGEST = 246e3
LOSS_BY_LEARNERS = {2: 2.5, 4: 8.3, 8: 15.8}
LOSS_BY_H = {24: 0.9, 64: 3.0}
"""Parameters of the largest model, and per cent of the loss: of M learners
above data-parallel at equal tokens and H = 24, and of larger H above H = 8 (docs/quality.md)."""


def loss_remark(learners: int, h_steps: int) -> str:
    """Return what M and H cost in loss where that was measured, of the nearest ones that were."""
    near = min(LOSS_BY_LEARNERS, key=lambda count: abs(count - learners))
    least = max((h for h in LOSS_BY_H if h <= h_steps), default=min(LOSS_BY_H))
    return (
        f"loss is not judged: small models (up to {LARGEST / 1e6:.2g} Mparam, AdamW) ended"
        f" {LOSS_BY_LEARNERS[near]} % above data-parallel with M = {near}, and {LOSS_BY_H[least]} %"
        f" above H = 8 with H = {least}; long runs and large batches lose less (docs/quality.md)"
    )
