"""One HTML file that holds a whole report: nothing is loaded from anywhere. And its parts as files.

The same parts give the same bytes: no time, no name of a machine.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f27;--soft:#5b6472;--rule:#dfe3e8;--page:#fff;
--shade:#f5f7f9}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa3b0;--rule:#2c323c;--page:#14171c;
--shade:#1c2027}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:56rem;
margin:2rem auto;padding:0 1rem}h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2.2rem}
.lead{font-size:1.05rem;background:var(--shade);padding:.7rem 1rem;border-radius:6px}
p.note{color:var(--soft)}figure{margin:1rem 0}svg{width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.25rem .7rem;border-bottom:1px solid var(--rule);vertical-align:top}
th:first-child,th.text,td:first-child,td.text{text-align:left}
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table: what is in the HTML page is also written as ``<name>.csv``."""

    name: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str | float | int, ...], ...]

    def csv(self) -> str:
        """Return it as CSV; numbers with all their digits."""
        told = io.StringIO(newline="")
        writer = csv.writer(told, lineterminator="\n")
        writer.writerow(self.heads)
        writer.writerows(self.rows)
        return told.getvalue()


@dataclass(frozen=True, slots=True)
class Part:
    """One chapter of a report: sentences, pictures by name, tables.

    ``files`` are tables that are only written beside the page, for programs.
    """

    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()
    tables: tuple[Rows, ...] = ()
    files: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report; ``lead`` is the answer, in a sentence or two."""

    title: str
    lead: str
    parts: tuple[Part, ...] = field(default=())

    def html(self) -> str:
        """Return the page."""
        chapters = "\n".join(_part(part) for part in self.parts)
        name = escape(self.title)
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{name}</title><style>{STYLE}</style></head>\n"
            f'<body><h1>{name}</h1>\n<p class="lead">{escape(self.lead)}</p>\n'
            f"{chapters}\n</body></html>\n"
        )


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``report.html`` and each picture and table beside it; return what was written.

    ConfigError for a folder that cannot be written.
    """
    files = {"report.html": report.html()}
    for part in report.parts:
        files |= {f"{name}.svg": drawn for name, drawn in part.pictures}
        files |= {f"{table.name}.csv": table.csv() for table in (*part.tables, *part.files)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        msg = f"{folder} cannot be written ({error.strerror}): name another folder."
        raise ConfigError(msg, path=str(folder)) from error
    return [folder / name for name in files]


def _part(part: Part) -> str:
    said = [f"<h2>{escape(part.title)}</h2>"]
    said += [f'<p class="note">{escape(sentence)}</p>' for sentence in part.text]
    said += [f"<figure>{drawn}</figure>" for _, drawn in part.pictures]
    said += [_table(table) for table in part.tables]
    return "\n".join(said)


def _table(table: Rows) -> str:
    first = table.rows[0] if table.rows else table.heads
    head = "".join(
        f'<th class="text">{escape(name)}</th>'
        if isinstance(cell, str)
        else f"<th>{escape(name)}</th>"
        for name, cell in zip(table.heads, first, strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>'


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return f'<td class="text">{escape(value)}</td>'
    return f"<td>{value:,}</td>" if isinstance(value, int) else f"<td>{value:.4g}</td>"
