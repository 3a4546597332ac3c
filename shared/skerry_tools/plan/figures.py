"""Figures that say where they come from: what a plan or a simulation answers with.

A figure is an input, derived from inputs, or extrapolated beyond what the model behind it was
checked on; it carries its unit and the convention it follows, so that nobody has to guess whether
a Gbit is 1e9 bits. A figure that does not exist is None, never NaN and never infinite.

Units are plain words, all decimal: ``s``, ``bit``, ``bit/s``, ``B``, ``B/s``, ``param``, ``token``,
``tokens/s``, ``step``, ``chip``, ``FLOP``, ``FLOP/s``, ``1`` for a bare number, ``x`` for a factor,
``share`` for a part of one (shown in per cent), or a currency code such as ``USD``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"


class Kind(StrEnum):
    """Where a figure comes from."""

    INPUT = "input"
    DERIVED = "derived"
    EXTRAPOLATED = "extrapolated"


MARKS = {Kind.INPUT: "=", Kind.DERIVED: "", Kind.EXTRAPOLATED: "?"}
LEGEND = "(= input, ? extrapolated, all else derived; k, M, G, T are powers of 1000)"
"""What the marks in printed tables mean."""

_SCALED = {"bit", "bit/s", "B", "B/s", "param", "token", "tokens/s", "FLOP", "FLOP/s", "chip"}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DURATIONS = ((365.25 * 86400, "years"), (86400.0, "d"), (3600.0, "h"), (60.0, "min"))


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity; ``value`` is None where it does not exist.

    Raises ValueError for NaN and infinity: whoever computes must say None and why.
    """

    value: float | None
    unit: str
    kind: Kind = Kind.DERIVED
    convention: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        if self.value is not None and not math.isfinite(self.value):
            msg = f"A figure in {self.unit} cannot be {self.value}: say None where there is none."
            raise ValueError(msg)

    @property
    def text(self) -> str:
        """Value and unit, short enough for a cell."""
        return "none" if self.value is None else shown(self.value, self.unit)

    @property
    def cell(self) -> str:
        """The text with the mark of its kind in front."""
        return f"{MARKS[self.kind]}{self.text}"

    def json(self) -> dict[str, Json]:
        """Return the figure for machines."""
        return {
            "value": self.value,
            "unit": self.unit,
            "kind": self.kind.value,
            "convention": self.convention,
        }


def given(value: float | None, unit: str, convention: str = "") -> Figure:
    """Return an input."""
    return Figure(value, unit, Kind.INPUT, convention)


def derived(value: float | None, unit: str, convention: str = "", *of: Figure) -> Figure:
    """Return what follows from the figures ``of``: extrapolated if any of them is."""
    doubtful = any(figure.kind is Kind.EXTRAPOLATED for figure in of)
    return Figure(value, unit, Kind.EXTRAPOLATED if doubtful else Kind.DERIVED, convention)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Figures one below the other, by name in snake case, with their conventions beside them."""

    name: str
    title: str
    figures: Mapping[str, Figure]

    def lines(self) -> list[str]:
        """Return the sheet as text."""
        rows = [(_label(key), f.cell, f.convention) for key, f in self.figures.items()]
        return [self.title, *_aligned(rows)]

    def json(self) -> Json:
        """Return the figures for machines, by name."""
        return {key: figure.json() for key, figure in self.figures.items()}


@dataclass(frozen=True, slots=True)
class Grid:
    """The same figures of several things: ``rows`` maps a thing to its figures by name.

    A figure that some row lacks is shown as a dash. ``notes`` are printed below.
    """

    name: str
    title: str
    rows: Mapping[str, Mapping[str, Figure]]
    notes: Sequence[str] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Every name that any row has, in the order of appearance."""
        return tuple(dict.fromkeys(key for row in self.rows.values() for key in row))

    def lines(self) -> list[str]:
        """Return the grid as text, a line per row."""
        columns = self.columns
        head = ("", *(_label(key) for key in columns))
        body = [
            (name, *(row[key].cell if key in row else "-" for key in columns))
            for name, row in self.rows.items()
        ]
        return [self.title, *_aligned([head, *body]), *(f"  {note}" for note in self.notes)]

    def json(self) -> Json:
        """Return the figures for machines, by row and name."""
        return {
            name: {key: figure.json() for key, figure in row.items()}
            for name, row in self.rows.items()
        }


def shown(value: float, unit: str) -> str:
    """Return a number with its unit as people write it: ``8.00 Gbit/s``, ``3.1 d``, ``98.2 %``."""
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "x":
        return f"{value:,.2f} x" if value < 100 else f"{value:,.0f} x"
    if unit == "s":
        return _duration(value)
    if unit in _SCALED:
        return _scaled(value, unit)
    if unit.isupper() and len(unit) == 3:
        return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:,.2f} {unit}"
    plain = f"{value:,.0f}" if float(value).is_integer() else _three_digits(value)
    return plain if unit == "1" else f"{plain} {unit}{'s' * (unit == 'step' and value != 1)}"


def _scaled(value: float, unit: str) -> str:
    size = abs(value)
    power = 0 if size < 1000 else min(int(math.log10(size) / 3 + 1e-12), len(_PREFIXES) - 1)
    number = value / 1000**power
    plain = f"{number:.0f}" if not power and number.is_integer() else _three_digits(number)
    return f"{plain} {_PREFIXES[power]}{unit}"


def _duration(value: float) -> str:
    for seconds, unit in _DURATIONS:
        if abs(value) >= 2 * seconds:
            return f"{_three_digits(value / seconds)} {unit}"
    if value and abs(value) < 1:
        return f"{_three_digits(value * 1000)} ms"
    return f"{_three_digits(value)} s"


def _three_digits(value: float) -> str:
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.01 or not size else f"{value:.2g}"


def _label(name: str) -> str:
    return name.replace("_", " ")


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows with their columns below one another, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
