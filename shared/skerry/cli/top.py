"""``skerry top``: a run in a terminal, as the health monitor's page shows it in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from skerry.cli.board import board
from skerry.cli.status import first_of, log_of, newest_run
from skerry.errors import BrokerUnavailable, RunNotFound
from skerry.log import ledger
from skerry.service.connect import bus_from
from skerry.service.watch import BrokerWatch
from skerry.settings import loading
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed, is_finished, read_model
from skerry.status.report import to_json

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from skerry.log.base import Bus
    from skerry.settings.models import Settings
    from skerry.status.model import RunSnapshot

FRAME_S = 0.5
LINE_S = 1.0
MEASURE_S = 15.0
MOST_LISTED = 20


def run_top(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str | None,
    nats: str | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show a run until it is finished or ``q`` is pressed; ``once``, and off a terminal, once.

    ``as_json`` prints a JSON object a second, one per line; with ``once`` a single one.
    """
    given = loading.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])])
    asyncio.run(_top(given, run, named=nats is not None, once=once, as_json=as_json))


async def _top(given: Settings, run: str | None, *, named: bool, once: bool, as_json: bool) -> None:
    console = Console(highlight=False)
    link = BrokerWatch(report=lambda _event, _fields: None)
    async with (
        log_of(given, run, named=named) as log,
        bus_from(log.nats, "top", on_event=link.on_event) as bus,
    ):
        name = log.run or await newest_run(bus)
        live = as_json or console.is_terminal
        if once or log.at_rest or not live or await _is_over(bus, name):
            model = await read_model(bus, name)
            stores = [*map(StreamStore, await bus.rooms())]
            now = model.snapshot(stores, at_rest=log.at_rest)
            if as_json:
                print(json.dumps(snapshot_json(now), indent=2 if once else None))
            else:
                console.print(board(now, console.width))
            return
        await follow(RunFeed(bus, name), link, None if as_json else console)


async def _is_over(bus: Bus, run: str) -> bool:
    """Return True if a run is finished; one that is not in the log yet is not."""
    try:
        return is_finished(await ledger.read_run(bus, run))
    except RunNotFound:
        return False


def snapshot_json(now: RunSnapshot) -> dict[str, object]:
    """Return what ``skerry status --json`` says, the newest rounds, fragments' ages, and alerts."""
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
    return {"time_s": now.now_s, **to_json(now.model.view, now.now_s), **more}


@dataclass(slots=True)
class Following:
    """A feed beside what its log does not say: whether the broker answers, how full it is."""

    feed: RunFeed
    link: BrokerWatch
    stores: Sequence[StreamStore] = ()

    def snapshot(self) -> RunSnapshot | None:
        return self.feed.snapshot(self.stores, self.link.away_s(time.time()))

    async def measure(self) -> None:
        """Look now and then at how full the account's stores are."""
        while True:
            with contextlib.suppress(BrokerUnavailable):
                self.stores = [*map(StreamStore, await self.feed.bus.rooms())]
            await asyncio.sleep(MEASURE_S)


async def follow(feed: RunFeed, link: BrokerWatch, console: Console | None) -> None:
    """Follow until the run is finished or ``q`` is pressed; then show it once more.

    Without a ``console`` print JSON.
    """
    seen = Following(feed, link)
    showing = _print_json(seen) if console is None else _draw(seen, console)
    await first_of(feed.run(), showing, seen.measure())
    now = seen.snapshot()
    if now is not None and console is not None:
        console.print(board(now, console.width))


async def _print_json(seen: Following) -> None:
    while not seen.feed.finished.is_set():
        await _pause(seen.feed.finished, LINE_S)
        if (now := seen.snapshot()) is not None:
            print(json.dumps(snapshot_json(now)), flush=True)


async def _draw(seen: Following, console: Console) -> None:
    enough = asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False) as live, keys(enough):
        while not (enough.is_set() or seen.feed.finished.is_set()):
            if (now := seen.snapshot()) is not None:
                live.update(board(now, console.width, console.height - 1), refresh=True)
            await _pause(enough, FRAME_S)


async def _pause(ended: asyncio.Event, seconds: float) -> None:
    """Wait that long, or until the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ended.wait()


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
