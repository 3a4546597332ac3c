"""Pictures as SVG text, drawn by a few small functions: no library, no script, no font to load.

Each picture carries its own style, light and dark, so that it looks the same inside a page and as
a file of its own. The same values give the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 720.0, 360.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 150.0, 56.0, 48.0
MOST_TICKS = 7
COLOURS = 8
STYLE = """
text{font:12px system-ui,sans-serif;fill:#3d4451}.title{font-size:14px;font-weight:600;fill:#1b1f27}
.grid{stroke:#e3e6ea}.axis{stroke:#8a93a0}.line{fill:none;stroke-width:2}
.dashed{stroke-dasharray:5 4}.s0{--c:#2563a8}.s1{--c:#c2500b}.s2{--c:#17804f}.s3{--c:#8b3fa8}
.s4{--c:#b0233a}.s5{--c:#7a6a12}.s6{--c:#0f7f8a}.s7{--c:#6b7280}
.line{stroke:var(--c)}.fill{fill:var(--c)}.soft{fill:var(--c);opacity:.18}
@media(prefers-color-scheme:dark){text{fill:#b6bdc8}.title{fill:#eef1f5}.grid{stroke:#2c323c}
.s0{--c:#6ea8e6}.s1{--c:#f0975a}.s2{--c:#5cc596}.s3{--c:#c68be0}
.s4{--c:#ec7485}.s5{--c:#cbb95a}.s6{--c:#5cc3cd}.s7{--c:#9aa3b0}}
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis; without bounds it spans its values. ``ticks``: these instead of round numbers."""

    label: str
    log: bool = False
    least: float | None = None
    most: float | None = None
    ticks: tuple[float, ...] = ()
    percent: bool = False

    def text(self, value: float) -> str:
        """Return a value as its tick says it."""
        return f"{100 * value:.4g} %" if self.percent else short(value)


@dataclass(frozen=True, slots=True)
class Series:
    """One line, in the legend if it has a name; ``line``: without one, circles only.

    ``marks`` are circles at its points. ``low`` and ``high`` are a band around the line, one value
    a point.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    marks: bool = False
    line: bool = True
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a lane; ``kind`` is an index into the legend's names."""

    start: float
    end: float
    kind: int


@dataclass(frozen=True, slots=True)
class Bar:
    """What a result becomes where one input is lower and where it is higher."""

    name: str
    low: float
    high: float
    low_text: str = ""
    high_text: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Maps values to pixels, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (value - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def short(value: float) -> str:
    """Return a number as people read it: 1200000 as 1.2M, 0.25 as it is."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Draw lines over two axes, with a legend at the right."""
    xs = [px for one in series for px, _ in one.points]
    ys = [py for one in series for _, py in one.points]
    ys += [value for one in series for value in (*one.low, *one.high)]
    across = _scale(x, xs, LEFT, WIDTH - RIGHT)
    up = _scale(y, ys, HEIGHT - BOTTOM, TOP)
    drawn = [_title(title), *_grid(across, up, x, y)]
    for index, one in enumerate(series):
        shade = f"s{(index if one.colour is None else one.colour) % COLOURS}"
        drawn += _series(one, shade, across, up)
        if one.name:
            drawn.append(_legend(one.name, shade, index, dashed=one.dashed, line=one.line))
    return _document(drawn, HEIGHT)


def gantt(
    title: str,
    lanes: Sequence[tuple[str, Sequence[Span]]],
    kinds: Sequence[str],
    time: Axis,
    marks: Sequence[float] = (),
) -> str:
    """Draw one lane per name with its stretches by kind; ``marks`` are ticks above the lanes."""
    row, top = 26.0, TOP + 14.0
    height = top + row * max(1, len(lanes)) + BOTTOM
    ends = [end for _, spans in lanes for span in spans for end in (span.start, span.end)]
    across = _scale(time, ends, 110.0, WIDTH - RIGHT)
    bottom = height - BOTTOM
    drawn = [_title(title)]
    drawn += [_line(across.at(at), TOP - 4, across.at(at), top - 4, "axis") for at in marks]
    for index, (name, spans) in enumerate(lanes):
        y = top + row * index
        drawn.append(_text(104, y + 15, name, anchor="end"))
        drawn += [_stretch(span, y, across, kinds) for span in spans]
    for tick in _ticks(time, across):
        drawn.append(_line(across.at(tick), bottom, across.at(tick), bottom + 4, "axis"))
        drawn.append(_text(across.at(tick), bottom + 18, time.text(tick), anchor="middle"))
    drawn.append(_text((across.start + across.end) / 2, height - 10, time.label, anchor="middle"))
    drawn += [_key(name, index) for index, name in enumerate(kinds)]
    return _document(drawn, max(height, TOP + 20.0 * len(kinds) + 20))


def tornado(title: str, bars: Sequence[Bar], base: float, value: Axis) -> str:
    """Draw what each input moves the result by, the largest swing on top, around the base."""
    ranked = sorted(bars, key=lambda bar: (-abs(bar.high - bar.low), bar.name))
    row, left = 30.0, 220.0
    height = TOP + row * max(1, len(ranked)) + BOTTOM
    values = [base, *(end for bar in ranked for end in (bar.low, bar.high))]
    across = _scale(value, values, left, WIDTH - 60)
    drawn = [_title(title)]
    for index, bar in enumerate(ranked):
        y = TOP + row * index
        drawn.append(_text(left - 12, y + 18, bar.name, anchor="end"))
        for end, told, shade in ((bar.low, bar.low_text, "s0"), (bar.high, bar.high_text, "s1")):
            begin, stop = sorted((across.at(base), across.at(end)))
            drawn.append(_box(begin, y + 6, stop - begin, row - 12, f"fill {shade}", told))
    bottom = height - BOTTOM
    drawn.append(_line(across.at(base), TOP, across.at(base), bottom, "axis"))
    drawn += [
        _text(across.at(tick), bottom + 18, value.text(tick), anchor="middle")
        for tick in _ticks(value, across)
    ]
    drawn.append(_text((left + WIDTH - 60) / 2, height - 10, value.label, anchor="middle"))
    return _document(drawn, height)


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> _Scale:
    seen = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)]
    low = min(seen, default=1.0) if axis.least is None else axis.least
    high = max(seen, default=1.0) if axis.most is None else axis.most
    if axis.log:
        low = max(low, 1e-12)
        high = high if high > low * (1 + 1e-9) else low * 10
    elif high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        high = low + max(abs(low), 1.0)
    return _Scale(low, high, start, end, axis.log)


def _ticks(axis: Axis, scale: _Scale) -> list[float]:
    """Return round numbers within the scale; of an axis that names its own, those."""
    inside = [tick for tick in axis.ticks if scale.low <= tick <= scale.high]
    if inside:
        return inside
    if scale.log:
        first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
        wide = last - first > MOST_TICKS // 2
        found = [f * 10.0**p for p in range(first, last + 1) for f in ((1,) if wide else (1, 2, 5))]
    else:
        rough = (scale.high - scale.low) / (MOST_TICKS - 1)
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * next(f for f in (1, 2, 5, 10) if f * power >= rough * (1 - 1e-9))
        begin, stop = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
        found = [index * step for index in range(begin, stop + 1)]
    slack = 1e-9 * abs(scale.high)
    return [tick for tick in found if scale.low - slack <= tick <= scale.high + slack]


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    drawn: list[str] = []
    for tick in _ticks(y, up):
        drawn.append(_line(LEFT, up.at(tick), WIDTH - RIGHT, up.at(tick), "grid"))
        drawn.append(_text(LEFT - 8, up.at(tick) + 4, y.text(tick), anchor="end"))
    for tick in _ticks(x, across):
        drawn.append(_line(across.at(tick), HEIGHT - BOTTOM, across.at(tick), TOP, "grid"))
        at = across.at(tick), HEIGHT - BOTTOM + 18
        drawn.append(_text(*at, x.text(tick), anchor="middle"))
    drawn.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(_text(middle, HEIGHT - 10, x.label, anchor="middle"))
    drawn.append(_text(14, TOP - 16, y.label))
    return drawn


def _series(one: Series, shade: str, across: _Scale, up: _Scale) -> list[str]:
    drawn: list[str] = []
    placed = [(across.at(x), up.at(y)) for x, y in one.points]
    if one.low and one.high:
        above = [(x, up.at(high)) for (x, _), high in zip(placed, one.high, strict=True)]
        below = [(x, up.at(low)) for (x, _), low in zip(placed, one.low, strict=True)]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*above, *reversed(below)))
        drawn.append(f'<polygon class="soft {shade}" points="{shape}"/>')
    if one.line and placed:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        dashed = " dashed" * one.dashed
        drawn.append(f'<polyline class="line {shade}{dashed}" points="{path}"/>')
    if one.marks or not one.line:
        for (x, y), (at, value) in zip(placed, one.points, strict=True):
            told = escape(f"{one.name}: {short(at)}, {value:.4g}")
            circle = f'<circle class="fill {shade}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            drawn.append(f"{circle}<title>{told}</title></circle>")
    return drawn


def _stretch(span: Span, y: float, across: _Scale, kinds: Sequence[str]) -> str:
    begin, stop = across.at(span.start), across.at(span.end)
    told = f"{kinds[span.kind]}: {short(span.start)} to {short(span.end)}"
    shade = f"fill s{span.kind % COLOURS}"
    return _box(begin, y + 2, max(stop - begin, 0.5), 18, shade, told)


def _legend(name: str, shade: str, index: int, *, dashed: bool, line: bool) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 12 + 20 * index
    shown = f'<circle class="fill {shade}" cx="{x + 10}" cy="{y - 4}" r="3.5"/>'
    if line:
        style = f"line {shade}" + " dashed" * dashed
        shown = f'<path class="{style}" d="M{x} {y - 4}h20"/>'
    return shown + _text(x + 28, y, name)


def _key(name: str, index: int) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 4 + 20 * index
    return _box(x, y, 12, 12, f"fill s{index % COLOURS}", name) + _text(x + 20, y + 11, name)


def _title(text: str) -> str:
    return f'<text class="title" x="14" y="20">{escape(text)}</text>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{style}" {ends}/>'


def _box(x: float, y: float, width: float, height: float, style: str, told: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{style}" {place}><title>{escape(told)}</title></rect>'


def _document(drawn: Sequence[str], height: float) -> str:
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}"'
        f' role="img"><style>{STYLE}</style>\n{body}\n</svg>\n'
    )
