"""Whether a contribution that was sent can still be merged, or has left the log unmerged."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from skerry.algorithm.fragments import Plan
from skerry.errors import WireError
from skerry.log import state
from skerry.log.base import Bus, Record
from skerry.protocol.envelope import unseal
from skerry.protocol.subjects import Subjects

STALLED_S = 2.0


@dataclass(frozen=True, slots=True)
class Doubt:
    """A contribution whose round was opened again: ``round_version`` is what it was sent for."""

    learner: str
    incarnation: int
    fragment: int
    identity: int
    round_version: int


@dataclass(slots=True)
class _Chunks:
    """The numbers of the chunks of one contribution that have been seen undamaged."""

    run: str
    plan: Plan
    mark: tuple[int, int]
    seen: set[int] = field(default_factory=set[int])
    count: int = 0

    def feed(self, record: Record) -> None:
        try:
            header, _ = unseal(record.payload, run=self.run, plan=self.plan)
        except WireError:
            return
        if (header.incarnation, header.identity) == self.mark:
            self.seen.add(header.index)
            self.count = header.count

    @property
    def whole(self) -> bool:
        return 0 < self.count == len(self.seen)


async def is_lost(bus: Bus, run: str, plan: Plan, doubt: Doubt) -> bool:
    """Tell whether a contribution is neither resolved nor whole in the log: it will never be.

    Reads what the learner sent behind the fragment's floor. False while in doubt: a contribution
    that is given up and merged after all would count its data twice. Raises BrokerUnavailable.
    """
    manifest = await state.read_manifest(bus, run, plan, doubt.fragment)
    if manifest is None or manifest.commit.version >= doubt.round_version:
        return False
    subjects = Subjects(run)
    subject = subjects.contribution(doubt.fragment, doubt.learner)
    newest = await bus.last(subject)
    if newest is None:
        return True
    chunks = _Chunks(run, plan, (doubt.incarnation, doubt.identity))
    floor = manifest.commit.contrib_floor
    # A floor above what is there was counted in another stream, and says nothing about this one.
    position = floor if floor < newest.sequence else 0
    while position < newest.sequence and not chunks.whole:
        position = await _read_until(bus, subject, position, newest.sequence, chunks)
        if position < newest.sequence:
            found = await bus.get(subjects.stream("CONTRIB"), newest.sequence)
            if found is None:  # retention has dropped it and all before it
                return True
    return not chunks.whole


async def _read_until(bus: Bus, subject: str, position: int, last: int, chunks: _Chunks) -> int:
    """Feed what lies behind ``position`` up to ``last``; return where it came to, or stalled."""
    loop = asyncio.get_running_loop()
    follower = bus.follow(subject, after=position)
    try:
        async with asyncio.timeout(STALLED_S) as stalled, aclosing(follower):
            async for record in follower:
                stalled.reschedule(loop.time() + STALLED_S)
                chunks.feed(record)
                position = record.sequence
                if chunks.whole or position >= last:
                    break
    except TimeoutError:
        pass
    return position
