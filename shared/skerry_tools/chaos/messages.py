"""Faults of messages, published by a client of its own: whatever reads the log has to take them.

Contributions come again, damaged or out of order: without a message id, so that the broker's own
memory of duplicates does not catch them. ``hostile`` adds what an attacker sends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from skerry.errors import BusError
from skerry.protocol.subjects import Subjects, contributor, stream_of
from skerry_tools.chaos.drilled import Absent, DrilledRun, Injected, Injection, NotFired, running
from skerry_tools.chaos.plan import LEARNER, Kind

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator

    from skerry.log.base import Record
    from skerry_tools.chaos.drilled import Proof

LOOKED_AT = 64
"""Newest messages that are looked through,"""
REPEATED = 16
"""and most of them that are published again."""
PATIENCE_S = 20.0
"""How long a fault waits for a first contribution: a learner may have begun just now."""


class FaultMessage(NamedTuple):
    """A message that a fault publishes."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None = None


Compose = Callable[[DrilledRun, Injection], AsyncIterator[FaultMessage]]
Inject = Callable[[DrilledRun, Injection], Injected]


def publishing(compose: Compose) -> Inject:
    """Return the fault that publishes what ``compose`` yields.

    It has fired once the broker has stored all of it, or what it took before it was away. What has
    been published stays in the log.
    """

    @asynccontextmanager
    async def inject(drilled: DrilledRun, injection: Injection) -> AsyncGenerator[Proof]:
        stored: list[str] = []
        try:
            async for message in compose(drilled, injection):
                subject, payload, headers = message
                receipt = await drilled.bus.publish(subject, payload, headers=headers)
                stream = stream_of(subject).rpartition("_")[2]
                stored.append(f"from sequence {receipt.sequence} of {stream}")
        except BusError as error:
            if not stored:
                msg = f"the broker was away ({error})"
                raise Absent(msg) from error

        async def proof() -> str:
            return f"{len(stored)} stored, {stored[0]}"

        yield proof

    return inject


async def repeated(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield copies of newer contributions: the target's own if it is a learner, or any."""
    chance, kind = injection.chance, injection.fault.kind
    needed = 2 if kind is Kind.REORDER else 1  # of one alone there is no other order
    found = await newest_contributions(drilled, injection.target, needed)
    count = max(needed, round(injection.fault.amount * len(found)))
    picked = (
        found[::-1][:count]
        if kind is Kind.REORDER
        else [found[chance.randrange(len(found))] for _ in range(count)]
    )
    for record in picked:
        damaged = kind is Kind.CORRUPT and bool(record.payload)
        payload = _damaged(record.payload, chance) if damaged else record.payload
        yield FaultMessage(record.subject, payload)


async def newest_contributions(drilled: DrilledRun, target: str, needed: int = 1) -> list[Record]:
    """Return newer contributions, oldest first; where there are none yet, wait for the next.

    They are those of ``target`` where that is a learner, or else of any. NotFired if none come.
    """
    own = running(drilled.entries(), target).kind == LEARNER
    learner = target if own else None
    stream = Subjects(drilled.run).stream("CONTRIB")
    held = next((s for s in await drilled.bus.streams() if s.name == stream), None)
    last = held.last_seq if held else 0
    first = max(held.first_seq, last - LOOKED_AT) if held else 1
    found: list[Record] = []
    for sequence in range(last, first - 1, -1):
        record = await drilled.bus.get(stream, sequence)
        if record is not None and len(found) < REPEATED and _is_from(record, learner):
            found.insert(0, record)
    if len(found) < needed:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await _wait(drilled, found, needed, learner, last)
    if len(found) < needed:
        if running(drilled.entries(), target).paused:
            msg = f"{target} is paused"
            raise Absent(msg)
        await drilled.bus.streams()  # or the broker is away
        whose = f"of {target} " if learner else ""
        msg = f"the log has had {len(found) or 'no'} contribution {whose}for {PATIENCE_S:.0f} s"
        raise NotFired(msg)
    return found


async def _wait(
    drilled: DrilledRun, found: list[Record], needed: int, learner: str | None, after: int
) -> None:
    """Add the contributions after a sequence, until there are enough."""
    names = Subjects(drilled.run)
    pattern = names.contribution(learner=learner) if learner else names.contribution()
    async with contextlib.aclosing(drilled.bus.follow(pattern, after=after)) as coming:
        async for record in coming:
            if _is_from(record, learner):
                found.append(record)
            if len(found) >= needed:
                return


def _is_from(record: Record, learner: str | None) -> bool:
    fragment, sender = contributor(record.subject)
    return fragment >= 0 and learner in {None, sender}


def _damaged(payload: bytes, chance: random.Random) -> bytes:
    """Return a payload with bits turned, cut short or grown."""
    at = chance.randrange(len(payload))
    match chance.randrange(3):
        case 0:
            turned = payload[at] ^ (1 << chance.randrange(8))
            return payload[:at] + bytes([turned]) + payload[at + 1 :]
        case 1:
            return payload[:at]
        case _:
            return payload + payload[at:]
