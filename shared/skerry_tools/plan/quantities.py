"""Quantities as people write them: ``"5 Gbit/s"``, ``"50 ms"``, ``"80 GB"``, ``"12B"``.

A rate or a size must say its unit, and one that could be bits as well as bytes is refused: a factor
of eight is what plans go wrong by.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, NoReturn, TypeAlias

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
RATES, SIZES, TIMES, SPEEDS, NUMBERS = (1, 1e18), (1, 1e21), (1e-9, 1e11), (1, 1e24), (1, 1e20)
"""What can be: bit/s, B, s, FLOP/s, counts. Beyond it figures would leave what a float can hold."""
_FORM = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*\Z")


def rate_bits(text: object) -> float:
    """Return a rate in bit/s."""
    number, unit = _split(text, 'such as "5 Gbit/s" or "625 MB/s"')
    found = re.fullmatch(r"([kKMGT]?i?)(bit/s|bits/s|bps|B/s)", unit)
    scale = {**DECIMAL, **BINARY}.get(found[1]) if found else None
    if found is None or scale is None:
        if re.fullmatch(r"[kKMGT]?i?(b|B)(/s|ps)?", unit, re.IGNORECASE):
            _refuse(f'says "{unit}", bits or bytes a second: write Gbit/s or GB/s')
        _refuse('must be a rate with its unit, such as "5 Gbit/s" or "625 MB/s"')
    return _within(number * scale * (8.0 if found[2] == "B/s" else 1.0), RATES, "bit/s")


def rate_bytes(text: object) -> float:
    """Return a rate in B/s."""
    return rate_bits(text) / 8


def size_bytes(text: object) -> float:
    """Return a size in bytes."""
    number, unit = _split(text, 'such as "80 GB" or "16 GiB"')
    found = re.fullmatch(r"([kKMGTP]?i?)B", unit)
    scale = {**DECIMAL, **BINARY}.get(found[1]) if found else None
    if scale is None:
        _refuse('must be a size with its unit, such as "80 GB" or "16 GiB"')
    return _within(number * scale, SIZES, "B")


def seconds(text: object) -> float:
    """Return a time in seconds; a bare number is seconds."""
    number, unit = _split(text, 'such as "2 s" or "50 ms"')
    if (unit or "s") not in SECONDS:
        _refuse('must be a time, such as "2 s", "50 ms" or "8 h"')
    return _within(number * SECONDS[unit or "s"], TIMES, "s")


def flops(text: object) -> float:
    """Return operations a second; a bare number is FLOP/s."""
    number, unit = _split(text, 'such as "989 TFLOP/s"')
    found = re.fullmatch(r"(?:([kKMGTPE]?)(?:FLOP/s|FLOPS|flops|flop/s))?", unit)
    if found is None:
        _refuse('must be a speed, such as "989 TFLOP/s"')
    return _within(number * DECIMAL[found[1] or ""], SPEEDS, "FLOP/s")


def count(text: object) -> float:
    """Return how many: ``12e9``, ``"12B"``, ``"1.5T"``; B is a billion."""
    number, unit = _split(text, 'such as 12e9 or "12B"')
    if unit not in COUNTS:
        _refuse('must be a number, such as 12e9 or "12B"')
    return _within(number * COUNTS[unit], NUMBERS, "in all")


def unit_family(text: str) -> str:
    """Return whether a rate is written in ``bits`` or in ``bytes``."""
    return "bytes" if text.rstrip().endswith("B/s") else "bits"


def _split(text: object, example: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, (int, float, str)):
        _refuse(f"must be a quantity {example}")
    found = _FORM.fullmatch(str(text).removeprefix("+"))
    if found is None:
        sign = "more than 0" if str(text).strip().startswith("-") else f"a quantity {example}"
        _refuse(f"must be {sign}")
    number = float(found[1].replace("_", ""))
    if number <= 0 or not math.isfinite(number):
        _refuse("must be more than 0 and finite")
    return number, found[2]


def _within(value: float, bounds: tuple[float, float], unit: str) -> float:
    if not bounds[0] <= value <= bounds[1]:
        _refuse(f"must be from {bounds[0]:g} to {bounds[1]:g} {unit}")
    return value


def _refuse(message: str) -> NoReturn:
    raise PydanticCustomError("quantity", "{message}", {"message": message})  # noqa: EM101 - a kind


Rate: TypeAlias = Annotated[float, BeforeValidator(rate_bits)]
"""In bit/s."""
ByteRate: TypeAlias = Annotated[float, BeforeValidator(rate_bytes)]
"""In B/s."""
Size: TypeAlias = Annotated[float, BeforeValidator(size_bytes)]
"""In bytes."""
Time: TypeAlias = Annotated[float, BeforeValidator(seconds)]
"""In seconds."""
Flops: TypeAlias = Annotated[float, BeforeValidator(flops)]
"""In FLOP/s."""
Count: TypeAlias = Annotated[float, BeforeValidator(count)]
"""A large number."""
