"""Remembers commits as the ledger acknowledged them, and looks whether it still holds them."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from skerry.log.base import Bus


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


@dataclass(slots=True)
class Witness:
    """A reader of the ledger that trusts nobody's memory but its own."""

    bus: Bus
    run: str
    seen: dict[int, bytes] = field(default_factory=dict[int, bytes])

    async def watch(self, after: int) -> None:
        """Remember every commit behind a ledger sequence, until cancelled."""
        follower = self.bus.follow(Subjects(self.run).commits(), after=after)
        async with aclosing(follower):
            async for record in follower:
                self.seen[record.sequence] = _digest(record.payload)

    async def lost(self) -> list[int]:
        """Return the ledger sequences at which what was acknowledged is gone or has changed."""
        stream = Subjects(self.run).stream("LEDGER")
        missing: list[int] = []
        for sequence, digest in sorted(self.seen.items()):
            record = await self.bus.get(stream, sequence)
            if record is None or _digest(record.payload) != digest:
                missing.append(sequence)
        return missing
