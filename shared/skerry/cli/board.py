"""A run as text: the board that ``top``, ``status``, ``up`` and ``demo`` draw, or one line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from skerry.algorithm.goodput import TRAIN, Cause
from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import LearnerPhase, RefusalCause
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.status.alert_table import NO_COMMIT, Alert, Severity
from skerry.status.format import clip, clock, loss, number, size
from skerry.status.report import LearnerRow, RunReport, RunRow
from skerry.status.timeline import CommittedRound
from skerry.status.view import ENDED

if TYPE_CHECKING:
    from skerry.status.model import RunSnapshot

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = {Liveness.ALIVE: "green", Liveness.SUSPECT: "yellow", Liveness.GONE: "red"}
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
"""Lines of alerts; the last one counts the alerts that get no line."""
MOST_SENTENCE = 400
FEWEST_ROWS = 3
MOST_ROUNDS = 10
MOST_SAMPLE = 400
MOST_DRAWN = 1e15
"""A loss above this comes from a diverging learner, and would flatten the rest of a curve."""


def board(
    now: RunSnapshot, width: int, height: int | None = None, *, elapsed_s: float | None = None
) -> RenderableType:
    """Return the board; with a ``height`` it has no more lines than that.

    Then learners that need attention come first, and what does not fit is counted. ``elapsed_s`` is
    the time to show instead of the run's own age.
    """
    fits = height is not None
    head = [
        _title(now.report.run, width, elapsed_s),
        *_facts(now, width, cut=fits),
        *warnings(now.alerts, whole=not fits),
    ]
    rounds = [row for row in now.model.history.timeline.rounds.values() if row.merged]
    shown, listed = len(now.report.learners), min(MOST_ROUNDS, len(rounds))
    samples = now.model.history.samples
    if samples and (height is None or height - len(head) - 6 >= 2 * FEWEST_ROWS):
        newest = max(samples, key=lambda sample: sample.evaluated_ns)
        words = " ".join(newest.sample[:MOST_SAMPLE].split())  # how it broke lines is no matter
        head.append(_text(f"writes [dim]{plain(words, MOST_SAMPLE)}[/]"))
    if height is not None:
        room = max(FEWEST_ROWS, height - len(head) - 5)
        shown = min(shown, max(FEWEST_ROWS, room - min(len(rounds), room // 3)))
        listed = min(len(rounds), room - shown)
    lines: list[RenderableType] = [*head, "", _learners(now.report.learners, shown, width)]
    if listed > 0:
        lines += ["", _rounds(rounds[-listed:], now.now_s, width)]
    return Group(*lines)


def plain(text: str, most: int = 64) -> str:
    """Return text that others chose, bounded, without markup or control characters."""
    return escape(clip(text, most))


def _text(text: str, *, cut: bool = True) -> Text:
    line = Text.from_markup(text)
    if cut:
        line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _title(run: RunRow, width: int, elapsed_s: float | None) -> Text:
    whole = run.wall_s + (run.eta_s or 0.0) if run.timed else float(run.steps)
    done = run.wall_s if run.timed else float(run.step)
    share = 1.0 if run.finished else min(1.0, done / whole) if whole else 0.0
    state = "finished" if run.finished else "" if any(run.versions) else "no parameters yet"
    steps = "" if run.timed else f"/{run.steps:,}"
    before = [f"[bold]{plain(run.run)}[/]", state, f"step [bold]{number(run.step)}[/]{steps}"]
    after = [
        f"{share:.0%}",
        f"{clock(run.wall_s if elapsed_s is None else elapsed_s)}, ETA {clock(run.eta_s)}",
        f"learners [bold]{run.alive}[/]/{run.learners}",
    ]
    first, last = ("  ".join(fact for fact in facts if fact) for facts in (before, after))
    taken = Text.from_markup(f"{first}   {last}").cell_len
    bar_width = max(8, min(32, width - taken))
    full = round(share * bar_width)
    bar = f"[green]{'━' * full}[/][bright_black]{'━' * (bar_width - full)}[/]"
    return _text(f"{first}  {bar} {last}")


def _facts(now: RunSnapshot, width: int, *, cut: bool) -> list[Text]:
    run, curve = now.report.run, max(8, min(40, width // 3))
    split = "  ".join(
        f"[{USE_COLOURS[use]}]{use}[/] {run.time[use]:.0%}" for use in USE_COLOURS if run.time[use]
    )
    losses = [held.loss for held in now.model.history.curves.run.bins.values()]
    line = (
        f"loss [bold]{loss(now.loss())}[/] {sparkline(losses, curve)}{_held_out(now.report, curve)}"
    )
    facts = [
        f"{line}  {number(run.tokens_per_s)} tokens/s",
        f"time {split_bar(run.time, curve)}  {split}",
        f"sent {size(run.bytes_up)} up, {size(run.bytes_down)} down{_saved(now)}",
    ]
    if now.report.unheard:
        facts = [line, "no pulses in this log: speeds, goodput and bytes are not known"]
    newest = {} if now.model.view.counting else now.model.history.timeline.newest
    shown = [f"{fragment}:v{version}" for fragment, version in enumerate(run.versions)]
    for fragment, row in newest.items():
        shown[fragment] += f" [dim]{clock(max(0.0, now.now_s - row.closed_s))}[/]"
    facts += [_progress(run), f"fragments {'  '.join(shown)}"]
    return [_text(fact, cut=cut) for fact in facts]


def _held_out(now: RunReport, curve: int) -> str:
    """Return the global model's held-out loss as text; empty before one is known."""
    held_out = now.run.held_out
    if held_out is None:
        return ""
    if held_out.loss is None:
        return f"  held-out loss at step {held_out.step} is not finite"
    bits = held_out.bits_per_byte
    per_byte = "" if bits is None else f" ({number(bits, '.3f')} bits per byte)"
    drawn = sparkline([e.loss for e in now.evaluations], curve // 2)
    average = held_out.average_loss
    beside = "" if average is None else f", its moving average {loss(average)}"
    shown = f"  held-out [bold]{loss(held_out.loss)}[/]{per_byte} {drawn} at step {held_out.step}"
    return shown + beside


def _progress(run: RunRow) -> str:
    refused = ", ".join(
        f"{n} {cause}" for cause, n in run.refused.items() if cause is not RefusalCause.GENESIS
    )
    checkpoint = (
        "no checkpoint yet"
        if run.checkpoint_s_ago is None
        else f"checkpoint at step {run.checkpoint_step} {clock(run.checkpoint_s_ago)} ago"
    )
    facts = [
        f"rounds {run.rounds}",
        f"staleness {run.staleness_mean:.2f} (max {run.staleness_max})",
        checkpoint,
        f"last round: {plain(run.last_round.replace('_', ' '))}" if run.last_round else "",
        f"refused: {refused}" if refused else "",
        "sums do not cover all rounds" if run.counting else "",
    ]
    return "  ".join(fact for fact in facts if fact)


def _saved(now: RunSnapshot) -> str:
    run = now.report.run
    moved, f32 = run.bytes_up + run.bytes_down, run.f32_bytes_up + run.f32_bytes_down
    if not moved:
        return ""
    parallel = now.model.bytes_data_parallel()
    packed = f"  1/{number(f32 / moved, '.1f')} of float32" if f32 else ""
    return packed + (f"  1/{number(parallel / moved, '.0f')} of data-parallel" if parallel else "")


def sparkline(curve: Sequence[float | None], width: int) -> str:
    """Return a curve as one line of blocks, its newest value at the right; empty for no values."""
    values = [value for value in curve if value is not None and abs(value) < MOST_DRAWN]
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
    shown = [
        f"[{ALERT_COLOURS[alert.severity]}]! {plain(alert.text, MOST_SENTENCE)}[/] "
        f"[dim]{plain(alert.fix, MOST_SENTENCE)}[/]"
        for alert in alerts[:room]
    ]
    if len(alerts) > room:
        shown.append(f"! and {len(alerts) - room} more")
    return [_text(text, cut=not whole) for text in shown]


def _attention(row: LearnerRow) -> tuple[int, int, str]:
    """Sort what needs a look before what does not, then the slow before the fast."""
    order = {Liveness.GONE: 0, Liveness.SUSPECT: 1, Liveness.ALIVE: 3}
    rank = 4 if row.phase in ENDED else order[row.liveness]
    if rank == 3 and row.phase is not LearnerPhase.TRAINING:
        rank = 2
    return rank, row.step, row.name


def _table(columns: dict[str, bool]) -> Table:
    """Return an empty table; ``columns`` says by name which are numbers, set to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False)
    for name, right in columns.items():
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    return table


def _learners(rows: Sequence[LearnerRow], most: int, width: int) -> Table:
    columns = {"learner": False, "state": False, "step": True, "tokens/s": True, "loss": True}
    columns |= {"stale": True, "goodput": True}
    if width >= 100:
        columns |= {"time": False, "sent": True, "step time": True, "seen": True}
    table, whole = _table(columns), len(rows) <= most
    shown = rows if whole else sorted(rows, key=_attention)[: max(1, most - 1)]
    for row in shown:
        table.add_row(*_learner(row)[: len(columns)])
    if not whole:
        table.add_row(f"[dim]and {len(rows) - len(shown)} more[/]")
    return table


def _learner(row: LearnerRow) -> tuple[str, ...]:
    state = "quarantined" if row.quarantine else row.state.replace("_", " ")
    colour = "dim" if row.phase in ENDED else COLOURS[row.liveness]
    return (
        f"{plain(row.name)}#{row.incarnation}",
        f"[{colour}]{state}[/]",
        number(row.step) if row.heard else "-",
        number(row.tokens_per_s) if row.heard else "-",
        loss(row.loss),
        str(row.staleness),
        f"{row.goodput:.0%}" if row.heard else "-",
        split_bar(row.time, 12),
        size(row.bytes_up) if row.heard else "-",
        f"{number(row.step_time_s * 1e3)} ms" if row.step_time_s else "-",
        f"{row.seen_s_ago:.0f} s",
    )


def _rounds(rounds: Sequence[CommittedRound], now_s: float, width: int) -> Table:
    """Return the newest rounds, newest first, each with the id of its trace."""
    columns = {"round": False, "ago": True, "closed by": False, "merged": True, "refused": True}
    columns |= {"quorum": True, "grace": True} | ({"trace": False} if width >= 100 else {})
    table = _table(columns)
    for row in reversed(rounds):
        cells = (
            f"{row.fragment}:v{row.version}",
            clock(max(0.0, now_s - row.closed_s)),
            plain(row.reason.replace("_", " ")),
            str(len(row.learners)),
            str(row.refused),
            "-" if row.closed_by in WITHOUT_QUORUM else f"{row.quorum_s:.2f} s",
            f"{row.grace_s:.2f} s",
            plain(row.trace_id),
        )
        table.add_row(*cells[: len(columns)])
    return table


def line(now: RunSnapshot, seconds: float) -> str:
    """Return the run in one line of plain text, ``seconds`` after the beginning."""
    run, rows = now.report.run, now.report.learners
    if not any(run.versions):
        phases = (f"{clip(row.name)} {row.phase.value.replace('_', ' ')}" for row in rows)
        return f"{clock(seconds):>6}  no parameters yet: {', '.join(phases) or 'no learner yet'}"
    held_out = run.held_out.loss if run.held_out is not None else None
    parts = [
        f"{clock(seconds):>6}",
        f"step {run.step}{'' if run.timed else f'/{run.steps}'}",
        f"loss {loss(run.loss)}",
        *([] if held_out is None else [f"held-out {loss(held_out)}"]),
        f"{number(run.tokens_per_s)} tokens/s",
        f"learners {run.alive}/{run.learners}",
        f"rounds {run.rounds}",
        f"staleness {run.staleness_mean:.2f}",
        f"sent {size(run.bytes_up + run.bytes_down)}",
        f"goodput {run.goodput:.0%}",
        f"ETA {clock(run.eta_s)}",
    ]
    if any(alert.key == NO_COMMIT.key for alert in now.alerts):
        ago_s = min(seconds, run.commit_age_s)  # a run that goes on had none while it was stopped
        parts.append(f"no round for {clock(ago_s)}: see the logs")
    parts += [f"{clip(row.name)} {row.state}" for row in rows if row.liveness is not Liveness.ALIVE]
    return "  ".join(parts)
