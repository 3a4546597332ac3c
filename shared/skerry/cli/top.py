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

from skerry.cli.follow import Feed, is_finished, snapshot
from skerry.cli.status import log_of, newest_run, resting_report
from skerry.cli.top_board import Scene, board
from skerry.cli.top_past import Past
from skerry.cli.traffic import parameters
from skerry.errors import BrokerUnavailable, RunNotFound
from skerry.log import ledger
from skerry.protocol.messages import why
from skerry.service.connect import bus_from
from skerry.service.watch import BrokerWatch
from skerry.settings import loading
from skerry.settings.loading import run_config_from_json
from skerry.settings.models import Settings
from skerry.status.alerts import Situation, Store, alerts
from skerry.status.report import report, to_json

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from skerry.log.base import Bus, Room
    from skerry.protocol.messages import RunRecord
    from skerry.status.alerts import Alert
    from skerry.status.report import Report
    from skerry.status.view import RunView

FRAME_S = 0.5
LINE_S = 1.0
MEASURE_S = 15.0
MOST_TOLD = 20


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
    past, link = Past(), BrokerWatch(report=lambda _event, _fields: None)
    async with (
        log_of(given, run, named=named) as log,
        bus_from(log.nats, "top", on_event=link.on_event) as bus,
    ):
        name = log.run or await newest_run(bus)
        live = as_json or console.is_terminal
        if once or log.at_rest or not live or await _is_over(bus, name):
            view = await snapshot(bus, name, on_message=past.take)
            record = await ledger.read_run(bus, name)
            known = Known(past, link, await bus.rooms(), at_rest=log.at_rest)
            if as_json:
                print(json.dumps(_json(view, record, known), indent=2 if once else None))
            else:
                console.print(board(_scene(view, record, known), console.width))
            return
        feed = Feed(bus, name, on_message=past.take)
        await _follow(feed, Known(past, link), None if as_json else console)


async def _is_over(bus: Bus, run: str) -> bool:
    """Say whether a run is finished; one that is not in the log yet is not."""
    try:
        return is_finished(await ledger.read_run(bus, run))
    except RunNotFound:
        return False


@dataclass(slots=True)
class Known:
    """What is shown beside the view; ``rooms`` is how full the account's stores are."""

    past: Past
    link: BrokerWatch
    rooms: Sequence[Room] = ()
    at_rest: bool = False


def _scene(view: RunView, record: RunRecord, known: Known) -> Scene:
    now_s = time.time()
    now = report(view, now_s)
    now = resting_report(now) if known.at_rest else now
    told = alerts_of(now, record, known, now_s, judging=view.judging)
    learners = run_config_from_json(record.config_json).sync.learners
    return Scene(now, known.past, parameters(record), now_s, told, learners)


def alerts_of(
    now: Report, record: RunRecord, known: Known, now_s: float, *, judging: bool = False
) -> list[Alert]:
    """Return what is wrong now; nothing is expected of a run that nobody keeps running.

    While a long ledger is being read, its rounds say nothing of how often they come of late.
    """
    if known.at_rest:
        return []
    config = run_config_from_json(record.config_json)
    return alerts(
        Situation(
            now_s,
            now,
            known.past.lately,
            None if now.run.counting else known.past.interval_s(),
            config.checkpoint.every_s,
            config.sync.quorum,
            config.sync.h_steps,
            config.sync.round_timeout_s,
            [*map(Store, known.rooms)],
            known.link.away_s(now_s),
            judging=judging,
        )
    )


def _json(view: RunView, record: RunRecord, known: Known) -> dict[str, object]:
    """Return what ``skerry status --json`` says, the newest rounds, fragments' ages, and alerts."""
    now_s, past = time.time(), known.past
    rounds = [
        {
            "fragment": commit.fragment,
            "version": commit.version,
            "reason": why(commit),
            "closed_s_ago": max(0.0, now_s - commit.closed_ns / 1e9),
            "duration_s": (commit.closed_ns - commit.opened_ns) / 1e9,
            "quorum_s": commit.quorum_s,
            "grace_s": commit.grace_s,
            "learners": [consumed.learner for consumed in commit.consumed],
            "refused": [refused.cause.value for refused in commit.refused],
            "trace_id": commit.trace_id,
        }
        for commit in list(past.rounds)[-MOST_TOLD:]
    ]
    ages = [
        max(0.0, now_s - past.closed_s[f]) if f in past.closed_s and not view.counting else None
        for f in range(view.frame.fragments)
    ]
    wrong = alerts_of(report(view, now_s), record, known, now_s, judging=view.judging)
    told = [asdict(alert) for alert in wrong]
    more = {"rounds": rounds, "fragment_age_s": ages, "alerts": told}
    return {"time_s": now_s, **to_json(view, now_s), **more}


async def _measure(bus: Bus, known: Known) -> None:
    """Look now and then at how full the account's stores are."""
    while True:
        with contextlib.suppress(BrokerUnavailable):
            known.rooms = await bus.rooms()
        await asyncio.sleep(MEASURE_S)


async def _follow(feed: Feed, known: Known, console: Console | None) -> None:
    """Follow until the run is finished or somebody has seen enough; then show it once more."""
    enough = asyncio.Event()
    following = asyncio.create_task(feed.run(), name="feed")
    showing = asyncio.create_task(_show(feed, known, console, enough), name="screen")
    measuring = asyncio.create_task(_measure(feed.bus, known), name="stores")
    tasks = {following, showing, measuring}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    if feed.view is not None and feed.record is not None and console is not None:
        console.print(board(_scene(feed.view, feed.record, known), console.width))


async def _show(feed: Feed, known: Known, console: Console | None, enough: asyncio.Event) -> None:
    if console is None:
        while not feed.finished.is_set():
            await _pause(feed.finished, LINE_S)
            if feed.view is not None and feed.record is not None:
                print(json.dumps(_json(feed.view, feed.record, known)), flush=True)
        return
    with Live(console=console, screen=True, auto_refresh=False) as live, keys(enough):
        while not (enough.is_set() or feed.finished.is_set()):
            if feed.view is not None and feed.record is not None:
                scene = _scene(feed.view, feed.record, known)
                live.update(board(scene, console.width, console.height - 1), refresh=True)
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
