"""Faults of messages, published by a client of its own: whatever reads the log has to take them.

Contributions come again, damaged or out of order: without a message id, so that the broker's own
memory of duplicates does not catch them. Hostile messages go to subjects that every permission
scheme must leave a learner: pulses under the name of the fault's target, between its own;
contributions and members under a name of the drill's own, so that the target's work keeps its
numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, takewhile
from typing import NamedTuple

from skerry.errors import BusError, WireError
from skerry.log import ledger, run_records
from skerry.log.base import MSG_ID, Record
from skerry.protocol.chunks import seal, unseal
from skerry.protocol.messages import ContributionHeader, Pulse
from skerry.protocol.records import encode, plan_of
from skerry.protocol.subjects import ShardSubjects, Subjects, contributor, stream_of
from skerry_tools.chaos.drilled import (
    Absent,
    DrilledRun,
    Injected,
    Injection,
    NotFired,
    Proof,
    running,
)
from skerry_tools.chaos.plan import LEARNER, Kind

LOOKED_AT = 64
"""Newest messages that are looked through."""
REPEATED = 16
"""Most of those messages that are published again."""
PATIENCE_S = 20.0
"""How long a fault waits for a first contribution: a learner may have begun just now."""
INTRUDER = "intruder"
"""The name under which a drill contributes and joins."""
TINY_S = 1e-320
FAR_STEP = 10**8
MOST_TOKENS = 2**64 - 1
PULSES = 30
"""Hostile pulses of one fault, over three seconds: the target's own come between them."""
PAUSE_S = 0.1
IDS = 64
"""Message ids of a learner that are used up before it gets to them."""
FLOOD = 10_000
FLOOD_BYTES = 64 << 20
"""A flood has at most FLOOD contributions, and FLOOD_BYTES bytes."""


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
                stream = stream_of(subject).removeprefix(f"SKERRY_{drilled.run}_")
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
    found = await newest_contributions(drilled, injection, needed)
    count = max(needed, round(injection.fault.amount * len(found)))
    picked = found[::-1][:count]
    if kind is not Kind.REORDER:
        picked = [found[chance.randrange(len(found))] for _ in range(count)]
    for record in picked:
        damaged = kind is Kind.CORRUPT and bool(record.payload)
        payload = _damaged(record.payload, chance) if damaged else record.payload
        yield FaultMessage(record.subject, payload)


async def newest_contributions(
    drilled: DrilledRun, injection: Injection, needed: int = 1
) -> list[Record]:
    """Return newer contributions to one shard, oldest first; wait for them where there are none.

    They are those of the target where that is a learner, or else of any. NotFired if none come.
    """
    bus, target = drilled.bus, injection.target
    own = running(drilled.entries(), target).kind == LEARNER
    shard = await _some_shard(drilled, injection)
    pattern = shard.contribution(learner=target) if own else shard.contribution()
    held = [r.sequence for r in await bus.last_each(pattern) if contributor(r.subject)[0] >= 0]
    newest = max(held, default=0)
    found: deque[Record] = deque(maxlen=REPEATED)
    coming = bus.follow(pattern, after=max(0, newest - LOOKED_AT))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(coming):
            async for record in coming:
                if contributor(record.subject)[0] >= 0:
                    found.append(record)
                if len(found) >= needed and record.sequence >= newest:
                    return list(found)
    if running(drilled.entries(), target).paused:
        msg = f"{target} is paused"
        raise Absent(msg)
    await bus.streams()  # or the broker is away
    whose = f"of {target} " if own else ""
    msg = f"the log has had {len(found) or 'no'} contribution {whose}for {PATIENCE_S:.0f} s"
    raise NotFired(msg)


async def _some_shard(drilled: DrilledRun, injection: Injection) -> ShardSubjects:
    """Return one of the shards of which the log has contributions."""
    held = {info.name for info in await drilled.bus.streams()}
    shards = map(Subjects(drilled.run).shard, count())
    found = list(takewhile(lambda shard: shard.stream("CONTRIB") in held, shards))
    return injection.chance.choice(found) if found else Subjects(drilled.run).shard(0)


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


def pulses(change: Callable[[Pulse], Pulse]) -> Compose:
    """Return the composer of changed copies of the target's newest pulse."""

    async def compose(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
        subject, pulse = Subjects(drilled.run).pulse(injection.target), None
        for _ in range(PULSES):
            # The newest one may be ours, which no reader believes.
            newest = await run_records.newest(drilled.bus, drilled.run, Pulse, subject)
            pulse = newest or pulse
            if pulse is None:
                msg = f"{injection.target} has sent no pulse"
                raise Absent(msg)
            yield FaultMessage(subject, encode(change(pulse)))
            await asyncio.sleep(PAUSE_S)

    return compose


def contributions(
    change: Callable[[ContributionHeader], ContributionHeader], most: int | None = None
) -> Compose:
    """Return the composer of contributions of one chunk, numbered in order and otherwise valid.

    They are changed copies of the target's newest contribution, of an incarnation that joins.
    """

    async def compose(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
        plan, why = plan_of(await ledger.read_run(drilled.bus, drilled.run)), ""
        for newest in reversed(await newest_contributions(drilled, injection)):
            try:
                chunk, packed = unseal(newest.payload, run=drilled.run, plan=plan)
            except WireError as error:  # as what other faults have sent in its name
                why = why or f"cannot be read: {error}"
                continue
            header = chunk.contribution
            if header is not None and chunk.count == 1:
                break
            why = "has more chunks than one"
        else:
            msg = f"a contribution of {injection.target} {why}"
            raise NotFired(msg)
        joined = await ledger.join(drilled.bus, drilled.run, INTRUDER, "drill", time.time_ns())
        incarnation = joined.incarnation
        shard = Subjects(drilled.run).of_fragment(chunk.fragment, plan.shards)
        subject = shard.contribution(chunk.fragment, INTRUDER)
        sequences = header.cursor_to - header.cursor_from
        for number in range(max(1, min(most or FLOOD, FLOOD_BYTES // len(newest.payload)))):
            start, identity = number * sequences, number + 1
            forged = replace(
                header,
                learner=INTRUDER,
                incarnation=incarnation,
                identity=identity,
                cursor_from=start,
                cursor_to=start + sequences,
            )
            sent = replace(chunk, sender=INTRUDER, incarnation=incarnation, identity=identity)
            sent = replace(sent, contribution=change(forged))
            yield FaultMessage(subject, seal(sent, bytes(packed)))

    return compose


async def status_headers(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield empty messages with headers that look like the broker's own statuses."""
    names = Subjects(drilled.run)
    for subject in (
        names.shard(0).contribution(0, injection.target),
        names.pulse(injection.target),
    ):
        for status in ("100", "404"):
            yield FaultMessage(subject, b"", {"Status": status})


async def guessed_ids(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield empty messages that use up the message ids of the target's next contributions."""
    learner = injection.target
    pulses = Subjects(drilled.run).pulse(learner)
    pulse = await run_records.newest(drilled.bus, drilled.run, Pulse, pulses)
    incarnation, sent = (pulse.incarnation, pulse.contributions) if pulse else (1, 0)
    subject = Subjects(drilled.run).shard(0).contribution(0, learner)
    for identity in range(sent + 1, sent + 1 + IDS):
        yield FaultMessage(subject, b"", {MSG_ID: f"{learner}/{incarnation}/0/{identity}/0"})


async def junk_members(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield bytes where a learner's record of its start would be."""
    yield FaultMessage(Subjects(drilled.run).member(INTRUDER), injection.chance.randbytes(64))


MESSAGES: Mapping[Kind, Inject] = {
    Kind.CORRUPT: publishing(repeated),
    Kind.DUPLICATE: publishing(repeated),
    Kind.REORDER: publishing(repeated),
    Kind.PULSE_TINY_STEP_TIME: publishing(pulses(lambda p: replace(p, step_time_s=TINY_S))),
    Kind.PULSE_FAR_STEP: publishing(pulses(lambda p: replace(p, step=FAR_STEP))),
    Kind.TOKENS_2_64: publishing(contributions(lambda h: replace(h, tokens=MOST_TOKENS), 2)),
    Kind.STATUS_HEADER: publishing(status_headers),
    Kind.DEDUP_IDS: publishing(guessed_ids),
    Kind.CONTRIB_FLOOD: publishing(contributions(lambda h: h)),
    Kind.JUNK_MEMBER: publishing(junk_members),
}
"""Every fault that needs no more than the run's log."""
