"""The answer of both commands: a first line, figures with unit and convention, and notes.

Units are plain words, all decimal: ``s``, ``bit/s``, ``B``, ``param``, ``1`` for a bare number,
``x`` for a factor, ``share`` for a part of one (shown in per cent), or a currency such as ``USD``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from rich.console import Console
from rich.table import Table

Kind: TypeAlias = Literal["input", "derived", "extrapolated"]
LEGEND = "(= input, ? extrapolated, all else derived; k, M, G, T are powers of 1000)"
PIPED_WIDTH = 200
_MARKS = {"input": "=", "derived": "", "extrapolated": "?"}
_SCALED = {"bit", "bit/s", "B", "B/s", "param", "token", "tokens/s", "chip", "FLOP"}
_PLURAL = {"step", "core", "learner", "site"}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DURATIONS = ((365.25 * 86400, "years"), (86400.0, "d"), (3600.0, "h"), (60.0, "min"))


class Figure(NamedTuple):
    """One quantity; ``value`` is None where it does not exist, never NaN or infinite."""

    value: float | None
    unit: str
    convention: str = ""

    def __str__(self) -> str:
        return "none" if self.value is None else shown(self.value, self.unit)


Figures: TypeAlias = Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Figures by name, or by row and name, all of one kind."""

    name: str
    title: str
    rows: Figures | Mapping[str, Figures]
    kind: Kind = "derived"
    notes: Sequence[str] = ()

    def lines(self) -> Table:
        """Return the table to be printed; a figure that only other rows have is a dash.

        Rows that differ only in the first word of their name, a site's, become one. A convention
        that all figures of a row share is printed behind them.
        """
        mark = _MARKS[self.kind]
        rows = {n: {"": r} if isinstance(r, Figure) else r for n, r in self.rows.items()}
        columns = list(dict.fromkeys(key for row in rows.values() for key in row))
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, row in rows.items():
            cells = [f"{mark}{row[key]}" if key in row else "-" for key in columns]
            words = {figure.convention for figure in row.values()}
            key = (*cells, words.pop() if len(words) == 1 else "", name.partition(" ")[2])
            alike.setdefault(key, []).append(name)
        heads = [column.replace("_", " ") for column in ("", *columns, "")]
        table = Table(*heads, box=None, pad_edge=False, show_header=columns != [""])
        for (*cells, _), names in alike.items():
            first, _, rest = names[0].replace("_", " ").partition(" ")
            more = f" (and {len(names) - 1} alike)" if len(names) > 1 else ""
            table.add_row(f"{first}{more} {rest}".rstrip(), *cells)
        return table

    def json(self) -> dict[str, Any]:
        def plain(found: Figure | Figures | Mapping[str, Figures]) -> dict[str, Any]:
            if isinstance(found, Figure):
                return {**found._asdict(), "kind": self.kind}
            return {name: plain(part) for name, part in found.items()}

        return plain(self.rows)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: ``first`` says it all; ``facts`` are for JSON only."""

    first: str
    tables: Sequence[FigureTable]
    mind: Sequence[str]
    source: str
    status: Mapping[str, str]
    facts: Mapping[str, object] = field(default_factory=dict[str, object])

    def json(self) -> str:
        """Return it as JSON; ValueError for a figure that is NaN or infinite."""
        figures = {table.name: table.json() for table in self.tables}
        found = {"answer": self.first, **self.facts, "figures": figures, "mind": self.mind}
        found |= {"source": self.source, "status": self.status}
        return json.dumps(found, indent=2, allow_nan=False)

    def print(self) -> None:
        """Print it for people; in wide lines where the output is no terminal."""
        console, parts = Console(), list[str | Table]([self.first])
        if not console.is_terminal:
            console.width = PIPED_WIDTH
        for table in self.tables:
            parts += ["", table.title, table.lines(), *table.notes]
        if self.mind:
            parts += ["", "Mind", *(f"  {note}" for note in self.mind)]
        if self.source:
            status = (f"  {path}: {text}" for path, text in self.status.items())
            parts += ["", f"Source: {self.source}", *status]
        for part in (*parts, "", LEGEND):
            is_line = isinstance(part, str)
            console.print(part, markup=False, highlight=False, soft_wrap=is_line)


def shown(value: float, unit: str) -> str:
    """Return a number with its unit as people write it: ``8.00 Gbit/s``, ``3.1 d``, ``98.2 %``."""
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "x":
        return f"{value:,.{2 * (value < 100)}f} x"
    if unit == "s":
        for seconds, longer in _DURATIONS:
            if abs(value) >= 2 * seconds:
                return f"{_three_digits(value / seconds)} {longer}"
        short = 0 < abs(value) < 1
        return f"{_three_digits(value * 1000)} ms" if short else f"{_three_digits(value)} s"
    if unit in _SCALED and abs(value) >= 1000:
        power = min(int(math.log10(abs(value)) / 3 + 1e-12), len(_PREFIXES) - 1)
        return f"{_three_digits(value / 1000**power)} {_PREFIXES[power]}{unit}"
    plain = f"{value:,.0f}" if float(value).is_integer() else _three_digits(value)
    plural = "s" * (unit in _PLURAL and value != 1)
    return plain if unit == "1" else f"{plain} {unit}{plural}"


def _three_digits(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value:,.{digits}f}" if size >= 0.01 or not size else f"{value:.2g}"
