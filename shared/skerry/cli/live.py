"""The live view: a table on a terminal, lines everywhere else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import LearnerPhase, RefusalCause
from skerry.status.format import clip, clock, printable, size

if TYPE_CHECKING:
    from types import TracebackType

    from skerry.cli.follow import Feed
    from skerry.status.report import LearnerRow, Report, RunRow

LINE_S = 2.0
QUIET_S, QUIET_GAPS = 20.0, 5.0
"""After this long without a round, and so many times the mean between two, a person is told: the
broker or the syncer may be in trouble."""
FRAME_S = 0.5
COLOURS = {Liveness.ALIVE: "green", Liveness.SUSPECT: "yellow", Liveness.GONE: "red"}
AT_REST = {LearnerPhase.FINISHED, LearnerPhase.STOPPED}


class Screen(Protocol):
    """Where a command shows how a run is going."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Show one sentence that stays."""
        ...

    def show(self, now: Report) -> None:
        """Show how the run is going now; replaces what was shown before where that is possible."""
        ...


class Terminal:
    """A table that is drawn over and over, sentences scrolling by above it."""

    def __init__(self, console: Console, began_s: float | None = None) -> None:
        self._began_s = began_s
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(escape(printable(text)), highlight=False)

    def show(self, now: Report) -> None:
        self._live.update(picture(now, elapsed_s(now, self._began_s)), refresh=True)


class Lines:
    """One line per couple of seconds, when something has changed."""

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = began_s
        self._shown_s = float("-inf")
        self._shown: tuple[object, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing is held."""

    def say(self, text: str) -> None:
        print(printable(text), flush=True)

    def show(self, now: Report) -> None:
        run = now.run
        counts = (run.step, run.rounds, run.alive, len(now.evaluations))
        what = (*counts, run.checkpoint, run.finished, _phases(now))
        if what == self._shown or time.monotonic() - self._shown_s < LINE_S:
            return
        self._shown, self._shown_s = what, time.monotonic()
        print(line(now, elapsed_s(now, self._began_s)), flush=True)


def screen(console: Console | None = None, *, began_s: float | None = None) -> Screen:
    """Return the view that fits stdout; times count from ``began_s``, or the run's creation."""
    console = console or Console()
    return Terminal(console, began_s) if console.is_terminal else Lines(began_s)


def elapsed_s(now: Report, began_s: float | None) -> float:
    """Return the seconds to show: since the command began, or for as long as the run has been."""
    return now.run.wall_s if began_s is None else time.time() - began_s


async def keep_showing(feed: Feed, on: Screen, every_s: float = FRAME_S) -> None:
    """Show the feed's view until cancelled."""
    while True:
        now = feed.report()
        if now is not None:
            on.show(now)
        await asyncio.sleep(every_s)


def line(now: Report, seconds: float) -> str:
    """Return the run in one line of plain text, ``seconds`` after the beginning."""
    run = now.run
    if not any(run.versions):
        phases = (f"{clip(row.name)} {row.phase.value.replace('_', ' ')}" for row in now.learners)
        return f"{clock(seconds):>6}  no parameters yet: {', '.join(phases) or 'no learner yet'}"
    held_out = run.held_out.loss if run.held_out is not None else None
    parts = [
        f"{clock(seconds):>6}",
        f"step {run.step}{_of_steps(run)}",
        f"loss {run.loss:.3f}" if run.loss is not None else "loss -",
        *([] if held_out is None else [f"held-out {held_out:.3f}"]),
        f"{run.tokens_per_s:,.0f} tokens/s",
        f"learners {run.alive}/{run.learners}",
        f"rounds {run.rounds}",
        f"staleness {run.staleness_mean:.2f}",
        f"sent {size(run.bytes_up + run.bytes_down)}",
        f"goodput {run.goodput:.0%}",
        f"ETA {clock(run.eta_s)}",
        *_quiet(now),
    ]
    parts += [
        f"{clip(row.name)} {row.liveness.value if row.phase not in AT_REST else row.phase.value}"
        for row in now.learners
        if row.liveness is not Liveness.ALIVE
    ]
    return "  ".join(parts)


def picture(now: Report, seconds: float) -> RenderableType:
    """Return the run as a table of facts and a table of learners."""
    run = now.run
    loss = f"{run.loss:.3f}" if run.loss is not None else "-"
    facts = [
        f"[bold]{plain(run.run)}[/]{' finished' if run.finished else ''}",
        f"step [bold]{run.step}[/]{_of_steps(run)}",
        f"loss [bold]{loss}[/]",
        f"{run.tokens_per_s:,.0f} tokens/s" if not _unheard(now) else "",
        f"goodput {run.goodput:.0%}" if not _unheard(now) else "",
    ]
    more = [
        f"{clock(seconds)} (ETA {clock(run.eta_s)})",
        f"rounds {run.rounds}",
        f"staleness {run.staleness_mean:.2f} (max {run.staleness_max})",
        f"up {size(run.bytes_up)}, down {size(run.bytes_down)}" if not _unheard(now) else "",
    ]
    refused = ", ".join(
        f"{n} {cause}" for cause, n in run.refused.items() if cause is not RefusalCause.GENESIS
    )
    last = [
        f"last round: {run.last_round.replace('_', ' ') or '-'}",
        *_quiet(now),
        f"refused: {refused}" if refused else "",
        _held_out(run),
        f"checkpoint at step {run.checkpoint_step}" if run.checkpoint else "no checkpoint yet",
        _unheard(now),
    ]
    return Group(_row(facts), _row(more), _learners(now), _row(last))


def _held_out(run: RunRow) -> str:
    """Return what the global model is worth on held-out text, or nothing before anybody said it."""
    held_out = run.held_out
    if held_out is None:
        return ""
    if held_out.loss is None:
        return f"held-out loss at step {held_out.step} is not finite"
    bits = held_out.bits_per_byte
    per_byte = "" if bits is None else f" ({bits:.3f} bits per byte)"
    texts = run.held_out_texts
    other = "" if texts < 2 else f", [yellow]evaluators read {texts} different texts[/]"
    return f"held-out loss [bold]{held_out.loss:.3f}[/]{per_byte} at step {held_out.step}{other}"


def _unheard(now: Report) -> str:
    """Return why speeds and sizes are missing: pulses are kept in memory, while a broker runs."""
    if not now.learners or any(row.heard for row in now.learners):
        return ""
    return "no pulses in this log: speeds, goodput and bytes are not known"


def _row(facts: list[str]) -> Text:
    """Return facts side by side; on a narrow screen whole words go to the next line."""
    return Text.from_markup("  ".join(fact for fact in facts if fact))


def _learners(now: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify in (
        ("learner", "left"),
        ("", "left"),
        ("phase", "left"),
        ("step", "right"),
        ("loss", "right"),
        ("tokens/s", "right"),
        ("sent", "right"),
        ("stale", "right"),
        ("goodput", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for row in now.learners:
        table.add_row(*_cells(row))
    return table


def _cells(row: LearnerRow) -> tuple[str, ...]:
    state = "" if row.phase in AT_REST else f"[{COLOURS[row.liveness]}]{row.liveness.value}[/]"
    return (
        f"{plain(row.name)}#{row.incarnation}",
        state,
        row.phase.value.replace("_", " "),
        str(row.step) if row.heard else "-",
        f"{row.loss:.3f}" if row.loss is not None else "-",
        f"{row.tokens_per_s:,.0f}" if row.heard else "-",
        size(row.bytes_up) if row.heard else "-",
        str(row.staleness),
        f"{row.goodput:.0%}" if row.heard else "-",
    )


def _of_steps(run: RunRow) -> str:
    """Return how many steps there will be, or nothing where the clock decides."""
    return "" if run.timed else f"/{run.steps}"


def _quiet(now: Report) -> list[str]:
    """Return that no round has been committed for a while, if one should have been."""
    run = now.run
    ago_s = run.last_round_s_ago
    gap_s = run.wall_s / run.rounds if run.rounds > 2 else 0.0
    late_s = max(QUIET_S, QUIET_GAPS * gap_s)
    if (
        ago_s is None
        or ago_s < late_s
        or run.finished
        or not any(row.at_work for row in now.learners)
    ):
        return []
    return [f"no round for {clock(ago_s)}: see the logs"]


def _phases(now: Report) -> tuple[LearnerPhase, ...]:
    return tuple(row.phase for row in now.learners)


def plain(text: str, most: int = 64) -> str:
    """Return text that others chose, bounded, without markup or what moves a cursor."""
    return escape(clip(text, most))
