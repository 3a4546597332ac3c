"""One fragment's contributions with all they carry, read in the order in which they arrived."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.log.contributions import Contribution, Inbox
from skerry_tools.audit.log import newest, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Container

    from skerry.log.base import Record
    from skerry_tools.audit.log import Log

Key = tuple[str, int, int]
"""Learner, incarnation and identity."""


def key_of(contribution: Contribution) -> Key:
    """Return what tells a contribution from every other one to its fragment."""
    told = contribution.header
    return told.learner, told.incarnation, told.identity


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole contribution and when the broker took its last chunk."""

    contribution: Contribution
    time_ns: int


@dataclass(slots=True)
class Payloads:
    """Reads no further than it is asked to; ``held`` are contributions nobody has forgotten yet."""

    records: AsyncGenerator[Record]
    inbox: Inbox
    held: dict[Key, Arrived] = field(default_factory=dict[Key, "Arrived"])
    position: int = 0
    newest_ns: int = 0
    ended: bool = False

    async def fetch(self, key: Key, through: int) -> Arrived | None:
        """Return a contribution that was whole by a sequence of CONTRIB; None if it is gone."""
        while key not in self.held and self.position < through and await self._advance():
            pass
        return self.held.get(key)

    async def until(self, at_ns: int) -> None:
        """Read on until everything that arrived up to a moment is held."""
        while self.newest_ns <= at_ns and await self._advance():
            pass

    def forget(self, floor: int, only: Container[Key] | None = None) -> None:
        """Drop what lies at or below a floor: no later commit can name it; ``only`` these of it."""
        done = [
            key
            for key, item in self.held.items()
            if item.contribution.sequence_last <= floor and (only is None or key in only)
        ]
        for key in done:
            del self.held[key]

    async def _advance(self) -> bool:
        record = None if self.ended else await anext(self.records, None)
        if record is None:
            self.ended = True
            return False
        self.position, self.newest_ns = record.sequence, record.time_ns
        got = self.inbox.feed(record)
        if isinstance(got, Contribution):
            self.held.setdefault(key_of(got), Arrived(got, record.time_ns))
        return True


@asynccontextmanager
async def payloads(log: Log, fragment: int) -> AsyncGenerator[Payloads]:
    """Read the contributions to one fragment that the window holds now."""
    pattern = log.subjects.contributions(fragment)
    records = read(log.bus, pattern, await newest(log.bus, pattern))
    async with aclosing(records):
        yield Payloads(records, Inbox(log.run, log.plan))
