"""Where a command shows how a run is going: a board on a terminal, lines everywhere else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from skerry.algorithm.liveness import Liveness
from skerry.cli.board import board
from skerry.status.format import clip, clock, loss, number, printable, size
from skerry.status.view import ENDED

if TYPE_CHECKING:
    from types import TracebackType

    from skerry.status.feed import RunFeed
    from skerry.status.model import RunSnapshot
    from skerry.status.report import RunReport

LINE_S = 2.0
QUIET_S, QUIET_GAPS = 20.0, 5.0
"""A line says that no round has come for this long, and for so many times the mean between two."""
FRAME_S = 0.5


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

    def show(self, now: RunSnapshot) -> None:
        """Show how the run is going now; replaces what was shown before where that is possible."""
        ...


class Terminal:
    """A board that is drawn over and over, sentences scrolling by above it."""

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

    def show(self, now: RunSnapshot) -> None:
        console, elapsed_s = self._live.console, _elapsed_s(now, self._began_s)
        drawn = board(
            now, console.width, console.height - 1, elapsed_s=elapsed_s, with_rounds=False
        )
        self._live.update(drawn, refresh=True)


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

    def show(self, now: RunSnapshot) -> None:
        run, rows = now.report.run, now.report.learners
        counts = (run.step, run.rounds, run.alive, len(now.report.evaluations))
        what = (*counts, run.checkpoint, run.finished, *(row.phase for row in rows))
        if what == self._shown or time.monotonic() - self._shown_s < LINE_S:
            return
        self._shown, self._shown_s = what, time.monotonic()
        print(line(now.report, _elapsed_s(now, self._began_s)), flush=True)


def screen(console: Console | None = None, *, began_s: float | None = None) -> Screen:
    """Return the view that fits stdout; times count from ``began_s``, or the run's creation."""
    console = console or Console()
    return Terminal(console, began_s) if console.is_terminal else Lines(began_s)


def _elapsed_s(now: RunSnapshot, began_s: float | None) -> float:
    """Return the seconds to show: since the command began, or for as long as the run has been."""
    return now.report.run.wall_s if began_s is None else time.time() - began_s


async def keep_showing(feed: RunFeed, on: Screen, every_s: float = FRAME_S) -> None:
    """Show the feed's run until cancelled."""
    while True:
        if (now := feed.snapshot()) is not None:
            on.show(now)
        await asyncio.sleep(every_s)


def line(now: RunReport, seconds: float) -> str:
    """Return the run in one line of plain text, ``seconds`` after the beginning."""
    run = now.run
    if not any(run.versions):
        phases = (f"{clip(row.name)} {row.phase.value.replace('_', ' ')}" for row in now.learners)
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
        *_quiet(now),
    ]
    parts += [
        f"{clip(row.name)} {(row.phase if row.phase in ENDED else row.liveness).value}"
        for row in now.learners
        if row.liveness is not Liveness.ALIVE
    ]
    return "  ".join(parts)


def _quiet(now: RunReport) -> list[str]:
    """Return that no round has been committed for a while, if one should have been."""
    run = now.run
    gap_s = run.wall_s / run.rounds if run.rounds > 2 else 0.0
    ago_s = run.last_round_s_ago
    if run.finished or ago_s is None or ago_s < max(QUIET_S, QUIET_GAPS * gap_s):
        return []
    at_work = any(row.at_work for row in now.learners)
    return [f"no round for {clock(ago_s)}: see the logs"] if at_work else []
