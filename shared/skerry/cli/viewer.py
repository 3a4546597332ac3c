"""``skerry status`` and ``skerry top``, and the screen on which ``up`` and ``demo`` show a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from skerry.cli.board import board, line
from skerry.cli.cluster import processes
from skerry.cli.local_log import RunChoice, log_of, newest_run
from skerry.errors import BrokerUnavailable
from skerry.service.clusters import ROOT
from skerry.service.entry import bus_from
from skerry.service.reporting import BrokerWatch
from skerry.status.alert_table import Severity
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed, read_model
from skerry.status.format import printable
from skerry.status.model import RunSnapshot
from skerry.tasks import TaskGroup, happens

FRAME_S = 0.5
LINE_S = 2.0
SILENT_S = 15.0
"""A line comes at least this often, even if nothing changes, as while learners compile."""
JSON_S = 1.0
MEASURE_S = 15.0
MOST_LISTED = 20
PULSED = (
    *("tokens_per_s", "goodput", "time"),
    *("bytes_up", "bytes_down", "f32_bytes_up", "f32_bytes_down"),
)
"""What of a run or a learner only pulses say: null in JSON where none is left of them."""


class Screen:
    """Where a command shows how a run is going.

    On a terminal that is a board, redrawn in place, with sentences scrolling by above it. Elsewhere
    it is a line every LINE_S if something has changed, or else every SILENT_S. Times count from
    ``began_s``, or from the run's creation.
    """

    def __init__(self, console: Console | None = None, began_s: float | None = None) -> None:
        self._console = console or Console()
        self._began_s = began_s
        live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live = live if self._console.is_terminal else None
        self._shown_s = float("-inf")
        self._shown: tuple[object, ...] = ()
        self._wrong: Collection[str] = ()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show one sentence that stays."""
        if self._live is not None:
            self._console.print(escape(printable(text)), highlight=False)
        else:
            self._print(printable(text))

    def show(self, now: RunSnapshot) -> None:
        """Show how the run is going now, in place of what a terminal showed before."""
        run, rows = now.report.run, now.report.learners
        elapsed_s = run.wall_s if self._began_s is None else time.time() - self._began_s
        if self._live is not None:
            width, height = self._console.width, self._console.height - 1
            self._live.update(board(now, width, height, elapsed_s=elapsed_s), refresh=True)
            return
        counts = (run.step, run.rounds, run.alive, len(now.report.evaluations))
        what = (*counts, run.checkpoint, run.finished, *(row.phase for row in rows))
        wrong = {a.key: a for a in now.alerts if a.severity is not Severity.INFO}
        for key in [key for key in wrong if key not in self._wrong]:
            self.say(f"! {wrong[key].text} {wrong[key].fix}")
        self._wrong = wrong.keys()
        for_s = time.monotonic() - self._shown_s
        if for_s >= (LINE_S if what != self._shown else SILENT_S):
            self._shown, self._shown_s = what, time.monotonic()
            self._print(line(now, elapsed_s))

    def _print(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)


async def keep_showing(feed: RunFeed, on: Screen) -> None:
    while True:
        if (now := feed.snapshot()) is not None:
            on.show(now)
        await asyncio.sleep(FRAME_S)


def run_viewer(choice: RunChoice, *, as_json: bool, live: bool) -> None:
    """Show a run once or, ``live``, until it is finished or ``q`` is pressed.

    ``as_json`` prints one JSON object, or one a second if ``live``. Other ``live`` views need a
    terminal: without one the run is shown once.
    """
    asyncio.run(_view(choice, as_json=as_json, live=live))


async def _view(choice: RunChoice, *, as_json: bool, live: bool) -> None:
    console = Console(highlight=False)
    link = BrokerWatch(report=lambda _event, _fields: None)
    async with (
        log_of(choice.load(), choice.run, named=choice.nats is not None) as log,
        bus_from(log.nats, "top" if live else "status", on_event=link.on_event) as bus,
    ):
        name = log.run or await newest_run(bus)
        if live and not log.at_rest and (as_json or console.is_terminal):
            await FollowedRun(RunFeed(bus, name), link).show(None if as_json else console)
            return
        model = await read_model(bus, name)
        now = model.snapshot([*map(StreamStore, await bus.rooms())], at_rest=log.at_rest)
        if as_json:
            shown = {**snapshot_json(now), "processes": _processes(name)}
            print(json.dumps(shown, indent=None if live else 2))
        else:
            console.print(board(now, console.width))


def _processes(run: str) -> list[dict[str, object]]:
    """Return the processes of the cluster that keeps a run in this folder, by name."""
    return [
        {"name": entry.name, "kind": entry.kind, "pid": entry.pid, "status": entry.status}
        for _, entry in sorted(processes.read(ROOT / run).items())
        if entry.alive
    ]


def snapshot_json(now: RunSnapshot) -> dict[str, object]:
    """Return the report of a run, its newest rounds, the ages of its fragments, and its alerts."""
    timeline, counting = now.model.history.timeline, now.model.view.counting
    rounds = [
        {
            "fragment": row.fragment,
            "version": row.version,
            "reason": row.reason,
            "closed_s_ago": max(0.0, now.now_s - row.closed_s),
            "duration_s": row.closed_s - row.opened_s,
            "quorum_s": row.quorum_s,
            "grace_s": row.grace_s,
            "learners": list(row.learners),
            "refused": [cause.value for cause in row.causes],
            "trace_id": row.trace_id,
        }
        for row in [row for row in timeline.rounds.values() if row.merged][-MOST_LISTED:]
    ]
    newest = {} if counting else timeline.newest
    ages = [
        max(0.0, now.now_s - newest[f].closed_s) if f in newest else None
        for f in range(now.model.record.fragments)
    ]
    more = {"rounds": rounds, "fragment_age_s": ages, "alerts": [asdict(a) for a in now.alerts]}
    shown = asdict(now.report)
    shown["run"]["loss"] = now.loss()
    if now.report.unheard:
        shown["run"] |= dict.fromkeys(PULSED)
    for row in shown["learners"]:
        if not row["heard"]:
            row.update(dict.fromkeys(("step", "step_time_s", *PULSED)))
    return {"time_s": now.now_s, **shown, **more}


@dataclass(slots=True)
class FollowedRun:
    """A feed, and what its log does not say: whether the broker answers, and how full it is."""

    feed: RunFeed
    link: BrokerWatch
    stores: Sequence[StreamStore] = ()

    def snapshot(self) -> RunSnapshot | None:
        return self.feed.snapshot(self.stores, self.link.away_s(time.time()))

    async def show(self, console: Console | None) -> None:
        """Draw until the run is finished or ``q`` is pressed, and once more at the end.

        Without a ``console`` print JSON.
        """
        async with TaskGroup() as group:
            beside = [group.create_task(self.feed.run()), group.create_task(self._measure())]
            await (self._print_json() if console is None else self._draw(console))
            for task in beside:
                task.cancel()
        if console is not None and (now := self.snapshot()) is not None:
            console.print(board(now, console.width))

    async def _measure(self) -> None:
        """Look now and then at how full the account's stores are."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                self.stores = [*map(StreamStore, await self.feed.bus.rooms())]
            await asyncio.sleep(MEASURE_S)

    async def _print_json(self) -> None:
        while not self.feed.finished.is_set():
            await happens(self.feed.finished, JSON_S)
            if (now := self.snapshot()) is not None:
                print(json.dumps(snapshot_json(now)), flush=True)

    async def _draw(self, console: Console) -> None:
        enough = asyncio.Event()
        with Live(console=console, screen=True, auto_refresh=False) as live, keys(enough):
            while not (enough.is_set() or self.feed.finished.is_set()):
                now = self.snapshot()
                if now is None:
                    live.update(f"Waits for run {self.feed.name} in this log.", refresh=True)
                else:
                    live.update(board(now, console.width, console.height - 1), refresh=True)
                await happens(enough, FRAME_S)


@contextlib.contextmanager
def keys(enough: asyncio.Event) -> Generator[None]:
    """Set ``enough`` when ``q`` is pressed, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, handle = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(handle)

    def pressed() -> None:
        if b"q" in os.read(handle, 64).lower():
            enough.set()

    tty.setcbreak(handle)
    loop.add_reader(handle, pressed)
    try:
        yield
    finally:
        loop.remove_reader(handle)
        termios.tcsetattr(handle, termios.TCSADRAIN, before)
