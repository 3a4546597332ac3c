"""Fences: who may commit to a shard, by compare-and-set in the log and by nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from skerry.errors import Fenced, WireError
from skerry.log.base import Bus, Deliver, Expect, Record
from skerry.log.ledger import until_granted
from skerry.log.reading import LOOK_PAUSES_S
from skerry.log.run_records import publish
from skerry.protocol.messages import Fence
from skerry.protocol.records import decode, subject_of
from skerry.protocol.subjects import Subjects


class HeldFence(NamedTuple):
    """The newest fence of a shard: its token, who took it and when, by that syncer's clock.

    ``holder`` is '' and ``taken_ns`` 0 if the record is unreadable.
    """

    shard: int
    token: int
    holder: str
    taken_ns: int = 0


async def take(
    bus: Bus, run: str, shard: int, *, holder: str, now_ns: int, over: int | None = None
) -> int:
    """Take a shard's fence and return the new token.

    With ``over`` it is taken from that token only (0: none); raises Conflict if it is no longer the
    newest. Without, it is taken from any holder; raises BusError if others keep getting in between.
    """
    fence = Fence(run=run, shard=shard, holder=holder, taken_ns=now_ns)

    async def attempt() -> int:
        token = token_of(await newest(bus, run, shard)) if over is None else over
        receipt = await publish(
            bus,
            fence,
            msg_id=f"fence/{shard}/{holder}/{token}/{now_ns}",
            expect=Expect(subject_of(fence), token),
        )
        return receipt.sequence

    if over is not None:
        return await attempt()
    return await until_granted(attempt, f"The fence of shard {shard} of run {run!r}")


async def newest(bus: Bus, run: str, shard: int) -> HeldFence | None:
    """Return the newest fence of a shard, or None if it was never taken."""
    record = await bus.last(Subjects(run).shard(shard).fence())
    return _held(record, run) if record else None


async def settled(bus: Bus, run: str, shard: int, known: int) -> HeldFence | None:
    """Return the newest fence of a shard; if it is below ``known``, look again for a while.

    A result that is still below ``known``, or None, means that the log has lost that fence.
    """
    held = None
    for pause_s in LOOK_PAUSES_S:
        await asyncio.sleep(pause_s)
        held = await newest(bus, run, shard)
        if token_of(held) >= known:
            break
    return held


def token_of(held: HeldFence | None) -> int:
    """Return the token of a fence; 0 where there is none."""
    return held.token if held is not None else 0


async def follow_fence(bus: Bus, run: str, shard: int) -> AsyncGenerator[HeldFence]:
    """Yield the newest fence of a shard, then each new one."""
    subject = Subjects(run).shard(shard).fence()
    async with aclosing(bus.follow(subject, deliver=Deliver.LAST_PER_SUBJECT)) as follower:
        async for record in follower:
            yield _held(record, run)


def overtaken(run: str, shard: int, holder: str) -> Fenced:
    """Return the error of a writer whose fence is no longer the newest.

    Another fence is the newest, or the log has lost this one: the writer has to find out which.
    """
    return Fenced(
        f"Shard {shard} of run {run!r} has another fence than that of {holder!r}, or none:"
        f" {holder!r} steps down."
    )


def _held(record: Record, run: str) -> HeldFence:
    shard = int(record.subject.split(".")[-2])
    try:
        fence = decode(Fence, record.payload, run=run)
    except WireError:
        return HeldFence(shard, record.sequence, "")
    return HeldFence(shard, record.sequence, fence.holder, fence.taken_ns)
