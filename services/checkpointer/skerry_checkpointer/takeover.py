"""Taking over a run's state: only while nothing works on the run, and under every fence."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import Activity
from skerry.errors import Fenced, RunMismatch, WireError
from skerry.log.base import Deliver
from skerry.log.presence import last_pulses
from skerry.log.state_writer import StateWriter
from skerry.protocol.messages import LearnerPhase, Pulse, activity
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Generator

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus, Record
    from skerry.settings.models import RunConfig

HOLDER = "restore"
LONGEST_S = 60.0
"""Listening ends then, however slow a learner's steps are."""


async def refuse_if_alive(bus: Bus, run: str, config: RunConfig) -> None:
    """Listen, and raise RunMismatch naming the learners and syncers that are alive.

    No clock is compared. It listens for a syncer's lease, and long enough for each learner's next
    step boundary, even where the log has no sign of life: a broker that has just restarted has
    forgotten its pulses, and a live run sends new ones.
    """
    subjects = Subjects(run)
    steps = [
        pulse.step_time_s
        for pulse in (await last_pulses(bus, run)).values()
        if activity(pulse.phase) in {Activity.TRAINING, Activity.WAITING}
    ]
    window_s = max(config.sync.lease_s, 3 * config.liveness.pulse_s, 2 * max(steps, default=0.0))
    found: set[str] = set()
    records = bus.follow((subjects.pulse(), subjects.syncer()), deliver=Deliver.NEW)
    with suppress(TimeoutError):
        async with asyncio.timeout(min(window_s, LONGEST_S)), aclosing(records):
            async for record in records:
                if _is_alive(record, run):
                    found.add(" ".join(record.subject.split(".")[-2:]).replace("pulse", "learner"))
    if found:
        msg = (
            f"Run {run!r} is alive: {', '.join(sorted(found))} just said so. Stop all of it first,"
            " or restore under another --run."
        )
        raise RunMismatch(msg)


def _is_alive(record: Record, run: str) -> bool:
    """Return True for every sign of life but a learner's last pulse."""
    if ".pulse." not in record.subject:
        return True
    try:
        return decode(Pulse, record.payload, run=run).phase is not LearnerPhase.STOPPED
    except WireError:
        return True


async def take_fences(bus: Bus, run: str, plan: Plan, config: RunConfig) -> list[StateWriter]:
    """Take the fence of every shard: a syncer that was only asleep is refused from here on."""
    return [
        await StateWriter.acquire(
            bus,
            run,
            plan,
            holder=HOLDER,
            now_ns=time.time_ns(),
            shard=shard,
            shards=config.sync.shards,
            chunk_bytes=config.sync.chunk_bytes,
        )
        for shard in range(config.sync.shards)
    ]


@contextmanager
def refusing_others(run: str) -> Generator[None]:
    """Turn Fenced into the sentence about what has taken the fences meanwhile."""
    try:
        yield
    except Fenced as error:
        msg = (
            f"A syncer of run {run!r}, or another restore of it, has started meanwhile and has the"
            " state of the run now: stop it and give the same command again, which goes on where"
            " this one was."
        )
        raise RunMismatch(msg) from error
