"""What a drill checks of its own: commits that stay, processes that run and stay."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Collection

    from skerry.log.base import Bus
    from skerry_tools.chaos.drilled import DrilledRun

LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be true at the end; ``detail`` is for people."""

    name: str
    ok: bool
    detail: str


@dataclass(slots=True)
class CommitCheck:
    """Remembers commits as the ledger acknowledged them, and checks that it still holds them."""

    bus: Bus
    run: str
    seen: dict[int, bytes] = field(default_factory=dict[int, bytes])

    async def watch(self, after: int) -> None:
        """Remember every commit after a ledger sequence, until cancelled."""
        follower = self.bus.follow(Subjects(self.run).commit(), after=after)
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


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


@dataclass(slots=True)
class LivenessCheck:
    """Checks that the processes of these names run, hear their broker, and stay.

    ``note`` is called once everything has been healed. What a process makes of what it hears is
    for ``convergence``, which reads it from the log.
    """

    drilled: DrilledRun
    names: Collection[str]
    _heard: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _starts: dict[str, str] = field(default_factory=dict[str, str], init=False)

    async def note(self) -> None:
        """Remember how much every process has heard from its broker by now."""
        self._heard = await self._down_bytes()

    async def checks(self, deadline_s: float) -> list[Check]:
        """Wait until every process runs and has heard something since; one check for each."""
        await self.drilled.settle()
        until = asyncio.get_running_loop().time() + deadline_s
        while True:
            heard = await self._down_bytes()
            found = [self._check(name, heard) for name in sorted(self.names)]
            if all(check.ok for check in found) or asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(LOOK_S)
        entries = self.drilled.entries()
        self._starts = {name: entries[name].which for name in self.names if name in entries}
        return found

    async def ended(self) -> list[str]:
        """Return the processes that have ended since ``checks``."""
        await self.drilled.settle()
        now = {name: entry.which for name, entry in self.drilled.entries().items() if entry.alive}
        return sorted(name for name, which in self._starts.items() if now.get(name) != which)

    def _check(self, name: str, heard: dict[str, int]) -> Check:
        title, entry = f"{name} runs", self.drilled.entries().get(name)
        if entry is None or not entry.alive:
            return Check(title, ok=False, detail="it does not")
        if entry.paused:
            return Check(title, ok=False, detail=f"{entry.which} is stopped")
        if name not in heard:
            return Check(title, ok=True, detail=entry.which)
        more = heard[name] - self._heard.get(name, 0)
        return Check(title, more > 0, f"{entry.which}, {more} bytes from the broker since healing")

    async def _down_bytes(self) -> dict[str, int]:
        routes = await self.drilled.routes()
        return {name: int(route["bytes_down"]) for name, route in routes.items()}
