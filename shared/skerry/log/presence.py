"""Pulses and open rounds: small, in memory, only the newest of each counts."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.log.base import Deliver
from skerry.log.rejections import readable
from skerry.protocol.messages import Pulse, Round, SyncerPulse
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skerry.log.base import Bus, Record


async def publish_pulse(bus: Bus, pulse: Pulse) -> None:
    """Say how far this learner is; replaces its previous pulse."""
    await bus.publish(Subjects(pulse.run).pulse(pulse.learner), encode(pulse))


async def last_pulses(bus: Bus, run: str) -> dict[str, Pulse]:
    """Return the newest pulse of every learner by name; unreadable ones are left out."""
    records = await bus.last_each(Subjects(run).pulse())
    pulses = (_pulse(record, run) for record in records)
    return {pulse.learner: pulse for pulse in pulses if pulse is not None}


async def last_pulse(bus: Bus, run: str, learner: str) -> Pulse | None:
    """Return the newest pulse of one learner; None where there is none that can be read."""
    record = await bus.last(Subjects(run).pulse(learner))
    return None if record is None else _pulse(record, run)


async def pulsed_ns(bus: Bus, run: str, learner: str) -> int | None:
    """Return when the broker stored the newest pulse of a learner; None where it holds none."""
    record = await bus.last(Subjects(run).pulse(learner))
    return None if record is None else record.time_ns


async def follow_pulses(bus: Bus, run: str) -> AsyncGenerator[Pulse]:
    """Yield the newest pulse of every learner, then each new one."""
    follower = bus.follow(Subjects(run).pulse(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for record in follower:
            if (pulse := _pulse(record, run)) is not None:
                yield pulse


async def open_round(bus: Bus, opened: Round) -> None:
    """Ask the learners for contributions; replaces the fragment's previous round."""
    subject = Subjects(opened.run).round(opened.fragment)
    await bus.publish(subject, encode(opened), headers=tracing.headers_for(opened.trace_id))


async def last_rounds(bus: Bus, run: str, plan_digest: int) -> dict[int, Round]:
    """Return the newest round of every fragment; foreign and unreadable ones are left out."""
    found: dict[int, Round] = {}
    for record in await bus.last_each(Subjects(run).round()):
        opened = readable(Round, record, run, plan_digest)
        if opened is not None:
            found[opened.fragment] = opened
    return found


async def follow_rounds(bus: Bus, run: str, plan_digest: int) -> AsyncGenerator[Round]:
    """Yield the newest round of every fragment, then each new one; foreign ones are left out."""
    follower = bus.follow(Subjects(run).round(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for record in follower:
            opened = readable(Round, record, run, plan_digest)
            if opened is not None:
                yield opened


async def publish_syncer_pulse(bus: Bus, pulse: SyncerPulse) -> None:
    """Say that this syncer lives and which shards it holds; replaces its previous pulse."""
    await bus.publish(Subjects(pulse.run).syncer(pulse.syncer), encode(pulse))


async def follow_syncer_pulses(bus: Bus, run: str) -> AsyncGenerator[SyncerPulse]:
    """Yield the newest pulse of every syncer, then each new one; unreadable ones are left out."""
    follower = bus.follow(Subjects(run).syncer(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for record in follower:
            if (pulse := readable(SyncerPulse, record, run)) is not None:
                yield pulse


def _pulse(record: Record, run: str) -> Pulse | None:
    return readable(Pulse, record, run)
