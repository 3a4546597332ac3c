"""``skerry status``: the live view of a run that somebody else runs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

from rich.console import Console

from skerry import settings
from skerry.bus.ledger import list_runs
from skerry.bus.report import report, to_json
from skerry.cli.follow import Feed, snapshot
from skerry.cli.live import keep_showing, picture, screen
from skerry.cli.place import running
from skerry.errors import RunNotFound
from skerry.runtime.connect import bus_from

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.bus.base import Bus
    from skerry.settings import NatsSettings

CONNECT_S = 5.0


def run_status(
    *,
    config: Path | None,
    sets: Sequence[str],
    run: str | None,
    nats: str | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show a run once or until it is finished; ``as_json`` prints one object and ends."""
    asyncio.run(_status(where(config, sets, nats, run), run, once=once, as_json=as_json))


def where(
    config: Path | None, sets: Sequence[str], nats: str | None, run: str | None
) -> NatsSettings:
    """Return the broker to ask: the one named, or that of a cluster that runs in this folder."""
    found = settings.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])]).local.nats
    update: dict[str, object] = {"connect_timeout_s": min(CONNECT_S, found.connect_timeout_s)}
    clusters = [c for c in running() if run is None or c.run == run]
    if clusters and found.url == settings.NatsSettings().url and nats is None:
        update["url"] = clusters[0].url
    return found.model_copy(update=update)


async def _status(nats: NatsSettings, run: str | None, *, once: bool, as_json: bool) -> None:
    async with bus_from(nats, "status") as bus:
        name = run or await _newest(bus)
        view = await snapshot(bus, name)
        if as_json:
            print(json.dumps(to_json(view, time.time()), indent=2))
        elif once or view.finished:
            now = report(view, time.time())
            Console(highlight=False).print(picture(now, now.run.wall_s))
        else:
            await _follow(bus, name)


async def _follow(bus: Bus, run: str) -> None:
    feed = Feed(bus, run)
    with screen() as on:
        following = asyncio.create_task(feed.run(), name="feed")
        showing = asyncio.create_task(keep_showing(feed, on), name="screen")
        finished = asyncio.create_task(_finished(feed), name="finished")
        tasks = {following, showing, finished}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        now = feed.report()
        if now is not None:
            on.show(now)


async def _finished(feed: Feed) -> None:
    await feed.finished.wait()


async def _newest(bus: Bus) -> str:
    runs = await list_runs(bus)
    if not runs:
        msg = "This log holds no run: start one with `skerry up` or `skerry demo`."
        raise RunNotFound(msg)
    return runs[-1].run
