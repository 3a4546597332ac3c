"""``skerry status``: the live view of a run that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from skerry.cli.board import board
from skerry.cli.cluster.cluster import served
from skerry.cli.cluster.folder import resting, running
from skerry.cli.screen import keep_showing, screen
from skerry.errors import RunNotFound
from skerry.log.ledger import list_runs
from skerry.service.connect import bus_from
from skerry.settings import loading
from skerry.settings.models import NatsSettings
from skerry.status.feed import RunFeed, read_model
from skerry.status.report import to_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Sequence
    from pathlib import Path

    from skerry.log.base import Bus
    from skerry.settings.models import Settings

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
    given = loading.load(config, [*sets, *([f"nats.url={nats}"] if nats else [])])
    asyncio.run(_status(given, run, named=nats is not None, once=once, as_json=as_json))


class Log(NamedTuple):
    """The log to read: its broker, the run (None: the newest); ``at_rest``: nothing writes it."""

    nats: NatsSettings
    run: str | None
    at_rest: bool = False


@contextlib.asynccontextmanager
async def log_of(given: Settings, run: str | None, *, named: bool) -> AsyncGenerator[Log]:
    """Yield which log to read: that of the broker that was named, or what is in this folder.

    That is the broker of a cluster that runs here, or else, for as long as this lasts, one of our
    own over the log that the newest run has left here.
    """
    nats = given.local.nats
    nats = nats.model_copy(update={"connect_timeout_s": min(CONNECT_S, nats.connect_timeout_s)})
    clusters = [c for c in running() if run is None or c.run == run]
    folders = [f for f in resting() if run is None or f.run == run]
    if named or nats.url != NatsSettings().url or not (clusters or folders):
        yield Log(nats, run)
    elif clusters:
        yield Log(clusters[0].reached_with(nats), run)
    else:
        with folders[0].held():
            async with served(folders[0], given, None) as broker:
                waits = {"connect_timeout_s": nats.connect_timeout_s}
                at = broker.nats.model_copy(update=waits)
                yield Log(at, folders[0].run, at_rest=True)


async def _status(
    given: Settings, run: str | None, *, named: bool, once: bool, as_json: bool
) -> None:
    async with log_of(given, run, named=named) as log, bus_from(log.nats, "status") as bus:
        name = log.run or await newest_run(bus)
        model = await read_model(bus, name)
        if as_json:
            print(json.dumps(to_json(model.view, time.time()), indent=2))
        elif once or model.view.finished or log.at_rest:
            console = Console(highlight=False)
            now = model.snapshot(at_rest=log.at_rest)
            console.print(board(now, console.width, with_rounds=False))
        else:
            await _follow(RunFeed(bus, name))


async def _follow(feed: RunFeed) -> None:
    with screen() as on:
        await first_of(feed.run(), keep_showing(feed, on), feed.finished.wait())
        if (now := feed.snapshot()) is not None:
            on.show(now)


async def first_of(*work: Coroutine[object, object, object]) -> None:
    """Run all of it until the first is done, and raise what that raises; cancel the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def newest_run(bus: Bus) -> str:
    """Return the run that was created last; RunNotFound if there is none."""
    runs = await list_runs(bus)
    if not runs:
        msg = "This log holds no run: start one with `skerry up` or `skerry demo`."
        raise RunNotFound(msg)
    return runs[-1].run
