"""One fragment's contributions with all they carry, read in the order in which they arrived."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.algorithm.merge_numpy import OuterGradient
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry_tools.audit.log import newest, read

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Container

    from skerry.log.base import Record
    from skerry.protocol.messages import ContributionHeader
    from skerry_tools.audit.log import RunLog

Key = tuple[str, int, int]
"""Learner, incarnation and identity: what tells a contribution from all others of its fragment."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole contribution and when the broker took its last chunk."""

    contribution: Contribution
    time_ns: int

    @property
    def header(self) -> ContributionHeader:
        return self.contribution.header

    @property
    def key(self) -> Key:
        return self.header.learner, self.header.incarnation, self.header.identity

    @property
    def merged(self) -> OuterGradient:
        """The contribution as a merge takes it."""
        return OuterGradient(self.contribution.scheme, self.contribution.planes, self.header.norms)


@dataclass(slots=True)
class Payloads:
    """Reads no further than it is asked to; ``held`` are contributions still to be used."""

    records: AsyncGenerator[Record]
    assembler: ContributionAssembler
    held: dict[Key, Arrived] = field(default_factory=dict[Key, "Arrived"])
    position: int = 0
    newest_ns: int = 0

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
        for key, item in list(self.held.items()):
            if item.contribution.sequence_last <= floor and (only is None or key in only):
                del self.held[key]

    async def _advance(self) -> bool:
        record = await anext(self.records, None)
        if record is None:
            return False
        self.position, self.newest_ns = record.sequence, record.time_ns
        got = self.assembler.feed(record)
        if isinstance(got, Contribution):
            arrived = Arrived(got, record.time_ns)
            self.held.setdefault(arrived.key, arrived)
        return True


@asynccontextmanager
async def payloads(log: RunLog, fragment: int) -> AsyncGenerator[Payloads]:
    """Read the contributions to one fragment that the window holds now."""
    pattern = log.subjects.contribution(fragment)
    records = read(log.bus, pattern, await newest(log.bus, pattern))
    async with aclosing(records):
        yield Payloads(records, ContributionAssembler(log.run, log.plan))
