"""The syncer: one of any number, each of which takes over where another one falls silent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import structlog

from skerry.errors import BusError
from skerry.log import run_records
from skerry.log.base import Bus
from skerry.protocol.messages import RunState, SyncerPulse
from skerry.protocol.subjects import checked_token
from skerry.service.kernels import load_kernels
from skerry.service.shell import arrive, outlast, serve
from skerry_syncer.run import ServedRun
from skerry_syncer.standby import StandBy

log = structlog.get_logger()

FAREWELL_S = 1.0

numbers = count(1)


async def stand_by(
    bus: Bus,
    run: str,
    name: str,
    *,
    wall_ns: Callable[[], int] = time.time_ns,
    instance: str = "",
) -> None:
    """Stand by for every shard of a run, serve those that fall to this syncer; return at its end.

    Lives through every trouble with the broker and through being overtaken; raises only what a
    person must repair: StateLost, StreamDrift, RunMismatch, and ConfigError for a name that cannot
    be part of a subject. ``instance`` tells this process from others of its name.
    """
    checked_token(name, "syncer")
    host = socket.gethostname()
    instance = instance or new_instance(wall_ns)

    async def stand() -> None:
        record = await arrive(bus, run)
        if record.state is RunState.FINISHED:
            log.info("run_already_finished", run=run)
            return
        served = await ServedRun.begin(bus, record, name, wall_ns)
        await StandBy.of(served, instance, host).stand()

    await outlast(stand, event="begins_again")


def new_instance(wall_ns: Callable[[], int]) -> str:
    """Return what tells one start of a syncer from every other one."""
    return f"{socket.gethostname()}/{os.getpid()}/{wall_ns()}/{next(numbers)}"


async def farewell(bus: Bus, run: str, name: str, instance: str) -> None:
    """Say that this syncer holds nothing any more, so that none waits for its lease to end."""
    pulse = SyncerPulse(run=run, syncer=name, instance=instance, sent_ns=time.time_ns())
    with suppress(BusError, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await run_records.publish(bus, pulse)


async def syncer(
    bus: Bus, run: str, holder: str, shutdown_s: float, *, stays: bool = False
) -> None:
    """Serve one run beside any number of other syncers, until it is finished."""
    instance = new_instance(time.time_ns)

    async def stand() -> None:
        await stand_by(bus, run, holder, instance=instance)

    async def leave() -> None:
        await farewell(bus, run, holder, instance)

    async with bus:
        await asyncio.to_thread(load_kernels)
        await serve({"syncer": stand}, drain=leave, shutdown_s=shutdown_s, stays=stays)
