"""Quantities as people write them: ``"5 Gbit/s"``, ``"50 ms"``, ``"80 GB"``, ``"12B"``.

A rate or a size must name its unit, and one that could mean bits as well as bytes is refused: plans
go wrong by that factor of eight. What is read is in bit/s, B, s, FLOP/s or a bare count.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_PREFIXES = {**_DECIMAL, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_FORM = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*\Z")
_BITS_OR_BYTES = re.compile(r"[kKMGT]?i?b(/s|ps)?", re.IGNORECASE)


def _units(prefixes: Mapping[str, float], *names: tuple[str, float]) -> dict[str, float]:
    return {f"{p}{name}": scale * one for p, scale in prefixes.items() for name, one in names}


@dataclass(frozen=True, slots=True, eq=False)
class Dimension:
    """Reads text of one dimension; ``bounds`` keep every figure within what a float can hold."""

    units: Mapping[str, float]
    form: str
    bounds: tuple[float, float]
    unit: str

    def __call__(self, text: object) -> float:
        """Return the quantity in this dimension's unit; PydanticCustomError where it is none."""
        if isinstance(text, bool) or not isinstance(text, int | float | str):
            _refuse(f"write {self.form}")
        found = _FORM.fullmatch(str(text).removeprefix("+"))
        if found is None:
            negative = str(text).strip().startswith("-")
            _refuse("it must be more than 0" if negative else f"write {self.form}")
        number, unit = float(found[1].replace("_", "")), found[2]
        if number <= 0 or not math.isfinite(number):
            _refuse("it must be more than 0 and finite")
        if unit not in self.units:
            if "bit/s" in self.units and _BITS_OR_BYTES.fullmatch(unit):
                _refuse(f'"{unit}" could mean bits or bytes a second: write Gbit/s or GB/s')
            _refuse(f"write {self.form}")
        value, (low, high) = number * self.units[unit], self.bounds
        if not low <= value <= high:
            _refuse(f"it must be from {low:g} to {high:g} {self.unit}")
        return value


def _refuse(message: str) -> NoReturn:
    raise PydanticCustomError("quantity", "{message}", {"message": message})  # noqa: EM101 - a kind


rate_bits = Dimension(
    _units(_PREFIXES, ("bit/s", 1.0), ("bits/s", 1.0), ("bps", 1.0), ("B/s", 8.0)),
    'a rate with its unit, such as "5 Gbit/s" or "625 MB/s"',
    (1, 1e18),
    "bit/s",
)
size_bytes = Dimension(
    _units(_PREFIXES, ("B", 1.0)),
    'a size with its unit, such as "80 GB" or "16 GiB"',
    (1, 1e21),
    "B",
)
seconds = Dimension(
    {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    'a time, such as "2 s", "50 ms" or "8 h"',
    (1e-9, 1e11),
    "s",
)
flops = Dimension(
    {"": 1.0, **_units(_DECIMAL, *((n, 1.0) for n in ("FLOP/s", "FLOPS", "flops", "flop/s")))},
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


def rate_bytes(text: object) -> float:
    """Return a rate in B/s."""
    return rate_bits(text) / 8


Rate: TypeAlias = Annotated[float, BeforeValidator(rate_bits)]  # in bit/s
ByteRate: TypeAlias = Annotated[float, BeforeValidator(rate_bytes)]  # in B/s
Size: TypeAlias = Annotated[float, BeforeValidator(size_bytes)]  # in bytes
Time: TypeAlias = Annotated[float, BeforeValidator(seconds)]
Flops: TypeAlias = Annotated[float, BeforeValidator(flops)]  # in FLOP/s
Count: TypeAlias = Annotated[float, BeforeValidator(count)]  # B is a billion
