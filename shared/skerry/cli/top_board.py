"""The picture that ``skerry top`` draws: a run at a glance, for a screen of any size."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skerry.algorithm.goodput import TRAIN, Cause
from skerry.algorithm.liveness import Liveness
from skerry.algorithm.traffic import data_parallel_bytes
from skerry.cli.live import AT_REST, COLOURS, plain
from skerry.protocol.messages import LearnerPhase, why
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.status.alerts import Severity
from skerry.status.format import clock, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.cli.top_past import Past
    from skerry.protocol.messages import Commit
    from skerry.status.alerts import Alert
    from skerry.status.report import LearnerRow, Report

BLOCKS = "▁▂▃▄▅▆▇█"
USE_COLOURS = {
    TRAIN: "green",
    Cause.COMPILE: "blue",
    Cause.RECOVER: "cyan",
    Cause.WAIT: "yellow",
    Cause.REPLAY: "magenta",
    Cause.IDLE: "bright_black",
    Cause.DOWN: "red",
}
ALERT_COLOURS = {Severity.CRITICAL: "red", Severity.WARNING: "yellow", Severity.INFO: "dim"}
MOST_ALERTS = 6
"""Lines; the last one counts those that have none."""
MOST_SENTENCE = 400
FEWEST_ROWS = 3
MOST_SAMPLE = 400
MOST_DRAWN = 1e15
"""A loss beyond this is one of whoever diverges, and would leave the rest of a curve flat."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is shown: rows, what came before, how large the model is, what is wrong, the time.

    ``learners`` is M, as many as the run is laid out for; names come and go.
    """

    now: Report
    past: Past
    params: int
    now_s: float
    alerts: Sequence[Alert] = ()
    learners: int = 0


def board(scene: Scene, width: int, height: int | None = None) -> RenderableType:
    """Return the picture; with a ``height`` it has no more lines than that.

    Then learners that need attention come first, and what does not fit is counted.
    """
    head = [
        _title(scene, width),
        *_facts(scene, width),
        *warnings(scene.alerts, whole=height is None),
    ]
    learners, rounds = len(scene.now.learners), min(10, len(scene.past.rounds))
    written = scene.past.written
    if written is not None and (height is None or height - len(head) - 6 >= 2 * FEWEST_ROWS):
        head.append(_line(f"writes [dim]{_sample(written.sample)}[/]"))
    if height is not None:
        room = max(FEWEST_ROWS, height - len(head) - 5)
        learners = min(learners, max(FEWEST_ROWS, room - min(len(scene.past.rounds), room // 3)))
        rounds = min(len(scene.past.rounds), room - learners)
    lines: list[RenderableType] = [*head, "", _learners(scene.now.learners, learners, width)]
    if scene.past.rounds and rounds > 0:
        lines += ["", _rounds(list(scene.past.rounds)[-rounds:], scene.now_s, width)]
    return Group(*lines)


def _sample(text: str) -> str:
    """Return what the model wrote as one line; how it broke lines does not matter here."""
    return plain(" ".join(text[:MOST_SAMPLE].split()), MOST_SAMPLE)


def _line(text: str) -> Text:
    line = Text.from_markup(text)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _title(scene: Scene, width: int) -> Text:
    run = scene.now.run
    whole = run.wall_s + (run.eta_s or 0.0) if run.timed else float(run.steps)
    done = run.wall_s if run.timed else float(run.step)
    share = 1.0 if run.finished else min(1.0, done / whole) if whole else 0.0
    bar_width = max(8, min(32, width - 60))
    full = round(share * bar_width)
    state = "finished" if run.finished else "" if any(run.versions) else "no parameters yet"
    steps = "" if run.timed else f"/{run.steps:,}"
    facts = [
        f"[bold]{plain(run.run)}[/]",
        state,
        f"step [bold]{run.step:,}[/]{steps}",
        f"[green]{'━' * full}[/][bright_black]{'━' * (bar_width - full)}[/] {share:.0%}",
        f"{clock(run.wall_s)}, ETA {clock(run.eta_s)}",
        f"learners [bold]{run.alive}[/]/{run.learners}",
    ]
    return _line("  ".join(fact for fact in facts if fact))


def _facts(scene: Scene, width: int) -> list[Text]:
    run, past = scene.now.run, scene.past
    loss = "-" if run.loss is None else f"{run.loss:.3f}"
    curve = max(8, min(40, width // 3))
    told = f"loss [bold]{loss}[/] {sparkline(past.losses, curve)}"
    judged = [e.loss for e in scene.now.evaluations if e.loss is not None]
    if run.held_out is not None and judged:
        told += f"  held-out [bold]{judged[-1]:.3f}[/] {sparkline(judged, curve // 2)}"
    split = "  ".join(
        f"[{USE_COLOURS[use]}]{use}[/] {run.time[use]:.0%}" for use in USE_COLOURS if run.time[use]
    )
    checkpoint = (
        "no checkpoint yet"
        if run.checkpoint_s_ago is None
        else f"checkpoint at step {run.checkpoint_step} {clock(run.checkpoint_s_ago)} ago"
    )
    return [
        _line(f"{told}  {run.tokens_per_s:,.0f} tokens/s"),
        _line(f"time {split_bar(run.time, curve)}  {split}"),
        _line(f"sent {size(run.bytes_up)} up, {size(run.bytes_down)} down{_saved(scene)}"),
        _line(f"rounds {run.rounds}  staleness {run.staleness_mean:.2f}  {checkpoint}"),
        _line(f"fragments {_fragments(scene)}"),
    ]


def _saved(scene: Scene) -> str:
    run = scene.now.run
    moved, f32 = run.bytes_up + run.bytes_down, run.f32_bytes_up + run.f32_bytes_down
    if not moved:
        return ""
    parallel = data_parallel_bytes(scene.params, scene.past.steps_by_learner(), scene.learners)
    packed = f"  1/{f32 / moved:.1f} of float32" if f32 else ""
    return packed + (f"  1/{parallel / moved:.0f} of data-parallel" if parallel else "")


def _fragments(scene: Scene) -> str:
    """Return each fragment's version, and its age once no older one's is all that is known."""
    closed = {} if scene.now.run.counting else scene.past.closed_s
    told: list[str] = []
    for fragment, version in enumerate(scene.now.run.versions):
        closed_s = closed.get(fragment)
        age = "" if closed_s is None else f" [dim]{clock(max(0.0, scene.now_s - closed_s))}[/]"
        told.append(f"{fragment}:v{version}{age}")
    return "  ".join(told)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve as one line of blocks, its newest value at the right; empty for no values."""
    values = [value for value in values if abs(value) < MOST_DRAWN]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)


def split_bar(shares: dict[str, float], width: int) -> str:
    """Return shares that add up to 1 as one coloured bar, each at most one cell off."""
    cells, done, drawn = "", 0.0, 0
    for use, colour in USE_COLOURS.items():
        done += shares.get(use, 0.0)
        upto = round(done * width)
        cells += f"[{colour}]{'█' * (upto - drawn)}[/]" if upto > drawn else ""
        drawn = max(drawn, upto)
    return cells + " " * (width - drawn)


def warnings(alerts: Sequence[Alert], *, whole: bool) -> list[Text]:
    """Return what an operator must know now, and what to do; one line each unless ``whole``."""
    room = MOST_ALERTS if len(alerts) <= MOST_ALERTS else MOST_ALERTS - 1
    told = [
        f"[{ALERT_COLOURS[alert.severity]}]! {plain(alert.text, MOST_SENTENCE)}[/] "
        f"[dim]{plain(alert.fix, MOST_SENTENCE)}[/]"
        for alert in alerts[:room]
    ]
    if len(alerts) > room:
        told.append(f"! and {len(alerts) - room} more")
    return [Text.from_markup(text) if whole else _line(text) for text in told]


def _attention(row: LearnerRow) -> tuple[int, int, str]:
    """Sort what needs a look before what does not, then the slow before the fast."""
    order = {Liveness.GONE: 0, Liveness.SUSPECT: 1, Liveness.ALIVE: 3}
    rank = 4 if row.phase in AT_REST else order[row.liveness]
    if rank == 3 and row.phase is not LearnerPhase.TRAINING:
        rank = 2
    return rank, row.step, row.name


def _learners(rows: Sequence[LearnerRow], most: int, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    wide = width >= 100
    for name, right in (
        ("learner", False),
        ("state", False),
        ("step", True),
        ("tokens/s", True),
        ("loss", True),
        ("stale", True),
        ("goodput", True),
        *((("time", False), ("sent", True), ("step time", True), ("seen", True)) if wide else ()),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    whole = len(rows) <= most
    shown = rows if whole else sorted(rows, key=_attention)[: max(1, most - 1)]
    for row in shown:
        table.add_row(*_cells(row)[: len(table.columns)])
    if not whole:
        table.add_row(f"[dim]and {len(rows) - len(shown)} more[/]")
    return table


def _cells(row: LearnerRow) -> tuple[str, ...]:
    phase = row.phase.value.replace("_", " ")
    state = phase if row.phase in AT_REST or row.liveness is Liveness.ALIVE else row.liveness.value
    colour = "dim" if row.phase in AT_REST else COLOURS[row.liveness]
    return (
        f"{plain(row.name)}#{row.incarnation}",
        f"[{colour}]{state}[/]",
        f"{row.step:,}" if row.heard else "-",
        f"{row.tokens_per_s:,.0f}" if row.heard else "-",
        f"{row.loss:.3f}" if row.loss is not None else "-",
        str(row.staleness),
        f"{row.goodput:.0%}" if row.heard else "-",
        split_bar(row.time, 12),
        size(row.bytes_up) if row.heard else "-",
        f"{row.step_time_s * 1e3:,.0f} ms" if row.step_time_s else "-",
        f"{row.seen_s_ago:.0f} s",
    )


def _rounds(commits: Sequence[Commit], now_s: float, width: int) -> Table:
    """Return the newest rounds, newest first, each with the id of its trace."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name, right in (
        ("round", False),
        ("ago", True),
        ("closed by", False),
        ("merged", True),
        ("refused", True),
        ("quorum", True),
        ("grace", True),
        *((("trace", False),) if width >= 100 else ()),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for commit in reversed(commits):
        cells = (
            f"{commit.fragment}:v{commit.version}",
            clock(max(0.0, now_s - commit.closed_ns / 1e9)),
            plain(why(commit).replace("_", " ")),
            str(len(commit.consumed)),
            str(len(commit.refused)),
            "-" if commit.reason in WITHOUT_QUORUM else f"{commit.quorum_s:.2f} s",
            f"{commit.grace_s:.2f} s",
            plain(commit.trace_id),
        )
        table.add_row(*cells[: len(table.columns)])
    return table
