"""The syncer: one of any number, each of which takes over where another one falls silent."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm import backend
from skerry.errors import BusError
from skerry.log import presence
from skerry.log.state_writer import StateWriter
from skerry.protocol.messages import RunState, SyncerPulse
from skerry.protocol.subjects import checked_token
from skerry.service.arrival import arrive
from skerry.service.shell import outlast, serve
from skerry.tasks import TaskGroup
from skerry_syncer.candidate import Candidate
from skerry_syncer.work import Work, conduct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.log.base import Bus
    from skerry.service.shell import Loop
    from skerry_syncer.conductor import Conductor

log = structlog.get_logger()

FAREWELL_S = 1.0

numbers = count(1)


async def candidate(
    bus: Bus,
    run: str,
    name: str,
    *,
    wall_ns: Callable[[], int] = time.time_ns,
    instance: str = "",
) -> None:
    """Stand by for every shard of a run, serve those that fall to this syncer; return at its end.

    Lives through every trouble with the broker and through being overtaken; raises only what a
    person must mend: StateLost, StreamDrift, RunMismatch, and ConfigError for a name that cannot be
    part of a subject. ``instance`` tells this process from others of its name.
    """
    checked_token(name, "syncer")
    host = socket.gethostname()
    instance = instance or new_instance(wall_ns)

    async def stand() -> None:
        record = await arrive(bus, run)
        if record.state is RunState.FINISHED:
            log.info("run_already_finished", run=run)
            return
        work = await Work.begin(bus, record, name, wall_ns)
        await Candidate.of(work, instance, host).stand()

    await outlast(stand, event="begins_again")


def new_instance(wall_ns: Callable[[], int]) -> str:
    """Return what tells one start of a syncer from every other one."""
    return f"{socket.gethostname()}/{os.getpid()}/{wall_ns()}/{next(numbers)}"


async def session(
    bus: Bus, run: str, holder: str, wall_ns: Callable[[], int] = time.time_ns
) -> None:
    """Take every shard at once, from whoever holds it, and conduct until the run is finished.

    Raises Fenced, in an exception group, when another syncer takes one of them.
    """
    record = await arrive(bus, run)
    if record.state is RunState.FINISHED:
        log.info("run_already_finished", run=run)
        return
    work = await Work.begin(bus, record, holder, wall_ns)
    conductors = [await _seized(work, shard) for shard in range(work.config.sync.shards)]

    def wake() -> None:
        for conductor in conductors:
            conductor.wake.set()

    async with TaskGroup() as group:
        pulses = group.create_task(work.follow_pulses(wake), name="pulses")
        for task in [group.create_task(conduct(conductor)) for conductor in conductors]:
            await task
        pulses.cancel()


async def _seized(work: Work, shard: int) -> Conductor:
    sync = work.config.sync
    writer = await StateWriter.acquire(
        work.bus,
        work.record.run,
        work.plan,
        holder=work.name,
        now_ns=work.wall_ns(),
        shard=shard,
        shards=sync.shards,
        chunk_bytes=sync.chunk_bytes,
    )
    return await work.conductor(writer)


def load_kernels() -> None:
    """Import, and the first time compile, what would else hold up the first round."""
    backend.cpu()
    backend.merger()


async def farewell(bus: Bus, run: str, name: str, instance: str) -> None:
    """Say that this syncer holds nothing any more, so that nobody waits for its lease to end."""
    pulse = SyncerPulse(run=run, syncer=name, instance=instance, sent_ns=time.time_ns())
    with suppress(BusError, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await presence.publish_syncer_pulse(bus, pulse)


async def syncer(
    bus: Bus, run: str, holder: str, shutdown_s: float, beside: Mapping[str, Loop] | None = None
) -> None:
    """Serve one run beside any number of other syncers, until it is finished.

    ``beside`` are further loops for as long.
    """
    instance = new_instance(time.time_ns)

    async def stand() -> None:
        await candidate(bus, run, holder, instance=instance)

    async def leave() -> None:
        await farewell(bus, run, holder, instance)

    async with bus:
        await asyncio.to_thread(load_kernels)
        await serve({"syncer": stand, **(beside or {})}, drain=leave, shutdown_s=shutdown_s)
