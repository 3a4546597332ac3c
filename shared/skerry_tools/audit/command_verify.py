"""``skerry ledger verify``: prove the log of a run, and say the first thing that is wrong."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from skerry.cli.local_log import log_of, newest_run
from skerry.errors import HistoryBroken
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry_tools.audit.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from skerry.settings.models import Settings
    from skerry_tools.audit.moment import Survey
    from skerry_tools.audit.verify import AuditReport, LearnerReport

    OnProgress = Callable[[str, int, int], None]

NANOSECONDS = 1e9
MEGABYTE = 1e6
MOST_SHOWN = 20


def run_verify(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str | None,
    nats: str | None,
    replay: bool,
    as_json: bool,
) -> None:
    """Verify a run's log; HistoryBroken with the first violation where there is one."""
    given = loading.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])])
    report = asyncio.run(_verified(given, run, named=nats is not None, replay=replay))
    if as_json:
        print(json.dumps(to_json(report), indent=2))
    else:
        _show(report)
    if report.violations:
        raise HistoryBroken(report.violations[0].sentence)


async def _verified(given: Settings, run: str | None, *, named: bool, replay: bool) -> AuditReport:
    async with log_of(given, run, named=named) as log, bus_from(log.nats, "verify") as bus:
        name = log.run or await newest_run(bus)
        with progress() as on_progress:
            return await verify(bus, name, replay=replay, on_progress=on_progress)


@contextmanager
def progress() -> Generator[OnProgress]:
    """Show on a terminal's stderr what is being read, nothing elsewhere."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading the log", total=None)

        def on_progress(what: str, done: int, of: int) -> None:
            bar.update(task, description=f"{what}: {done:,}" + (f" of {of:,}" if of else ""))

        yield on_progress


def to_json(report: AuditReport) -> dict[str, Any]:
    """Return a report as plain types; digests are hexadecimal."""
    from skerry_tools.audit.command_replay import replayed_to_json

    replayed = replayed_to_json(report.replayed) if report.replayed else None
    return {**asdict(report), "ok": not report.violations, "replayed": replayed}


def window_sentences(found: Survey | AuditReport) -> list[str]:
    """Return what the window of contributions holds, and what can be replayed for it."""
    window = found.window
    since = f" since {moment(window.since_ns)}" if window.since_ns else ""
    bound = f" of {window.window_bytes / MEGABYTE:,.1f}" if window.window_bytes > 0 else ""
    held = f"{window.bytes / MEGABYTE:,.1f}{bound} MB of contributions"
    sentences = [f"Window: {held} ({window.messages:,} messages){since}."]
    bases = {index: reach.base for index, reach in sorted(found.reach.items())}
    if not any(bases.values()):
        return [*sentences, "Replay: every version, from genesis."]
    shown = ", ".join(f"f{index} from v{base}" for index, base in list(bases.items())[:MOST_SHOWN])
    more = f" and {len(bases) - MOST_SHOWN} more" if len(bases) > MOST_SHOWN else ""
    latest = max(reach.since_ns for reach in found.reach.values())
    sentences.append(f"Replay: from a checkpoint no older than {moment(latest)} ({shown}{more}).")
    if found.raise_window_to:
        sentences.append(
            f"The window has dropped contributions: log.window_bytes={found.raise_window_to} would"
            " have kept all."
        )
    return sentences


def moment(time_ns: int) -> str:
    """Return a time in UTC."""
    return f"{datetime.fromtimestamp(time_ns / NANOSECONDS, UTC):%Y-%m-%d %H:%M:%SZ}"


def _show(report: AuditReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for violation in report.violations[:MOST_SHOWN]:
        console.print(f"BROKEN  {violation.sentence}", markup=False)
    if report.broken > MOST_SHOWN:
        console.print(f"… and {report.broken - MOST_SHOWN} more violations (--json names them).")
    for note in report.notes:
        console.print(f"note    {note}", markup=False)
    speed = report.records / report.elapsed_s if report.elapsed_s else 0.0
    verdict = "does NOT hold" if report.violations else "holds"
    console.print(
        f"The log of run {report.run} {verdict}: {report.commits:,} commits in"
        f" {report.records:,} records, {report.elapsed_s:.1f} s ({speed:,.0f} records/s)."
    )
    console.print(_table(report.learners))
    for sentence in window_sentences(report):
        console.print(sentence)
    if report.replayed is not None:
        from skerry_tools.audit.command_replay import show_fragments

        show_fragments(console, report.replayed)


def _table(learners: Sequence[LearnerReport]) -> Table:
    heads = ("learner", "tokens", "cursor", "merged", "refused", "discarded", "starts")
    table = Table(*heads, box=None)
    for row in learners:
        refused = ", ".join(f"{n} {cause}" for cause, n in sorted(row.refused.items()))
        starts = ", ".join(f"{n} {inner}" for inner, n in sorted(row.starts.items()))
        counts = (row.tokens, row.cursor, row.contributions)
        table.add_row(
            row.learner,
            *(f"{count:,}" for count in counts),
            refused or "0",
            f"{row.discarded:,}",
            f"{row.incarnation}" + (f" ({starts})" if starts else ""),
        )
    return table
