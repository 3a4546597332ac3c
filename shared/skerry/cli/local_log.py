"""The log that a command works on: that of a named broker, or the one in this folder."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skerry.cli.cluster.cluster import served
from skerry.cli.cluster.folder import resting, shut
from skerry.cli.programs import argv_of
from skerry.errors import BrokerUnavailable, ConfigError, RunNotFound
from skerry.log.base import Bus
from skerry.log.ledger import list_runs
from skerry.service.clusters import LOGIN, running
from skerry.service.entry import bus_from, settings_from
from skerry.settings import loading
from skerry.settings.local import NatsSettings, Settings

CONNECT_S = 5.0
HERE_S = 2.0
"""Connect timeout for a broker on this machine, which answers at once or is not there."""


class Log(NamedTuple):
    """The log to read: its broker, the run (None: the newest); ``at_rest``: nothing writes it."""

    nats: NatsSettings
    run: str | None
    at_rest: bool = False


@contextlib.asynccontextmanager
async def log_of(given: Settings, run: str | None, *, named: bool) -> AsyncGenerator[Log]:
    """Yield the log to read: that of the named broker, or the one in this folder.

    In this folder that is a running cluster's, or else the newest run's, which a broker of our own
    serves while the context lasts.
    """
    nats = given.local.nats
    nats = nats.model_copy(update={"connect_timeout_s": min(CONNECT_S, nats.connect_timeout_s)})
    clusters = [c for c in running() if run is None or c.run == run]
    folders = [f for f in resting() if run is None or f.run == run]
    if named or nats.url != NatsSettings().url:
        yield Log(nats, run)
    elif not (clusters or folders):
        try:
            yield Log(nats.model_copy(update={"connect_timeout_s": HERE_S}), run)
        except BrokerUnavailable as error:
            if (folder := shut(run)) is not None:
                msg = f"{folder} is closed to this user: give this command as who began the run."
                raise ConfigError(msg, path=str(folder)) from error
            msg = (
                f"There is no run{f' {run!r}' if run else ''} of `skerry up` in this folder, and no"
                f" broker at {nats.url}: give this command where `skerry up` was given, or name a"
                " broker with --nats."
            )
            raise BrokerUnavailable(msg) from error
    elif clusters:
        yield Log(clusters[0].reached_with(nats), run)
    else:
        with folders[0].read():
            async with served(folders[0], given, None) as broker:
                waits = {"connect_timeout_s": nats.connect_timeout_s}
                yield Log(broker.nats.model_copy(update=waits), folders[0].run, at_rest=True)


async def newest_run(bus: Bus) -> str:
    """Return the run that was created last; RunNotFound if there is none."""
    runs = await list_runs(bus)
    if not runs:
        msg = "This log holds no run: start one with `skerry up` or `skerry demo`."
        raise RunNotFound(msg)
    return runs[-1].run


@dataclass(frozen=True, slots=True)
class RunChoice:
    """The log that a command is about: its settings, and the run and broker that were named."""

    config: Path | None
    sets: Sequence[str]
    run: str | None
    nats: str | None

    def load(self) -> Settings:
        return settings_from(self.nats, self.config, self.sets)

    @contextlib.asynccontextmanager
    async def reached(self, given: Settings, name: str) -> AsyncGenerator[tuple[Bus, str]]:
        """Yield a bus that reaches the log, and the run."""
        named = self.nats is not None
        async with log_of(given, self.run, named=named) as log, bus_from(log.nats, name) as bus:
            yield bus, log.run or await newest_run(bus)


def restore_here(rest: Sequence[str]) -> int | None:
    """Restore a checkpoint into a run's log in this folder; None without such a log.

    ``rest`` are the words after ``skerry checkpoints restore``. Returns the exit code of the
    checkpointer's command, which refuses a log that is being worked on.
    """
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    words.add_argument("--nats")
    words.add_argument("--run", default=loading.control_variable("SKERRY_RUN") or "main")
    words.add_argument("--config", type=Path)
    words.add_argument("--set", action="append", default=[])
    try:
        asked, _ = words.parse_known_args(rest)
    except argparse.ArgumentError:
        return None  # the command itself says what is wrong
    given = loading.load(asked.config, asked.set)
    named = asked.nats is not None or "url" in given.local.nats.model_fields_set
    return None if named else asyncio.run(_restored(given, asked.run, rest))


async def _restored(given: Settings, run: str, rest: Sequence[str]) -> int | None:
    async with log_of(given, run, named=False) as log:
        if log.nats.url == given.local.nats.url:
            return None
        reached = log.nats.model_dump(include={"url", *LOGIN})
        # By the environment: others can read its command line.
        env = {f"SKERRY_NATS__{name.upper()}": str(at or "") for name, at in reached.items()}
        command = argv_of("checkpoints", "restore", *rest)
        process = await asyncio.create_subprocess_exec(*command, env=os.environ | env)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
