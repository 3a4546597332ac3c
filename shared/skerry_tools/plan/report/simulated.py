"""The report of a simulation: goodput by chips, uptime by K, a Gantt of learners, a tornado."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry_tools.plan import closed, merges
from skerry_tools.plan.figures import Sheet
from skerry_tools.plan.outcome import lead, parts
from skerry_tools.plan.process import Use
from skerry_tools.plan.report.page import Part, Report, Rows
from skerry_tools.plan.report.svg import Axis, Bar, Series, Span, gantt, lines, short, tornado
from skerry_tools.plan.simulate import NOTHING, round_plan, round_tracks
from skerry_tools.plan.sweep import SWING, error_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry_tools.plan.figures import Figure, Grid
    from skerry_tools.plan.process import Timeline
    from skerry_tools.plan.scenario import Request
    from skerry_tools.plan.simulate import Outcome, Struck
    from skerry_tools.plan.sweep import Cell, Swing

STRETCH_S = 600.0
MOST_MARKS = 400
MOST_LANES = 24
SHARE = Axis("share", least=0.0, most=1.0, percent=True)
KINDS = tuple(use.name.lower() for use in Use)


def report(
    request: Request,
    found: Outcome,
    cells: Sequence[Cell] = (),
    swings: Sequence[Swing] = (),
    struck: Struck = NOTHING,
) -> Report:
    """Return the whole report of a simulation."""
    told = [_by_chips(cells)] if cells else []
    told += [_uptime(request, found)] if found.learners > 1 else []
    told.append(_gantt(request, found, struck))
    told += [_tornado(found, swings)] if swings else []
    told += [_figures(request, found), _sources(request, found)]
    return Report(f"Simulation: {request.name}", lead(request, found), tuple(told))


def _figures(request: Request, found: Outcome) -> Part:
    told = parts(request, found)
    pages = [Rows(f"{p.name}-shown", (p.title, "", "", ""), _shown(p)) for p in told]
    heads = ("", "value", "unit", "kind", "convention")
    files = [Rows(p.name, heads, tuple(_row(*named) for named in _flat(p))) for p in told]
    return Part("Figures", tables=tuple(pages), files=tuple(files))


def _shown(part: Sheet | Grid) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (name.replace("_", " "), figure.text, figure.kind.value, figure.convention)
        for name, figure in _flat(part)
    )


def _flat(part: Sheet | Grid) -> list[tuple[str, Figure]]:
    if isinstance(part, Sheet):
        return list(part.figures.items())
    return [(f"{row}, {key}", one) for row, own in part.rows.items() for key, one in own.items()]


def _row(name: str, figure: Figure) -> tuple[str | float, ...]:
    value = "none" if figure.value is None else figure.value
    return name.replace("_", " "), value, figure.unit, figure.kind.value, figure.convention


def _by_chips(cells: Sequence[Cell]) -> Part:
    rows = list(dict.fromkeys(cell.row for cell in cells))
    series: list[Series] = []
    for index, row in enumerate(rows):
        own = [cell for cell in cells if cell.row == row]
        points = tuple((cell.chips, cell.goodput) for cell in own)
        low = tuple(max(0.0, cell.goodput - cell.half_width) for cell in own)
        high = tuple(min(1.0, cell.goodput + cell.half_width) for cell in own)
        series.append(Series(row, points, low=low, high=high, colour=index))
    for index, row in enumerate(rows):
        told = tuple(
            (c.chips, c.published) for c in cells if c.row == row and c.published is not None
        )
        if told:
            series.append(Series("", told, line=False, colour=index))
    chips = tuple(sorted({cell.chips for cell in cells}))
    picture = lines(
        "Goodput against chips; dots: published",
        series,
        Axis("chips", log=True, ticks=chips),
        SHARE,
    )
    heads = ("row", "chips", "goodput", "half of 95 % interval", "published")
    values = tuple(
        (c.row, int(c.chips), c.goodput, c.half_width, "" if c.published is None else c.published)
        for c in cells
    )
    file = Rows("goodput-by-chips", heads, values)
    error = error_points(list(cells))
    said = () if error is None else (f"Root-mean-square error: {error:.2f} points.",)
    pictures = (("goodput-by-chips", picture),)
    return Part("Goodput by chips", said, pictures, (_table(cells, chips, rows),), (file,))


def _table(cells: Sequence[Cell], chips: Sequence[float], rows: Sequence[str]) -> Rows:
    """Return goodputs as people read them: a column for each number of chips."""
    told = {(c.row, c.chips): _text(c) for c in cells}
    heads = ("goodput, % (published)", *(short(n) for n in chips))
    body = tuple((row, *(told.get((row, n), "") for n in chips)) for row in rows)
    return Rows("goodput-table", heads, body)


def _text(cell: Cell) -> str:
    published = "" if cell.published is None else f" ({100 * cell.published:.0f})"
    return f"{100 * cell.goodput:.1f}{published}"


def _uptime(request: Request, found: Outcome) -> Part:
    simulated = tuple((float(k), share) for k, share in enumerate(found.uptime, start=1))
    binomial = tuple(
        (k, min(1.0, closed.uptime(int(k), found.learners, found.running))) for k, _ in simulated
    )
    quorum = request.run.sync.quorum
    picture = lines(
        "Uptime(K): share of the time that at least K learners train",
        [Series("simulated", simulated, marks=True), Series("binomial", binomial, dashed=True)],
        Axis(f"K (this run's: {quorum})", ticks=tuple(k for k, _ in simulated)),
        SHARE,
    )
    taking = found.merges.shares(found.learners)
    table = Rows(
        "uptime",
        ("K", "uptime(K)", "binomial", "merges with K contributions"),
        tuple(
            (int(k), share, other, taking[int(k)])
            for (k, share), (_, other) in zip(simulated, binomial, strict=True)
        ),
    )
    return Part("Uptime", pictures=(("uptime", picture),), tables=(table,))


def _gantt(request: Request, found: Outcome, struck: Struck) -> Part:
    """Draw ten minutes, from shortly before the first failure on."""
    first = [t.times[1] for t in found.timelines if t.times.size > 1]
    begin = max(0.0, min(float(min(first, default=0.0)) - 60.0, found.end_s - STRETCH_S))
    until = min(begin + STRETCH_S, found.end_s)
    shown = found.timelines[:MOST_LANES]
    lanes = [(f"learner {n}", _spans(t, begin, until)) for n, t in enumerate(shown)]
    marks: list[float] = []
    if request.scene.fleet.layout == "decoupled" and found.merges.seen:
        tracks = round_tracks(request, found.timelines, found.paces, struck)
        plan = round_plan(request)
        rounds = merges.stretch(plan, tracks, begin, until, MOST_MARKS, struck.stalled)
        marks = [m.closed_s for m in rounds]
    used = sorted({span.kind for _, spans in lanes for span in spans})
    compact = {kind: index for index, kind in enumerate(used)}
    lanes = [(n, [Span(s.start, s.end, compact[s.kind]) for s in spans]) for n, spans in lanes]
    picture = gantt(
        "Ten minutes of the run; ticks on top: rounds that close",
        lanes,
        [KINDS[kind] for kind in used],
        Axis("seconds since the start", least=begin, most=until),
        marks,
    )
    return Part("Learners in time", pictures=(("learners", picture),))


def _spans(timeline: Timeline, begin: float, until: float) -> list[Span]:
    ends = timeline.times + timeline.lengths
    found: list[Span] = []
    for index in ((timeline.times < until) & (ends > begin)).nonzero()[0].tolist():
        start, end = max(float(timeline.times[index]), begin), min(float(ends[index]), until)
        if end > start:
            trains = timeline.shares[index] > 0
            found.append(Span(start, end, int(Use.TRAIN if trains else timeline.uses[index])))
    return found


def _tornado(found: Outcome, swings: Sequence[Swing]) -> Part:
    half, twice = f"{1 / SWING:g}", f"{SWING:g}"
    bars = [
        Bar(s.name, s.low, s.high, f"x {half}: {s.low:.4f}", f"x {twice}: {s.high:.4f}")
        for s in swings
    ]
    picture = tornado(
        f"Goodput where one input is x {half} (blue) and x {twice} (orange)",
        bars,
        found.goodput,
        Axis("goodput", percent=True),
    )
    rows = tuple((s.name, s.low, s.high) for s in swings)
    heads = ("input", f"goodput at x {half}", f"goodput at x {twice}")
    return Part(
        "What matters", pictures=(("tornado", picture),), tables=(Rows("tornado", heads, rows),)
    )


def _sources(request: Request, found: Outcome) -> Part:
    rows = tuple((path, status) for path, status in request.status.items())
    said = [request.source] if request.source else []
    said += [f"Extrapolated: {doubt}." for doubt in found.doubts]
    tables = (Rows("status", ("value", "where it is from"), rows),) if rows else ()
    return Part("Sources", tuple(said), tables=tables)
