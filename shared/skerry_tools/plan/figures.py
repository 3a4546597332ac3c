"""What a command answers with: figures with their unit and convention, in tables, and charts.

A figure is an input, derived from inputs, or extrapolated beyond what its model was checked on. One
that does not exist is None, never NaN or infinite. Units are plain words, all decimal: ``s``,
``bit/s``, ``B``, ``param``, ``1`` for a bare number, ``x`` for a factor, ``share`` for a part of
one (shown in per cent), or a currency code such as ``USD``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Row: TypeAlias = tuple[str, float | None, str, str]
"""A figure's name, value, unit and convention."""
Point: TypeAlias = tuple[float, float]
Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
LEGEND = "(= input, ? extrapolated, all else derived; k, M, G, T are powers of 1000)"
_SCALED = {"bit", "bit/s", "B", "B/s", "param", "token", "tokens/s", "chip"}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DURATIONS = ((365.25 * 86400, "years"), (86400.0, "d"), (3600.0, "h"), (60.0, "min"))


class FigureKind(StrEnum):
    """Where a figure comes from."""

    INPUT = "input"
    DERIVED = "derived"
    EXTRAPOLATED = "extrapolated"


_MARKS = {FigureKind.INPUT: "=", FigureKind.DERIVED: "", FigureKind.EXTRAPOLATED: "?"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity; ``value`` is None where it does not exist. ValueError for NaN and infinity."""

    value: float | None
    unit: str
    convention: str = ""
    kind: FigureKind = FigureKind.DERIVED

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            msg = f"A figure in {self.unit} cannot be {self.value}: use None where there is none."
            raise ValueError(msg)

    @property
    def text(self) -> str:
        shorter = "none" if self.value is None else shown(self.value, self.unit)
        return _MARKS[self.kind] + shorter

    def json(self) -> dict[str, Json]:
        return {
            "value": self.value,
            "unit": self.unit,
            "kind": self.kind.value,
            "convention": self.convention,
        }


def figures(rows: Iterable[Row], kind: FigureKind = FigureKind.DERIVED) -> dict[str, Figure]:
    """Return figures of one kind by name."""
    return {name: Figure(value, unit, words, kind) for name, value, unit, words in rows}


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Figures by name, or by row and name; ``join_alike``: rows that are alike are printed once."""

    name: str
    title: str
    rows: Mapping[str, Figure | Mapping[str, Figure]]
    notes: Sequence[str] = ()
    join_alike: bool = False

    def lines(self) -> list[str]:
        """Return the table as text; a figure that only other rows have is a dash."""
        wide = [row for row in self.rows.values() if not isinstance(row, Figure)]
        columns = list(dict.fromkeys(key for row in wide for key in row))
        body: dict[tuple[str, ...], list[str]] = {}
        for name, row in self.rows.items():
            cells = (
                (row.text, row.convention)
                if isinstance(row, Figure)
                else tuple(row[key].text if key in row else "-" for key in columns)
            )
            body.setdefault(cells if self.join_alike else (*cells, name), []).append(name)
        rows = [("", *(key.replace("_", " ") for key in columns))] if columns else []
        for cells, names in body.items():
            alike = f" (and {len(names) - 1} alike)" if len(names) > 1 else ""
            rows.append((names[0].replace("_", " ") + alike, *cells[: len(columns) or 2]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = (
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        )
        return [self.title, *(f"  {line}".rstrip() for line in (*text, *self.notes))]

    def flat(self) -> Iterator[tuple[str, Figure]]:
        """Yield every figure with a name of its own."""
        for name, row in self.rows.items():
            inner = {"": row} if isinstance(row, Figure) else row
            yield from ((f"{name}: {key}" if key else name, one) for key, one in inner.items())

    def json(self) -> dict[str, Json]:
        """Return the figures as plain values, by name, or by row and name."""
        return {
            name: row.json()
            if isinstance(row, Figure)
            else {key: figure.json() for key, figure in row.items()}
            for name, row in self.rows.items()
        }


@dataclass(frozen=True, slots=True)
class LineChart:
    """Shares over a number: a line for each series, and published points by the same names."""

    name: str
    title: str
    across: str
    series: Mapping[str, Sequence[Point]]
    published: Mapping[str, Sequence[Point]] = field(default_factory=dict[str, Sequence[Point]])
    log: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its first line says it all. ``charts`` are only made for a report."""

    text: Sequence[str]
    json: Mapping[str, Json]
    tables: Sequence[FigureTable]
    charts: Callable[[], Sequence[LineChart]]
    exit_code: int = 0


def sourced(source: str, status: Mapping[str, str]) -> list[str]:
    """Return where a scenario's values come from, as lines of text."""
    lines = [f"Source: {source}", *(f"  {path}: {text}" for path, text in status.items()), ""]
    return lines if source else []


def several(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 site``, ``4 sites``."""
    return f"{count} {noun}{'s' * (count != 1)}"


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
