"""What a person sees of a lab run: how far it is, and a table at the end."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from skerry_tools.lab.lab import Lab, LabResult
from skerry_tools.lab.progress import LabEvaluation
from skerry_tools.lab.scenario import LabScenario

LINE_S = 5.0


def run_lab(scenario: LabScenario, *, as_json: bool) -> None:
    """Run a scenario, show how it goes on stderr, and print what came of it."""
    display = Display(Console(stderr=True))
    with display.bar:
        result = Lab(scenario, display.report, watch=display.watch).run()
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        Console().print(table(result, len(scenario.fleet)))


class Display:
    """A bar on a terminal, a line now and then elsewhere; on stderr, so that stdout is the result.

    Its clock starts when it is made.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task("compiling", total=None, said="")
        self._began_s = time.monotonic()
        self._shown_s = float("-inf")
        self._loss = ""

    def report(self, seen: LabEvaluation) -> None:
        self._loss = f"loss {seen.loss:.4f}, "

    def watch(self, lab: Lab) -> None:
        """Show how far the run has come."""
        progress, now = lab.progress, time.monotonic()
        rate = progress.tokens / max(1e-9, now - self._began_s)
        said = f"{self._loss}{progress.tokens:,} tokens ({rate:,.0f}/s), {lab.loop.time():.0f} s"
        if self._console.is_terminal:
            self.bar.update(
                self._task,
                description="training",
                total=progress.steps,
                completed=min(progress.step, progress.steps),
                said=said,
            )
        elif now - self._shown_s >= LINE_S:
            self._shown_s = now
            self._console.print(
                f"step {progress.step} of {progress.steps}: {said}", highlight=False
            )


def table(result: LabResult, learners: int) -> Table:
    """Return what a run found as a table for people."""
    shown = Table(title=result.name, show_header=False, title_justify="left")
    shown.add_column(style="dim")
    shown.add_column(justify="right")
    bits = result.bits_per_byte
    rate = result.trained_tokens / result.took_s if result.took_s else 0.0
    rows = [
        ("held-out loss, nats per token", f"{result.loss:.4f}"),
        ("bits per byte", "-" if bits is None else f"{bits:.4f}"),
        ("islands, parameters", f"{learners}, {result.parameters:,}"),
        ("steps of the global clock", f"{result.steps:,}"),
        ("tokens merged, of those trained on", f"{result.tokens:,} of {result.trained_tokens:,}"),
        ("commits", f"{result.commits:,}"),
        ("contributions merged, refused", f"{result.merged:,}, {result.refused:,}"),
        ("staleness, mean in versions", f"{result.staleness:.3f}"),
        ("goodput of the islands", f"{result.goodput:.1%}"),
        ("learners killed", f"{result.kills}"),
        ("virtual seconds", f"{result.virtual_s:,.1f}"),
        ("took", f"{result.took_s:.1f} s, {rate:,.0f} tokens/s"),
    ]
    if result.average_loss is not None:
        rows.insert(1, ("the moving average's", f"{result.average_loss:.4f}"))
    if result.rho is not None:
        rows.insert(-2, ("likeness of successive gradients", f"{result.rho:.3f}"))
    for name, value in rows:
        shown.add_row(name, value)
    return shown
