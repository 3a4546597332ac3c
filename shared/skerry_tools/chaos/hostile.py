"""Messages of a hostile learner: only subjects that every permission scheme must leave a learner.

Pulses go out under the name of the fault's target, between its own. Contributions and members go
out under a name of the drill's own, so that the target's own work keeps its numbers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from skerry.errors import WireError
from skerry.log import ledger, run_records
from skerry.log.base import MSG_ID
from skerry.protocol.chunks import seal, unseal
from skerry.protocol.messages import Pulse
from skerry.protocol.records import encode, plan_of
from skerry.protocol.subjects import Subjects
from skerry_tools.chaos.drilled import Absent, NotFired
from skerry_tools.chaos.messages import FaultMessage, newest_contributions, publishing, repeated
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from skerry.protocol.messages import ContributionHeader
    from skerry_tools.chaos.drilled import DrilledRun, Injection
    from skerry_tools.chaos.messages import Compose, Inject

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
"""A flood has at most so many contributions, and so many bytes."""


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
        record = await ledger.read_run(drilled.bus, drilled.run)
        newest = (await newest_contributions(drilled, injection.target))[-1]
        try:
            chunk, packed = unseal(newest.payload, run=drilled.run, plan=plan_of(record))
        except WireError as error:
            msg = f"the newest contribution of {injection.target} cannot be read: {error}"
            raise NotFired(msg) from error
        header = chunk.contribution
        if header is None or chunk.count != 1:
            msg = f"a contribution of {injection.target} has more chunks than one"
            raise NotFired(msg)
        known = (await ledger.members(drilled.bus, drilled.run)).get(INTRUDER)
        incarnation = known.incarnation + 1 if known else 1
        await ledger.join(drilled.bus, drilled.run, INTRUDER, "drill", incarnation)
        subject = Subjects(drilled.run).contribution(chunk.fragment, INTRUDER)
        sequences = header.cursor_to - header.cursor_from
        for number in range(max(1, min(most or FLOOD, FLOOD_BYTES // len(newest.payload)))):
            forged = replace(
                header,
                learner=INTRUDER,
                incarnation=incarnation,
                identity=number + 1,
                cursor_from=number * sequences,
                cursor_to=(number + 1) * sequences,
            )
            sent = replace(
                chunk,
                sender=INTRUDER,
                incarnation=incarnation,
                identity=number + 1,
                contribution=change(forged),
            )
            yield FaultMessage(subject, seal(sent, bytes(packed)))

    return compose


async def status_headers(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield empty messages with headers that look like the broker's own statuses."""
    names = Subjects(drilled.run)
    for subject in (names.contribution(0, injection.target), names.pulse(injection.target)):
        for status in ("100", "404"):
            yield FaultMessage(subject, b"", {"Status": status})


async def guessed_ids(drilled: DrilledRun, injection: Injection) -> AsyncIterator[FaultMessage]:
    """Yield empty messages that use up the message ids of the target's next contributions."""
    learner = injection.target
    subject = Subjects(drilled.run).pulse(learner)
    pulse = await run_records.newest(drilled.bus, drilled.run, Pulse, subject)
    incarnation, sent = (pulse.incarnation, pulse.contributions) if pulse else (1, 0)
    subject = Subjects(drilled.run).contribution(0, learner)
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
