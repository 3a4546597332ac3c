"""Quantities as people write them: ``"5 Gbit/s"``, ``"50 ms"``, ``"80 GB"``, ``"12B"``.

A rate or a size must name its unit, and one that could mean bits as well as bytes is refused: plans
go wrong by that factor of eight. What is read is in bit/s, B, s, FLOP/s or a bare count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIXES = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_FORM = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*\Z")
_BITS_OR_BYTES = re.compile(r"[kKMGT]?i?b(/s|ps)?", re.IGNORECASE)


def _units(prefixes: Mapping[str, float], **names: float) -> dict[str, float]:
    return {
        f"{p}{name}": scale * one for p, scale in prefixes.items() for name, one in names.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Dimension:
    """Reads text of one dimension; ``bounds`` keep every figure within what a float can hold."""

    units: Mapping[str, float]
    form: str
    bounds: tuple[float, float]
    unit: str

    def __call__(self, text: object) -> float:
        """Return the quantity in this dimension's unit; PydanticCustomError where it is none."""
        found = None
        if isinstance(text, int | float | str) and not isinstance(text, bool):
            found = _FORM.fullmatch(str(text).removeprefix("+"))
        value = float(found[1].replace("_", "")) if found else math.nan
        if str(text).strip().startswith("-") or value == 0 or math.isinf(value):
            wrong = "it must be more than 0 and finite"
        elif found is None:
            wrong = f"write {self.form}"
        elif found[2] not in self.units:
            wrong = f"write {self.form}"
            if "bit/s" in self.units and _BITS_OR_BYTES.fullmatch(found[2]):
                wrong = f'"{found[2]}" could mean bits or bytes a second: write Gbit/s or GB/s'
        else:
            (low, high), value = self.bounds, value * self.units[found[2]]
            if low <= value <= high:
                return value
            wrong = f"it must be from {low:g} to {high:g} {self.unit}"
        raise PydanticCustomError("quantity", "{message}", {"message": wrong})  # noqa: EM101 - a kind


rate_bits = Dimension(
    _units(_PREFIXES, **{"bit/s": 1.0, "bits/s": 1.0, "bps": 1.0, "B/s": 8.0}),
    'a rate with its unit, such as "5 Gbit/s" or "625 MB/s"',
    (1, 1e18),
    "bit/s",
)
size_bytes = Dimension(
    _units(_PREFIXES, B=1.0), 'a size with its unit, such as "80 GB" or "16 GiB"', (1, 1e21), "B"
)
seconds = Dimension(
    {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    'a time, such as "2 s", "50 ms" or "8 h"',
    (1e-9, 1e11),
    "s",
)
flops = Dimension(
    {"": 1.0, **_units(_DECIMAL, **dict.fromkeys(("FLOP/s", "FLOPS", "flops", "flop/s"), 1.0))},
    'a speed, such as "989 TFLOP/s"',
    (1, 1e24),
    "FLOP/s",
)
count = Dimension(
    {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12},
    'a number, such as 12e9 or "12B"',
    (1, 1e20),
    "in all",
)

Rate: TypeAlias = Annotated[float, BeforeValidator(rate_bits)]  # in bit/s
ByteRate: TypeAlias = Annotated[float, BeforeValidator(lambda text: rate_bits(text) / 8)]  # in B/s
Size: TypeAlias = Annotated[float, BeforeValidator(size_bytes)]  # in bytes
Time: TypeAlias = Annotated[float, BeforeValidator(seconds)]
Flops: TypeAlias = Annotated[float, BeforeValidator(flops)]  # in FLOP/s
Count: TypeAlias = Annotated[float, BeforeValidator(count)]  # B is a billion
