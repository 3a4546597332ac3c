"""Faults of messages: contributions that are stored already come again, damaged or out of order.

They are published by a client of its own and without a message id, so that the broker's own memory
of duplicates does not catch them: whoever reads the log has to.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import BusError
from skerry.protocol.subjects import Subjects, contributor
from skerry_tools.chaos.ground import Absent, NotFired
from skerry_tools.chaos.plan import Kind

if TYPE_CHECKING:
    import random

    from skerry.log.base import Record, StreamInfo
    from skerry_tools.chaos.ground import Ground

LOOKED_AT = 64
"""Newest messages that are looked through,"""
REPEATED = 16
"""and most of them that are published again."""
PATIENCE_S = 20.0
"""How long a fault waits for a first contribution: a learner may have begun just now."""


@dataclass(slots=True)
class Messages:
    """Publishes copies of newer contributions: of the target's own if it is a learner, or any."""

    ground: Ground
    target: str
    kind: Kind
    share: float
    chance: random.Random
    _stored: list[int] = field(default_factory=list[int])

    async def begin(self) -> None:
        own = self.ground.entry(self.target).kind == "learner"
        try:
            found = await self._found(self.target if own else None)
            for record in self._picked(found):
                payload = self._payload(record.payload)
                receipt = await self.ground.bus.publish(record.subject, payload)
                self._stored.append(receipt.sequence)
        except BusError as error:
            if not self._stored:
                msg = f"the broker was away ({error})"
                raise Absent(msg) from error

    async def proof(self) -> str:
        """Count what the broker has stored of it."""
        return f"{len(self._stored)} stored, from sequence {self._stored[0]} of CONTRIB"

    async def end(self) -> None:
        """What has been published stays in the log."""

    async def _found(self, learner: str | None) -> list[Record]:
        """Return contributions, oldest first; where there is none yet, wait for the next."""
        stream = Subjects(self.ground.run).stream("CONTRIB")
        held = next((s for s in await self.ground.bus.streams() if s.name == stream), None)
        found = await self._newest(stream, held, learner) if held else []
        needed = self._needed
        if len(found) < needed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await self._wait(found, needed, learner, held.last_seq if held else 0)
        if len(found) < needed:
            if self.ground.entry(self.target).paused:
                msg = f"{self.target} is paused"
                raise Absent(msg)
            await self.ground.bus.streams()  # or the broker is away
            whose = f"of {self.target} " if learner else ""
            msg = f"the log has had {len(found) or 'no'} contribution {whose}for {PATIENCE_S:.0f} s"
            raise NotFired(msg)
        return found

    @property
    def _needed(self) -> int:
        """Of one alone there is no other order."""
        return 2 if self.kind is Kind.REORDER else 1

    async def _wait(
        self, found: list[Record], needed: int, learner: str | None, after: int
    ) -> None:
        """Add the contributions that come behind a sequence, until there are enough."""
        names = Subjects(self.ground.run)
        pattern = names.contributions_of(learner) if learner else names.contributions()
        async with contextlib.aclosing(self.ground.bus.follow(pattern, after=after)) as coming:
            async for record in coming:
                if contributor(record.subject)[0] >= 0:
                    found.append(record)
                if len(found) >= needed:
                    return

    async def _newest(self, stream: str, held: StreamInfo, learner: str | None) -> list[Record]:
        """Return contributions, oldest first, that lie among the newest messages."""
        found: list[Record] = []
        for sequence in range(
            held.last_seq, max(held.first_seq, held.last_seq - LOOKED_AT) - 1, -1
        ):
            record = await self.ground.bus.get(stream, sequence)
            if record is None or len(found) == REPEATED:
                continue
            fragment, sender = contributor(record.subject)
            if fragment >= 0 and learner in {None, sender}:
                found.append(record)
        return found[::-1]

    def _picked(self, found: list[Record]) -> list[Record]:
        """Return which to publish, in that order."""
        count = max(self._needed, round(self.share * len(found)))
        if self.kind is Kind.REORDER:
            return found[::-1][:count]
        return [found[self.chance.randrange(len(found))] for _ in range(count)]

    def _payload(self, payload: bytes) -> bytes:
        """Return the copy: the same, or with bits turned, cut short or grown."""
        if self.kind is not Kind.CORRUPT or not payload:
            return payload
        at = self.chance.randrange(len(payload))
        match self.chance.randrange(3):
            case 0:
                turned = payload[at] ^ (1 << self.chance.randrange(8))
                return payload[:at] + bytes([turned]) + payload[at + 1 :]
            case 1:
                return payload[:at]
            case _:
                return payload + payload[at:]
